"""Which pairs stay: exact counts at every level, ties by position, budgets."""

import math

import pytest
import torch
from harness import Operations, kept_positions, make_press, prefill, ragged
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import build_model, random_ids

from kvzip_press import kept_fraction
from kvzip_press.selection import SELECTORS, Allowance, keep_top, select_heads, select_pair


def mask(*rows) -> list:
    return [[bool(item) for item in row] for row in rows]


def test_the_highest_scores_stay_and_among_equal_ones_the_first():
    """Worked by hand: 3 first, then the 2s in the order of their positions, then 1."""
    scores = torch.tensor([2.0, 1.0, 3.0, 2.0, 2.0])
    expected = mask([0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 1, 1], [1] * 5)
    assert [keep_top(scores, count).tolist() for count in range(6)] == expected


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 1e-30, 0.5, 0.5000001, 1.0, 7.0]), min_size=1, max_size=40),
    data=st.data(),
)
def test_exactly_the_count_is_kept_as_by_a_stable_sort(values, data):
    count = data.draw(st.integers(0, len(values)))
    scores = torch.tensor(values)
    order = sorted(range(len(values)), key=lambda index: (-scores[index].item(), index))
    assert keep_top(scores, count).nonzero().flatten().tolist() == sorted(order[:count])


# https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html: those that raise on CUDA
RAISING = {"kthvalue", "median", "nanmedian", "histc", "bincount", "put_", "_histogramdd_bin_edges", "scatter_reduce"}


@pytest.mark.parametrize("count", [1, 20, 30, 59])
def test_selection_uses_no_operation_that_is_nondeterministic_on_cuda(count):
    """kthvalue and its like raise on CUDA under torch.use_deterministic_algorithms(True)."""
    with Operations() as operations:
        keep_top(torch.arange(60.0) % 7, count)
    assert operations.names and RAISING.isdisjoint(operations.names)


def test_nan_scores_are_an_error():
    with pytest.raises(ValueError, match="NaN.*load the model in bfloat16 or float32"):
        keep_top(torch.tensor([1.0, math.nan]), 1)


# Two layers of two heads and three positions
SCORES = torch.tensor([[[9.0, 1.0, 8.0], [2.0, 2.0, 2.0]], [[7.0, 0.0, 0.0], [2.0, 6.0, 5.0]]])


@pytest.mark.parametrize(
    ("ratio", "level", "expected"),
    [
        # 9 8 7 6 5 and the first of the 2s, which is layer 0, head 1, position 0
        (1 / 2, "pair", [mask([1, 0, 1], [1, 0, 0]), mask([1, 0, 0], [0, 1, 1])]),
        # Layer 0: 9 8 and a 2; layer 1: 7 6 5
        (1 / 2, "pair-layer", [mask([1, 0, 1], [1, 0, 0]), mask([1, 0, 0], [0, 1, 1])]),
        # Each head two of three, as round(1.5) is 2
        (1 / 2, "pair-uniform", [mask([1, 0, 1], [1, 1, 0]), mask([1, 1, 0], [0, 1, 1])]),
        (1 / 3, "pair", [mask([1, 0, 1], [0, 0, 0]), mask([1, 0, 0], [0, 1, 0])]),
        (1 / 3, "pair-layer", [mask([1, 0, 1], [0, 0, 0]), mask([1, 0, 0], [0, 1, 0])]),
        (1 / 3, "pair-uniform", [mask([1, 0, 0], [1, 0, 0]), mask([1, 0, 0], [0, 1, 0])]),
    ],
)
def test_levels_worked_by_hand(ratio, level, expected):
    """Of twelve pairs: over the model, in each layer, and in each head."""
    assert SELECTORS[level](SCORES, Allowance(ratio=ratio)).tolist() == expected


def test_equal_scores_fill_the_context_from_its_beginning():
    """With one score for all pairs, no layer or head is preferred: earlier positions of all heads come first."""
    scores = torch.zeros(2, 2, 5)
    keep = select_pair(scores, Allowance(ratio=6 / 20))
    assert keep.sum(dim=(0, 1)).tolist() == [4, 2, 0, 0, 0]
    assert keep[0, :, 1].all()


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 30)),
    ratio=st.floats(0.001, 1.0),
    seed=st.integers(0, 1000),
    levels=st.integers(1, 5),
)
def test_counts_are_exact_at_every_level(shape, ratio, seed, levels):
    scores = torch.randint(0, levels, shape, generator=torch.Generator().manual_seed(seed)).float()
    layers, heads, tokens = shape
    kept = {level: selector(scores, Allowance(ratio=ratio)) for level, selector in SELECTORS.items()}
    assert kept["pair"].sum() == round(ratio * layers * heads * tokens)
    assert kept["pair-layer"].sum(dim=(1, 2)).tolist() == [round(ratio * heads * tokens)] * layers
    assert kept["pair-uniform"].sum(dim=2).flatten().tolist() == [round(ratio * tokens)] * (layers * heads)
    # Within what shares a budget no evicted pair outscores a kept one
    for level, dims in {"pair": (0, 1, 2), "pair-layer": (1, 2), "pair-uniform": (2,)}.items():
        lowest = scores.masked_fill(~kept[level], math.inf).amin(dims)
        assert (lowest >= scores.masked_fill(kept[level], -math.inf).amax(dims)).all()


