"""Kernels against their specification in float64, over shapes, formats and garbage in unused memory."""

from __future__ import annotations

import math
import re

import pytest
import torch
from attention_oracle import assert_attended, bounds, expected_decode, fill_fresh_memory, pairs_of, randn, replay_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from kvzip_press.kernels import reference
from kvzip_press.kernels.api import REDUCTIONS, ReplayOptions, decode_attention, replay_attention
from kvzip_press.kernels.decode import torch as torch_decode
from kvzip_press.kernels.decode.torch import dense_attention
from kvzip_press.kernels.merge import merge_lse
from kvzip_press.kernels.replay import cpu_softmax
from kvzip_press.kernels.replay import torch as torch_replay
from kvzip_press.kernels.storage.segments import Segments

# Largest error of an output that is a mean of values of size 1
BOUND = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5}
DTYPES = {name: list(BOUND) for name in ("auto", "reference", "torch")}
DTYPES["cpu"] = [torch.float32, torch.bfloat16, torch.float16]
# Those that run without a GPU
BACKENDS = tuple(DTYPES)

# Lengths of two or three heads for each of one to three rows
RAGGED = {
    "empty head": (1, [0, 111]),
    "nothing at all": (1, [0, 0, 0]),
    "one pair": (1, [1, 1]),
    "odd": (1, [63, 111]),
    "no multiple of any block": (1, [130, 67, 257]),
    "uneven": (1, [2, 700]),
    "whole blocks": (1, [64, 128]),
    "three rows": (3, [5, 64, 0, 129, 65, 1]),
}


def check_decode(backend, query, key, value, lengths, **options):
    scale = query.shape[-1] ** -0.5
    out, lse = decode_attention(query, key, value, bounds(lengths), softmax_scale=scale, backend=backend, **options)
    assert out.dtype == lse.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    assert out.shape == (*query.shape[:3], value.shape[-1]) and lse.shape == query.shape[:3]
    assert_attended((out, lse), query, (key, value), lengths, scale, BOUND[query.dtype], **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_decode_over_head_sizes_and_formats(backend, head_dim):
    lengths = [0, 1, 300, 7, 129, 128]
    for dtype in DTYPES[backend]:
        query = randn(2, 12, 1, head_dim, dtype=dtype)
        check_decode(backend, query, *pairs_of(lengths, head_dim, dtype=dtype), lengths)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", list(RAGGED))
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_decode_over_ragged_shapes_and_storages(backend, shape, bits):
    """Named ragged cases, plain and quantised, with a masked tail: the numbers that are stored are attended to."""
    batch_size, lengths = RAGGED[shape]
    num_kv_heads, dtype = len(lengths) // batch_size, torch.bfloat16
    packed = pairs_of(lengths, 64, bits, dtype)
    tail = tuple(randn(batch_size, num_kv_heads, 9, 64, seed=seed, dtype=dtype) for seed in (3, 4))
    query = randn(batch_size, num_kv_heads * 3, 2, 64, dtype=dtype)
    visible = torch.ones(2, 9, dtype=torch.bool).tril(7)[None, None]
    check_decode(backend, query, *packed, lengths, tail=tail, tail_mask=visible)
    check_decode(backend, query, *packed, lengths)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("bits", "value_bits"), [(8, 8), (4, 4), (8, 4), (32, 4), (4, 32)])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (80, 80), (2, 2), (34, 192)])
def test_decode_of_quantised_pairs_over_head_sizes(backend, bits, value_bits, head_dim, value_dim):
    """Value groups of 64 channels where they divide the head size, one group where not; values in bits of their own."""
    packed = pairs_of([70, 0, 5], head_dim, bits, value_dim=value_dim, value_bits=value_bits)
    check_decode(backend, randn(1, 6, 1, head_dim), *packed, [70, 0, 5])


