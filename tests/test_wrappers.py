"""kvpress's wrappers around our press: refused, clearly, before any result is used."""

import kvpress
import pytest
import torch
from harness import ask, make_press, prefill, refused
from tiny_models import random_ids

from kvzip_press import KVzipPress

IDS = random_ids(60)

# Class of kvpress -> arguments after the press
NEED_A_SCORER = {
    **dict.fromkeys(["AdaKVPress", "BlockPress", "ChunkPress", "CriticalKVPress", "CriticalAdaKVPress"], ()),
    **dict.fromkeys(["DecodingPress", "KeyRerotationPress"], ()),
    "PerLayerCompressionPress": ([0.3] * 4,),
}


@pytest.mark.parametrize("name", NEED_A_SCORER)
def test_wrappers_of_scorers_refuse_it_at_once(name):
    """Ours gives no scores of a layer's own: kvpress's wrappers refuse it when they are made, as it is no scorer."""
    assert not isinstance(KVzipPress(), kvpress.ScorerPress)
    with pytest.raises(AssertionError) as caught:
        getattr(kvpress, name)(KVzipPress(), *NEED_A_SCORER[name])
    # KeyRerotationPress asserts without a message; its assertion names the class itself
    assert "ScorerPress" in str(caught.value) or name == "KeyRerotationPress"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda press: kvpress.ComposedPress([press]),
        lambda press: kvpress.ComposedPress([kvpress.KnormPress(0.3), press]),
        kvpress.PrefillDecodingPress,
    ],
)
def test_wrappers_of_any_press_are_refused_when_entered(model, wrap):
    """Wrappers that only run hooks would silently not compress: an error before the first forward, naming them."""
    with refused(model, "can't run inside another press.*use it alone"):
        prefill(model, IDS, wrap(make_press()))
    assert all(not module._forward_hooks for module in model.modules())


def test_a_hook_that_is_called_directly_refuses_too(model):
    """A wrapper of someone else's that skips post_init_from_model meets the same error at the first layer."""
    layer = model.model.layers[0].self_attn
    layer.register_forward_hook(make_press().forward_hook, with_kwargs=True)
    with pytest.raises(ValueError, match="can't run inside another press"):
        prefill(model, IDS)


def test_presses_of_kvpress_and_ours_take_turns(model):
    question = random_ids(5, seed=3)
    press, other = make_press(ratio=0.3), kvpress.KnormPress(compression_ratio=0.5)
    ours, theirs = prefill(model, IDS, press), prefill(model, IDS, other)
    expected_ours, expected_theirs = ask(model, ours, question), ask(model, theirs, question, 0)
    for _ in range(2):
        assert torch.equal(ask(model, prefill(model, IDS, press), question), expected_ours)
        assert torch.equal(ask(model, prefill(model, IDS, other), question, 0), expected_theirs)
        assert torch.equal(ask(model, ours, question), expected_ours)
