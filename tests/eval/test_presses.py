from contextlib import nullcontext

import kvpress
import pytest
import torch
from harness import prefill

from kvzip_press import HeadScores
from kvzip_press.eval.presses import budget
from kvzip_press.eval.presses.budget import kept_pairs, kept_target, protected_length
from kvzip_press.eval.presses.registry import PRESSES, check_press, make_press, press_parameters, variants
from kvzip_press.eval.run.sweep import eager_attention

LAYERS, HEADS, LENGTH = 3, 2, 120
# duo-attention downloads its patterns
BASELINES = [name for name in PRESSES if name not in ("full", "duo-attention") and not name.startswith("kvzip")]
OURS = [name for name in PRESSES if name.startswith("kvzip") and name != "kvzip-head"]


@pytest.fixture
def context(toy):
    _, tokenizer = toy
    ids = tokenizer.encode("<s><user>" + "The river is open. " * 40, add_special_tokens=False)
    return torch.tensor([ids[:LENGTH]])


def test_ratios_give_the_counts_by_both_of_kvpress_formulas():
    for n in (7, 120, 90 * 1533, 90 * 8000):
        for removed in {0, 1, n // 3, n // 2, n - 1}:
            assert int(n * budget.ratio_removing(removed, n)) == removed
            assert kvpress.utils.compute_n_kept(n, budget.ratio_keeping(n - removed, n)) == n - removed
    with pytest.raises(ValueError, match="0 to 6 of 7 pairs"):
        budget.ratio_removing(7, 7)


def test_kept_target_by_hand():
    assert kept_target(context_length=110, protected_length=10, n_heads=6, ratio=0.3) == 60 + 180
    assert kept_target(context_length=110, protected_length=10, n_heads=6, ratio=1.0) == 660


def test_prefix_is_the_template_before_the_text(toy):
    _, tokenizer = toy
    assert budget.prefix_length(tokenizer) == protected_length(tokenizer) == len("<user>") + 1
    tokenizer.chat_template = None
    assert budget.prefix_length(tokenizer) == 1, "the BOS token"
    assert protected_length(tokenizer) == budget.N_SINK == kvpress.KVzipPress().n_sink


def target_of(tokenizer, ratio):
    return kept_target(LENGTH, protected_length(tokenizer), LAYERS * HEADS, ratio)


@pytest.mark.peer
@pytest.mark.parametrize("ratio", [0.2, 0.37, 0.8, 1.0])
@pytest.mark.parametrize("name", BASELINES)
def test_baselines_keep_as_many_pairs_as_ours(toy, context, name, ratio):
    model, tokenizer = toy
    press = make_press(name, ratio, tokenizer)
    budget.fit_budget(press, ratio, LENGTH, protected_length(tokenizer), LAYERS, HEADS)
    with eager_attention(model) if PRESSES[name].eager else nullcontext():
        kept = kept_pairs(model, prefill(model, context, press))
    budgets = 0 if isinstance(press, kvpress.KVzipPress) else LAYERS * HEADS
    budgets = LAYERS if name == "kvpress-kvzip-layerwise" else budgets
    assert abs(kept - target_of(tokenizer, ratio)) <= budgets / 2


@pytest.mark.parametrize("ratio", [0.37, 1.0])
@pytest.mark.parametrize("name", OURS)
def test_ours_keep_the_target(toy, context, name, ratio):
    model, tokenizer = toy
    kept = kept_pairs(model, prefill(model, context, make_press(name, ratio, tokenizer)))
    budgets = {"layer": LAYERS, "uniform": LAYERS * HEADS}.get(name.split("-")[-1], 0)
    assert abs(kept - target_of(tokenizer, ratio)) <= budgets / 2


def test_full_compresses_nothing(toy, context):
    model, tokenizer = toy
    assert make_press("full", 1.0, tokenizer) is None
    assert kept_pairs(model, prefill(model, context, None)) == LENGTH * LAYERS * HEADS


@pytest.mark.parametrize(
    ("name", "ratio", "message"),
    [
        ("snapkw", 0.3, "unknown press 'snapkw': did you mean snapkv"),
        ("kvzip-pairlayer", 0.3, "kvzip-pair-layer"),
        ("snapkv", 1.5, r"ratio must be in \(0, 1\], got 1.5"),
        ("kvzip-head", 0.5, "give --head-scores FILE"),
    ],
)
def test_what_cant_be_made_is_refused_with_the_remedy(name, ratio, message):
    with pytest.raises(ValueError, match=message):
        make_press(name, ratio, None)


def test_full_has_no_ratios():
    assert variants(["full", "knorm", "full"], [0.3, 0.5]) == [("full", 1.0), ("knorm", 0.3), ("knorm", 0.5)]


def test_whole_heads_keep_the_target(toy, context):
    model, tokenizer = toy
    press = make_press("kvzip-head", 0.5, tokenizer, head_scores=HeadScores(torch.rand(LAYERS, HEADS)))
    assert kept_pairs(model, prefill(model, context, press)) == target_of(tokenizer, 0.5)


def test_ours_are_offered_at_every_level_and_scorer():
    assert {"kvzip", "kvzip-l2", "kvzip-logit", "kvzip-plus", "kvzip-head", "kvzip-int8", "kvzip-int4"} <= set(PRESSES)
    for scorer in ("kvzip", "kvzip-l2", "kvzip-logit", "kvzip-plus"):
        assert {scorer, f"{scorer}-pair-layer", f"{scorer}-pair-uniform"} <= set(PRESSES)
    press = make_press("kvzip-l2-pair-layer", 0.4, None)
    assert (press.scorer, press.level, press.ratio) == ("l2", "pair-layer", 0.4)


def test_parameters_tell_presses_apart_and_not_their_ratios():
    described = {name: press_parameters(make_press(name, 0.3, None)) for name in [*BASELINES, *OURS]}
    for name, parameters in described.items():
        assert press_parameters(make_press(name, 0.7, None)) == parameters
    same = {"kvzip", "kvzip-local-512"}
    different = [described[name] for name in described if name not in same]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])
    papers = described["snapkv"], described["pyramidkv"], described["adakv-snapkv"]["press"]
    assert [(press["window_size"], press["kernel_size"]) for press in papers] == [(32, 7)] * 3
    heads = [HeadScores(torch.full((LAYERS, HEADS), value)) for value in (0.1, 0.1, 0.2)]
    one, two, other = (press_parameters(make_press("kvzip-head", 0.5, None, head_scores=scores)) for scores in heads)
    assert one == two != other


def test_presses_that_cant_run_are_refused_with_the_reason(toy):
    model, tokenizer = toy
    with pytest.raises(ValueError, match="duo-attention has no pattern for the model"):
        check_press(make_press("duo-attention", 0.5, tokenizer), model)
    with eager_attention(model), pytest.raises(ValueError, match="eager"):
        check_press(make_press("kvzip", 0.5, tokenizer), model)
    check_press(make_press("kvzip", 0.5, tokenizer), model)
    check_press(make_press("snapkv", 0.5, tokenizer), model)


def test_duo_attention_keeps_whole_heads(toy, context, monkeypatch):
    """With patterns at hand instead of the download."""
    model, tokenizer = toy
    pattern = (4, 8, torch.rand(LAYERS, HEADS).numpy())
    monkeypatch.setattr(kvpress.DuoAttentionPress, "load_attention_pattern", staticmethod(lambda model: pattern))
    kept = kept_pairs(model, prefill(model, context, make_press("duo-attention", 0.5, tokenizer)))
    assert kept == 3 * LENGTH + 3 * 12