@settings(max_examples=80, deadline=None)
@given(
    backend=st.sampled_from(["cpu", "torch", "auto", "reference"]),
    batch_size=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    q_len=st.integers(1, 6),
    head_dim=st.sampled_from([2, 8, 18, 64]),
    bits=st.sampled_from([32, 16, 8, 4]),
    tail_len=st.sampled_from([None, 0, 1, 7, 64, 70]),
    data=st.data(),
)
def test_decode_over_any_ragged_shape(backend, batch_size, num_kv_heads, group, q_len, head_dim, bits, tail_len, data):
    """Segments of any lengths, any group and number of queries, any storage, with a tail under any mask."""
    segments = batch_size * num_kv_heads
    sizes = st.sampled_from([0, 0, 1, 2, 5, 127, 128, 129])
    lengths = data.draw(st.lists(sizes, min_size=segments, max_size=segments))
    dtype = torch.bfloat16 if bits == 16 else torch.float32
    query = randn(batch_size, num_kv_heads * group, q_len, head_dim, dtype=dtype)
    tail = mask = None
    if tail_len is not None:
        tail = tuple(randn(batch_size, num_kv_heads, tail_len, head_dim, seed=seed, dtype=dtype) for seed in (3, 4))
        full = (batch_size, num_kv_heads * group, q_len, tail_len)
        shape = tuple(data.draw(st.sampled_from([1, size])) for size in full)
        seen = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < data.draw(st.sampled_from([0.0, 0.6]))
        mask = data.draw(st.sampled_from([None, seen]))
    check_decode(backend, query, *pairs_of(lengths, head_dim, bits, dtype), lengths, tail=tail, tail_mask=mask)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bits", [16, 4])
def test_decode_with_a_softcap_and_values_of_another_size(backend, softcap, bits):
    """Logits are capped before the softmax, as in Gemma, of context and tail; values need not have the keys' size."""
    tail = randn(1, 2, 3, 16, seed=3), randn(1, 2, 3, 24, seed=4)
    packed = pairs_of([15, 25], 16, bits, value_dim=24)
    check_decode(backend, 9 * randn(1, 4, 3, 16), *packed, [15, 25], softcap=softcap, tail=tail)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_nearer_than_attention_computed_in_16_bits(backend, dtype):
    """The error is below that of softmax(q k) v with products rounded to the type: no bound set by hand."""
    lengths = [333, 64]
    query, packed = randn(1, 4, 1, 64, dtype=dtype), pairs_of(lengths, 64, dtype=dtype)
    expected, eager = (expected_decode(query, *packed, lengths, 0.125, dtype=of)[0] for of in (torch.float64, dtype))
    out, _ = decode_attention(query, *packed, bounds(lengths), softmax_scale=0.125, backend=backend)
    assert (out.double() - expected).abs().max() < (eager - expected).abs().max() / 10


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e3, -1e3])
def test_decode_with_logits_that_would_overflow(backend, size):
    """Logits of +-100,000 need the maximum taken off before the exponential; the winner takes all."""
    key = torch.tensor([[1.0, 0.0], [0.9, 0.0], [-1.0, 0.0]]) * size
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    query = torch.tensor([[[[100.0, 0.0]]]])
    out, lse = decode_attention(query, key, value, bounds([3]), softmax_scale=1.0, backend=backend)
    assert out.flatten().tolist() == ([1.0, 2.0] if size > 0 else [5.0, 6.0])
    assert lse.item() == 1e5


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_decode_reads_nothing_outside_of_its_segments_nor_before_it_is_written(monkeypatch, backend, bits):
    """With NaN around plain pairs and in all fresh memory the result is the same, bit for bit, and all written."""
    lengths, dtype = [70, 0, 135, 1], torch.bfloat16 if bits == 16 else torch.float32
    query, packed = randn(2, 6, 2, 64, dtype=dtype), pairs_of(lengths, 64, bits, dtype)
    tail = tuple(randn(2, 2, 5, 64, seed=seed, dtype=dtype) for seed in (3, 4))
    options = dict(softmax_scale=0.125, tail=tail, backend=backend)
    expected = decode_attention(query, *packed, bounds(lengths), **options)
    if bits >= 16:
        packed = [torch.nn.functional.pad(part, (0, 0, 50, 50), value=torch.nan)[50:-50] for part in packed]
    fill_fresh_memory(monkeypatch)
    assert all(map(torch.equal, decode_attention(query, *packed, bounds(lengths), **options), expected))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [32, 4])