@pytest.mark.parametrize(
    ("budget", "units", "tokens", "count"),
    [(10, 80, 40, 20), (40, 80, 40, 80), (41, 80, 40, 80), (1, 80, 40, 2), (1, 3, 40, 0), (13, 90, 45, 26)],
)
def test_a_budget_counts_tokens_per_head_on_average(budget, units, tokens, count):
    """units * budget / tokens units stay, rounded; all of them where the context is no longer than the budget."""
    assert Allowance(budget=budget).count(units, tokens) == count


def test_whole_heads_worked_by_hand():
    """Of two layers of three heads, half: the three best, and of two equal ones the one of the lower layer."""
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.5, 0.2, 0.8]])
    assert select_heads(scores, Allowance(ratio=0.5), 10).tolist() == mask([0, 1, 1], [0, 0, 1])
    assert select_heads(scores, Allowance(budget=5), 10).tolist() == mask([0, 1, 1], [0, 0, 1])
    assert select_heads(scores, Allowance(budget=10), 10).all()


def head_lengths(cache) -> torch.Tensor:
    """Kept pairs (layers, heads) of a cache of one row, prefix excluded."""
    return torch.stack([layer.head_lengths[0] - layer.prefix_pairs[0] // layer.num_kv_heads for layer in ragged(cache)])


@pytest.mark.parametrize("ratio", [0.013, 0.1, 0.3, 0.5, 0.87, 1.0])
def test_a_compressed_cache_holds_exactly_the_counts(family, ratio):
    model, ids = build_model(family), random_ids(61)
    for level in ("pair", "pair-layer", "pair-uniform"):
        cache = prefill(model, ids, make_press(ratio=ratio, level=level, chunk_size=64))
        kept = head_lengths(cache)
        layer = ragged(cache)[0]
        tokens = layer.context_pairs[0] // 2
        assert tokens == (61 - 4 if layer.window is None else layer.window - 1)
        expected = {
            "pair": round(ratio * kept.numel() * tokens),
            "pair-layer": len(kept) * round(ratio * 2 * tokens),
            "pair-uniform": kept.numel() * round(ratio * tokens),
        }[level]
        assert kept.sum() == expected
        if level != "pair":
            assert len(set(kept.sum(dim=1).tolist())) == 1
        assert kept_fraction(cache) == expected / (kept.numel() * tokens)


@pytest.mark.parametrize("level", SELECTORS)
def test_a_budget_through_the_press(model, level):
    kept = head_lengths(prefill(model, random_ids(100), make_press(budget=10, level=level)))
    assert kept.sum() == 10 * 8
    short = prefill(model, random_ids(14), make_press(budget=10, level=level))
    assert kept_fraction(short) == 1.0 and head_lengths(short).tolist() == [[10, 10]] * 4


def test_levels_differ_in_how_they_share(model):
    """One threshold over the model lets layers differ; per layer only heads differ; uniform none does."""
    presses = {level: make_press(ratio=0.3, level=level) for level in SELECTORS}
    kept = {level: head_lengths(prefill(model, random_ids(120), press)) for level, press in presses.items()}
    assert len(set(kept["pair"].sum(dim=1).tolist())) > 1
    assert len(set(kept["pair-layer"].sum(dim=1).tolist())) == 1 and len(set(kept["pair-layer"].flatten().tolist())) > 1
    assert len(set(kept["pair-uniform"].flatten().tolist())) == 1


def test_what_a_smaller_ratio_keeps_a_larger_one_keeps_too(model):
    ids = random_ids(80)
    full = prefill(model, ids)
    kept = [kept_positions(full, prefill(model, ids, make_press(ratio=ratio))) for ratio in (0.1, 0.4, 0.8)]
    for smaller, larger in zip(kept, kept[1:], strict=False):
        for layer_small, layer_large in zip(smaller, larger, strict=True):
            assert all(a <= b for a, b in zip(layer_small, layer_large, strict=True))
