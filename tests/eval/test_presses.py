import kvpress
import pytest
import torch

from kvzip_press.eval.budget import (
    fit_budget,
    kept_pairs,
    kept_target,
    prefix_length,
    protected_length,
    ratio_keeping,
    ratio_removing,
)
from kvzip_press.eval.fidelity import prefill
from kvzip_press.eval.presses import PRESSES, make_press, variants

LAYERS, HEADS, LENGTH = 3, 2, 120
BASELINES = [name for name in PRESSES if name != "full" and not name.startswith("kvzip")]
OURS = [name for name in PRESSES if name.startswith("kvzip")]


@pytest.fixture
def context(tiny):
    _, tokenizer = tiny
    ids = tokenizer.encode("<s>system: help\nuser: " + "The river is open. " * 40, add_special_tokens=False)
    return torch.tensor([ids[:LENGTH]])


def test_ratios_give_the_counts_by_both_of_kvpress_formulas():
    for n in (7, 120, 90 * 1533, 90 * 8000):
        for removed in {0, 1, n // 3, n // 2, n - 1}:
            assert int(n * ratio_removing(removed, n)) == removed
            assert kvpress.utils.compute_n_kept(n, ratio_keeping(n - removed, n)) == n - removed
    with pytest.raises(ValueError, match="0 to 6 of 7 pairs"):
        ratio_removing(7, 7)


def test_kept_target_by_hand():
    assert kept_target(context_length=110, protected_length=10, n_heads=6, ratio=0.3) == 60 + 180
    assert kept_target(context_length=110, protected_length=10, n_heads=6, ratio=1.0) == 660


def test_prefix_is_the_template_before_the_text(tiny):
    _, tokenizer = tiny
    assert prefix_length(tokenizer) == protected_length(tokenizer) == len("system: help\nuser: ") + 1
    tokenizer.chat_template = None
    assert prefix_length(tokenizer) == 0
    assert protected_length(tokenizer) == 4


@pytest.mark.peer
@pytest.mark.parametrize("ratio", [0.2, 0.37, 0.8, 1.0])
@pytest.mark.parametrize("name", BASELINES)
def test_baselines_keep_as_many_pairs_as_ours(tiny, context, name, ratio):
    model, tokenizer = tiny
    protected = protected_length(tokenizer)
    press = make_press(name, ratio, tokenizer)
    fit_budget(press, ratio, LENGTH, protected, LAYERS, HEADS)
    kept = kept_pairs(model, prefill(model, context, press))
    target = kept_target(LENGTH, protected, LAYERS * HEADS, ratio)
    if name == "kvpress-kvzip-layerwise":
        assert abs(kept - target) <= LAYERS / 2
    elif isinstance(press, kvpress.KVzipPress):
        assert kept == target
    else:
        assert abs(kept - target) <= LAYERS * HEADS / 2


@pytest.mark.parametrize("ratio", [0.37, 1.0])
@pytest.mark.parametrize("name", OURS)
def test_ours_keep_the_target(tiny, context, name, ratio):
    model, tokenizer = tiny
    kept = kept_pairs(model, prefill(model, context, make_press(name, ratio, tokenizer)))
    target = kept_target(LENGTH, protected_length(tokenizer), LAYERS * HEADS, ratio)
    units = {"kvzip-pair-layer": LAYERS, "kvzip-pair-uniform": LAYERS * HEADS}.get(name, 0)
    assert abs(kept - target) <= units / 2


def test_full_compresses_nothing(tiny, context):
    model, tokenizer = tiny
    assert make_press("full", 1.0, tokenizer) is None
    assert kept_pairs(model, prefill(model, context, None)) == LENGTH * LAYERS * HEADS


def test_unknown_names_list_near_ones(tiny):
    with pytest.raises(ValueError, match="unknown press 'snapkw': did you mean snapkv"):
        make_press("snapkw", 0.3, tiny[1])
    with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\], got 1.5"):
        make_press("snapkv", 1.5, tiny[1])


def test_full_has_no_ratios():
    assert variants(["full", "knorm", "full"], [0.3, 0.5]) == [("full", 1.0), ("knorm", 0.3), ("knorm", 0.5)]