def test_the_same_input_gives_the_same_bits(backend, bits):
    """Results do not depend on which thread was faster, nor on whether bounds come as a tensor or as Segments."""
    lengths = [900, 40, 2000]
    packed, segments = pairs_of(lengths, 64, bits), Segments(bounds(lengths))
    query, tail = randn(1, 6, 1, 64), tuple(randn(1, 3, 40, 64, seed=seed) for seed in (3, 4))
    options = dict(softmax_scale=0.125, tail=tail, backend=backend)
    first = decode_attention(query, *packed, segments, **options)
    for again in (segments, segments, bounds(lengths), bounds(lengths).int()):
        assert all(map(torch.equal, decode_attention(query, *packed, again, **options), first))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_head_whose_pairs_are_nan_spoils_no_other(backend):
    """Each head reads its own segment: NaN in one of them shows in that head's group alone."""
    key, value = pairs_of([20] * 3, 16)
    key[20:40] = torch.nan
    out, _ = decode_attention(randn(1, 6, 1, 16), key, value, bounds([20] * 3), softmax_scale=0.25, backend=backend)
    assert torch.isnan(out[0, :, 0, 0]).tolist() == [False, False, True, True, False, False]


def test_the_cpu_kernel_over_any_number_of_threads(monkeypatch):
    """Work split over threads, through the middle of segments, gives the result of one thread within rounding."""
    lengths = [4000, 1, 4999]
    for threads in (1, 2, 3, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        check_decode("cpu", randn(1, 6, 1, 64), *pairs_of(lengths, 64), lengths)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_needs_no_contiguous_input(backend):
    """Queries, keys, values, tail and mask that are views of a larger tensor are read as what they show."""
    both = randn(200, 2, 32, seed=1)
    query = randn(1, 2, 4, 32).transpose(1, 2)
    tail = tuple(part[:, :, 3:8] for part in randn(2, 1, 2, 20, 32, seed=2))
    mask = randn(1, 5, 2, 4, seed=3).permute(0, 3, 2, 1) > -1
    assert not any(part.is_contiguous() for part in (both[:, 0], query, tail[0], mask))
    check_decode(backend, query, both[:, 0], both[:, 1], [80, 120], tail=tail, tail_mask=mask)


@pytest.mark.parametrize("lengths", [[5] * 4, [20], [9, 11], [90, 40], [129, 1]])
def test_decode_refuses_keys_that_were_quantised_in_other_segments(lengths):
    """Keys are quantised in the blocks of their segments: cut elsewhere, even into as many blocks, they are misread."""
    made = {20: [10, 10], 130: [65, 65]}[sum(lengths)]
    key, value = pairs_of(made, 8, 8)
    message = f"quantised in segments of {made} pairs, cu_seqlens describes {lengths}; quantise with the segments that"
    with pytest.raises(ValueError, match=re.escape(message)):
        decode_attention(torch.zeros(1, 4, 1, 8), key, value, bounds(lengths), softmax_scale=1.0)


def test_the_segments_of_quantised_keys_are_compared_once(monkeypatch):
    """Later steps recognise the bounds, of keys made with these segments and of a selection of them."""
    segments, equal, compared = Segments(bounds([10, 70])), torch.equal, []
    pairs = pairs_of([10, 70], 8, 8)
    cases = [(segments, pairs), (segments.select([1, 0]), [part.select(segments, [1, 0]) for part in pairs])]
    monkeypatch.setattr(torch, "equal", lambda a, b: compared.append(a) or equal(a, b))
    for given_segments, given_pairs in cases:
        for _ in range(3):
            decode_attention(randn(1, 4, 1, 8), *given_pairs, given_segments, softmax_scale=1.0)
    assert len(compared) == 2


def test_decode_refuses_keys_as_values():
    """Quantised keys and values have scales of other shapes."""
    key, value = pairs_of([10, 10], 8, 8)
    for pairs, message in (
        ((value, value), "packed_key must be a tensor or QuantizedKeys, got QuantizedValues"),
        ((key, key), "packed_value must be a tensor or QuantizedValues, got QuantizedKeys"),
    ):
        with pytest.raises(ValueError, match=message):
            decode_attention(torch.zeros(1, 4, 1, 8), *pairs, bounds([10, 10]), softmax_scale=1.0)


def shaped(arguments):
    """Arguments of which shapes stand for tensors."""
    return {name: torch.ones(to) if isinstance(to, tuple) else to for name, to in arguments.items()}


TAIL = torch.zeros(1, 2, 3, 8)
INTEGERS = dict.fromkeys(("packed_key", "packed_value"), torch.zeros(20, 8, dtype=torch.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(backend="fast"), "backend must be one of auto.*got 'fast'"),
        (dict(cu_seqlens=bounds([10, 10, 10])), "3 segments, which don't divide 1 rows x 4 heads"),
        (dict(query=(3, 4, 1, 8)), "2 segments, which don't divide 3 rows x 4 heads"),
        (dict(query=(0, 4, 1, 8)), r"none of them 0; got \(0, 4, 1, 8\)"),
        (dict(query=(1, 4, 0, 8)), r"none of them 0; got \(1, 4, 0, 8\)"),
        (dict(query=(1, 4, 1, 0)), r"none of them 0; got \(1, 4, 1, 0\)"),
        (dict(query=(4, 1, 8)), r"shape \(batch_size, num_heads, q_len, head_dim\).*got \(4, 1, 8\)"),
        (dict(softcap=0.0), "softcap must be positive, or None for no soft-cap; got 0.0"),
        (dict(softcap=-1.0), "got -1.0"),
        (dict(softcap=float("nan")), "got nan"),
        (dict(query=TAIL.int(), **INTEGERS), "'auto' takes float64, float32, bfloat16, float16, got int32$"),
        (dict(cu_seqlens=torch.tensor([0])), r"shape \(num_segments \+ 1,\), got torch.int64 with shape \(1,\)"),
        (dict(cu_seqlens=torch.tensor([0.0, 20.0])), "must be int32 or int64.*got torch.float32"),
        (dict(cu_seqlens=bounds([10, 11])), r"packed_key \(20\), packed_value \(20\) and cu_seqlens \(21\)"),
        (dict(cu_seqlens=Segments(bounds([10, 11]))), r"and cu_seqlens \(21\) disagree on the number of pairs"),
        (dict(packed_value=(19, 8)), r"packed_value \(19\)"),
        (dict(packed_key=(20, 9)), "query has head_dim 8, packed_key 9"),
        (dict(packed_value=(20, 2, 4)), r"packed_value must have shape \(total, head_dim\), got \(20, 2, 4\)"),
        (
            dict(backend="cpu", packed_key=torch.zeros(20, 8).double(), packed_value=torch.zeros(20, 8).double()),
            "backend 'cpu' takes float32, bfloat16, float16, got float32 and float64; use backend='auto' or 'torch'",
        ),
        (dict(backend="triton"), "backend 'triton' runs on CUDA GPUs only, got tensors on cpu"),
        (dict(backend="flash"), "backend 'flash' runs on CUDA GPUs only, got tensors on cpu"),
        (dict(packed_value=torch.zeros(20, 8).double()), "packed_value torch.float64.*must agree"),
        (dict(query=torch.zeros(1, 4, 1, 8, device="meta")), "query on meta; they must agree"),
        (dict(cu_seqlens=torch.tensor([0, 25, 20])), r"must start at 0 and never fall, got \[0, 25, 20\]"),
        (dict(cu_seqlens=torch.tensor([5, 10, 20])), "must start at 0"),
        (dict(tail=[TAIL.repeat(1, 2, 1, 1), TAIL]), r"key must have shape \(1, 2, 3, 8\).*got \(1, 4, 3, 8\)"),
        (dict(tail=[TAIL[0], TAIL]), r"the tail's key must have shape \(1, 2, 8, 8\).*got \(2, 3, 8\)"),
        (dict(tail=[TAIL, TAIL[:, :, 1:]]), r"value must have shape \(1, 2, 3, 8\).*got \(1, 2, 2, 8\)"),
        (dict(tail=[TAIL.half()] * 2), r"tail's key.*torch.float32 on cpu; got.*torch.float16"),
        (dict(tail=[TAIL] * 2, tail_mask=(1, 1, 1, 3)), "must be boolean.*got torch.float32"),
        (
            dict(tail=[TAIL] * 2, tail_mask=torch.ones(1, 3, 1, 3, dtype=torch.bool)),
            r"broadcastable to \(1, 4, 1, 3\), got torch.bool on cpu with shape \(1, 3, 1, 3\)",
        ),
    ],
)
def test_decode_refuses_what_does_not_fit(change, message):
    """Shapes that disagree and backends that can't run are an error with the values, never another backend's work."""
    arguments = dict(query=(1, 4, 1, 8), packed_key=(20, 8), packed_value=(20, 8), cu_seqlens=bounds([10, 10]))
    with pytest.raises(ValueError, match=message):
        decode_attention(**shaped({**arguments, **change}), softmax_scale=1.0)


