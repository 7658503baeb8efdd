"""kvpress's wrappers around our press: refused, clearly, before any result is used."""

from __future__ import annotations

import kvpress
import pytest
import torch
from harness import ask, make_press, prefill, refused
from tiny_models import build_model, build_tokenizer, random_ids
from transformers import DynamicCache

from kvzip_press import KVzipPress

IDS = random_ids(60)

NEED_A_SCORER = {
    "AdaKVPress": lambda press: kvpress.AdaKVPress(press),
    "BlockPress": lambda press: kvpress.BlockPress(press),
    "ChunkPress": lambda press: kvpress.ChunkPress(press),
    "CriticalKVPress": lambda press: kvpress.CriticalKVPress(press),
    "CriticalAdaKVPress": lambda press: kvpress.CriticalAdaKVPress(press),
    "DecodingPress": lambda press: kvpress.DecodingPress(base_press=press),
    "KeyRerotationPress": lambda press: kvpress.KeyRerotationPress(press),
    "PerLayerCompressionPress": lambda press: kvpress.PerLayerCompressionPress(press, [0.3] * 4),
}
TAKE_ANY_PRESS = {
    "ComposedPress": lambda press: kvpress.ComposedPress([press]),
    "ComposedPress, first another": lambda press: kvpress.ComposedPress([kvpress.KnormPress(0.3), press]),
    "PrefillDecodingPress": lambda press: kvpress.PrefillDecodingPress(prefilling_press=press),
}


@pytest.mark.parametrize("name", NEED_A_SCORER)
def test_wrappers_of_scorers_refuse_it_at_once(name):
    """Ours gives no scores of a layer's own: kvpress's wrappers refuse it when they are made, as it is no scorer."""
    assert not isinstance(KVzipPress(), kvpress.ScorerPress)
    with pytest.raises(AssertionError) as caught:
        NEED_A_SCORER[name](KVzipPress())
    # KeyRerotationPress asserts without a message; its assertion names the class itself
    assert "ScorerPress" in str(caught.value) or name == "KeyRerotationPress"


@pytest.mark.parametrize("name", TAKE_ANY_PRESS)
def test_wrappers_of_any_press_are_refused_when_entered(name):
    """Wrappers that only run hooks would silently not compress: an error before the first forward, naming them."""
    model = build_model("llama")
    wrapper = TAKE_ANY_PRESS[name](make_press())
    with refused(model, "can't run inside another press.*use it alone"):
        prefill(model, IDS, wrapper)
    assert all(not module._forward_hooks for module in model.modules())


def test_a_hook_that_is_called_directly_refuses_too(model):
    """A wrapper of someone else's that skips post_init_from_model meets the same error at the first layer."""
    layer = model.model.layers[0].self_attn
    handle = layer.register_forward_hook(KVzipPress(tokenizer=build_tokenizer()).forward_hook, with_kwargs=True)
    with pytest.raises(ValueError, match="can't run inside another press"), torch.no_grad():
        model.model(input_ids=IDS, past_key_values=DynamicCache())
    handle.remove()


def test_presses_of_kvpress_and_ours_take_turns(model):
    """kvpress's own presses and ours take turns on one model without changing each other's results."""
    question = random_ids(5, seed=3)
    press, other = make_press(ratio=0.3), kvpress.KnormPress(compression_ratio=0.5)
    ours, theirs = prefill(model, IDS, press), prefill(model, IDS, other)
    expected_ours, expected_theirs = ask(model, ours, question), ask(model, theirs, question, 0)
    for _ in range(2):
        assert torch.equal(ask(model, prefill(model, IDS, press), question), expected_ours)
        assert torch.equal(ask(model, prefill(model, IDS, other), question, 0), expected_theirs)
        assert torch.equal(ask(model, ours, question), expected_ours)