@pytest.mark.parametrize("block", [1, 64, 1 << 22])
@pytest.mark.parametrize("mask_kind", ["none", "causal", "rows", "per row of the batch"])
def test_dense_attention_equals_torch_in_any_block_size(monkeypatch, block, mask_kind):
    """The tail's attention is torch's own, with and without masks, however few rows a block has."""
    monkeypatch.setattr(torch_decode, "_BLOCK_ELEMENTS", block)
    query, key, value = randn(2, 6, 9, 16), randn(2, 2, 9, 16, seed=1), randn(2, 2, 9, 16, seed=2)
    mask = {
        "none": None,
        "causal": torch.ones(9, 9, dtype=torch.bool).tril()[None, None],
        "rows": (torch.arange(9) < 5)[None, None, None, :],
        "per row of the batch": torch.stack([torch.arange(9) > 2, torch.arange(9) > 4])[:, None, None, :],
    }[mask_kind]
    out, lse = dense_attention(query, key, value, softmax_scale=0.3, mask=mask)
    wide = [t.double() for t in (query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1))]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    logits = wide[0] @ wide[1].transpose(-1, -2) * 0.3
    logits = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), atol=1e-5, rtol=1e-5)


@settings(max_examples=50, deadline=None)
@given(cut=st.integers(0, 20), seed=st.integers(0, 100), size=st.sampled_from([0.1, 1.0, 30.0]))
def test_merging_two_parts_equals_attention_over_both(cut, seed, size):
    """Cut anywhere, the parts merge into the whole, and an empty part changes nothing."""
    query, key, value = size * randn(1, 2, 3, 8, seed=seed), randn(1, 2, 20, 8, seed=seed + 1), randn(1, 2, 20, 8)
    whole, whole_lse = dense_attention(query, key, value, softmax_scale=1.0)
    parts = [
        dense_attention(query, key[:, :, part], value[:, :, part], softmax_scale=1.0)
        for part in (slice(0, cut), slice(cut, 20))
    ]
    out, lse = merge_lse(*parts[0], *parts[1])
    torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)


def test_merging_ignores_what_an_empty_part_holds():
    """NaN in the output of a part without keys does not reach the result; two empty parts give 0 and -inf."""
    out, lse = randn(1, 1, 2, 4), torch.tensor([[[0.5, -torch.inf]]])
    garbage, empty = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    out[0, 0, 1] = torch.nan
    for merged, merged_lse in (merge_lse(out, lse, garbage, empty), merge_lse(garbage, empty, out, lse)):
        torch.testing.assert_close(merged[0, 0, 0], out[0, 0, 0])
        assert (merged[0, 0, 1] == 0).all()
        assert torch.equal(merged_lse, lse)


def options(**changes):
    return ReplayOptions(**{**dict(anchor=4, start=20, end=45, local=True, softmax_scale=0.5), **changes})


def check_replay(inputs, asked, bound=2e-5):
    expected = reference.replay_attention(*inputs, asked)
    wide = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
    for backend in ("torch", "cpu") if wide == torch.float32 else ("torch", "auto"):
        for result, truth in zip(replay_attention(*inputs, asked, backend=backend), expected, strict=True):
            assert result.dtype == wide
            torch.testing.assert_close(result.double(), truth, atol=bound, rtol=1e-4)


def test_the_specification_of_the_replay_worked_by_hand():
    """One head, one query, two context pairs, the chunk the second: its weight against itself and the own key."""
    one = torch.ones(1, 1, 1, 1)
    context = torch.tensor([math.log(2.0), math.log(3.0)]).view(1, 1, 2, 1)
    asked = dict(anchor=0, start=1, end=2, softmax_scale=1.0)
    # The exponentials are 2 and 3 for the context and e for the own key
    out, scores = reference.replay_attention(one, one, 7 * one, context, context, options(**asked))
    assert scores.item() == pytest.approx(3 / (3 + math.e))
    assert out.item() == pytest.approx((3 * math.log(3) + math.e * 7) / (3 + math.e))
    out, scores = reference.replay_attention(one, one, 7 * one, context, context, options(**asked, local=False))
    assert scores.item() == pytest.approx(3 / (3 + math.e))
    assert out.item() == pytest.approx((2 * math.log(2) + 3 * math.log(3) + math.e * 7) / (5 + math.e))
    squared = options(**{**asked, "anchor": 1}, reduction="sum_of_squares")
    _, scores = reference.replay_attention(one, one, one, context, context, squared)
    assert scores.item() == pytest.approx((3 / (5 + math.e)) ** 2)


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 30, 14, 1])
@pytest.mark.parametrize("block", [1, 1 << 19])
def test_replay_equals_its_specification(monkeypatch, local, reduction, softcap, window, block):
    """Outputs and scores, over reductions, soft-cap and windows, in blocks of 16 rows and in one."""
    monkeypatch.setitem(torch_replay._BLOCK_ELEMENTS, "cpu", block)
    monkeypatch.setattr(cpu_softmax, "_BLOCK_ELEMENTS", block)
    inputs = replay_inputs(batch_size=2, q_len=37)
    check_replay(inputs, options(local=local, reduction=reduction, softcap=softcap, window=window))


@settings(max_examples=40, deadline=None)
@given(
    columns=st.lists(st.integers(0, 50), min_size=3, max_size=3).map(sorted),
    local=st.booleans(),
    q_len=st.integers(1, 40),
    group=st.integers(1, 4),
    value_dim=st.sampled_from([16, 24]),
    reduction=st.sampled_from(REDUCTIONS),
)
def test_replay_over_any_columns(columns, local, q_len, group, value_dim, reduction):
    """Any anchor and chunk, empty or the whole context, any number of replayed tokens, values of another size."""
    anchor, start, end = columns
    asked = options(anchor=anchor, start=start, end=end, local=local, reduction=reduction)
    check_replay(replay_inputs(q_len=q_len, group=group, value_dim=value_dim), asked)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_replay_with_weights(reduction):
    """Factors of replayed tokens and of pairs enter before the reduction."""
    inputs = replay_inputs(batch_size=2, q_len=20)
    generator = torch.Generator().manual_seed(9)
    row_weight, column_weight = (torch.rand(*shape, generator=generator) for shape in ((2, 20), (2, 2, 3, 25)))
    for rows, columns in ((row_weight, column_weight), (row_weight, None), (None, column_weight)):
        check_replay(inputs, options(reduction=reduction, row_weight=rows, column_weight=columns))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("local", [True, False])
def test_replay_in_other_formats(dtype, local):
    """Scores and outputs are float32 (float64 for float64) and as exact as the format of the input allows."""
    inputs, asked = replay_inputs(q_len=20, dtype=dtype), options(local=local)
    check_replay(inputs, asked, bound={torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype])
    _, scores = replay_attention(*inputs, asked)
    _, expected = reference.replay_attention(*inputs, asked)
    torch.testing.assert_close(scores.double(), expected, atol=BOUND[dtype], rtol=1e-4)


def test_replay_reads_no_other_columns_in_local_form():
    """In a local replay NaN in every context column but anchor and chunk changes nothing, bit for bit."""
    inputs = replay_inputs()
    expected = replay_attention(*inputs, options())
    for states in inputs[3:]:
        states[:, :, 4:20] = states[:, :, 45:] = torch.nan
    assert all(map(torch.equal, replay_attention(*inputs, options()), expected))


@pytest.mark.parametrize("local", [True, False])
def test_replay_needs_no_contiguous_input(local):
    """Rows and heads may lie in any order, and even the channels of a row apart."""
    inputs, weight = replay_inputs(), randn(11, 2).abs().T[:1]
    for order in ((0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)):
        places = [order.index(place) for place in range(4)]
        views = [states.permute(order).contiguous().permute(places) for states in inputs]
        check_replay(views, options(local=local, row_weight=weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(anchor=-1), "need 0 <= anchor <= start <= end, got -1, 20, 45"),
        (dict(anchor=21), "got 21, 20, 45"),
        (dict(end=19), "got 4, 20, 19"),
        (dict(end=51), "the chunk ends at column 51, the context has 50"),
        (dict(reduction="mean"), "reduction must be one of max, sum_of_squares, sum, logit, got 'mean'"),
        (dict(softcap=0.0), "softcap must be positive, or None for no soft-cap; got 0.0"),
        (dict(softcap=-1.0), "got -1.0"),
        (dict(window=0), "window must be at least 1, or None for no window; got 0"),
        (dict(window=-3), "got -3"),
        (dict(row_weight=(1, 3)), r"row_weight must have shape \(1, 40\).*on cpu; got \(1, 3\)"),
        (dict(row_weight=(2, 40)), r"got \(2, 40\)"),
        (dict(row_weight=torch.ones(1, 40).int()), "be of a floating-point type on cpu; got.*torch.int32"),
        (dict(column_weight=(1, 2, 25)), r"column_weight must.*\(1, 2, 3, 25\).*got \(1, 2, 25\)"),
        (dict(column_weight=(1, 2, 3, 24)), r"got \(1, 2, 3, 24\)"),
        (dict(own_key=(1, 2, 39, 16)), r"own_key must have shape \(1, 2, 40, 16\).*got \(1, 2, 39, 16\)"),
        (dict(own_value=(1, 1, 40, 16)), r"own_value must have shape \(1, 2, 40, 16\).*got \(1, 1, 40, 16\)"),
        (dict(own_value=(1, 2, 40, 15)), r"context_value must have shape \(1, 2, 50, 15\).*got \(1, 2, 50, 16\)"),
        (dict(context_key=(1, 2, 50, 8)), r"context_key must have shape \(1, 2, 50, 16\).*got \(1, 2, 50, 8\)"),
        (dict(context_key=(1, 4, 50, 16)), r"num_kv_heads dividing 6 heads; got \(1, 4, 50, 16\)"),
        (dict(context_key=(2, 50, 16)), r"context_key must have shape \(batch_size, .*got \(2, 50, 16\)"),
        (dict(context_key=(2, 2, 50, 16)), r"context_key must have shape \(1, 2, 50, 16\)"),
        (dict(context_key=(1, 2, 44, 16)), "the chunk ends at column 45, the context has 44"),
        (dict(context_value=(1, 2, 49, 16)), r"context_value must have shape \(1, 2, 50, 16\).*\(1, 2, 49, 16\)"),
        (dict(context_value=torch.zeros(1, 2, 50, 16).half()), "context_value.*be torch.float32.*got.*torch.float16"),
        (dict(own_key=torch.zeros(1, 2, 40, 16, device="meta")), "own_key.*on cpu; got.*on meta"),
        (dict(query=(1, 6, 0, 16)), "query must have shape.*none of them 0"),
        (dict(query=torch.zeros(1, 6, 40, 16).double()), "own_key.*be torch.float64 on cpu; got.*torch.float32"),
        (dict(backend="flash"), "'flash' only decodes; replay with one of auto, reference, torch, cpu, triton"),
        (
            dict(own_value=(1, 2, 40, 300), context_value=(1, 2, 50, 300), backend="triton"),
            "'triton' takes a head_dim of at most 256, got 300",
        ),
    ],
)
def test_replay_refuses_what_does_not_fit(monkeypatch, change, message):
    """Every tensor is checked before a kernel reads it by address: a short one was read beyond its end, or in part."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    names = ("query", "own_key", "own_value", "context_key", "context_value")
    arguments = {**dict(zip(names, replay_inputs(q_len=40), strict=True)), **shaped(change)}
    asked = {name: arguments.pop(name) for name in vars(options()) if name in arguments}
    with pytest.raises(ValueError, match=message):
        replay_attention(**arguments, options=options(**asked))
