"""
Results of the Triton decode kernels, in Triton's interpreter.

Run by ``test_triton_kernels.py`` in a process of its own, with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_oracle import bounds, expected_decode, fill_fresh_memory, quantized, randn, surrounded

from kvzip_press.kernels.decode import triton as triton_decode
from kvzip_press.kernels.storage.segments import Segments
from kvzip_press.kernels.triton_config import INTERPRETED, LaunchConfig, launch_config

assert INTERPRETED

SHAPES = {
    "empty head": [0, 70],
    "length one": [1, 64],
    "63 and 111": [63, 111],
    "no multiple of a block": [129, 200],
    "uneven": [5, 500],
    "all kept": [128, 128],
    "batch of three": [3, 0, 129, 64, 1, 80],
}
KINDS = ["float32", "float16", "bfloat16", "int8", "int4"]
# Of keys and values
BITS = {"int8": (8, 8), "int4": (4, 4), "int8 and int4": (8, 4), "int4 and int8": (4, 8)}


@pytest.fixture(autouse=True)
def fresh_memory_is_nan(monkeypatch):
    fill_fresh_memory(monkeypatch)


def check(
    kind, lengths, *, batch_size=1, group=3, q_len=1, head_dim=64, value_dim=None, tail_len=None, size=(1, 1), **options
):
    """In 8 to 16 bits no further off than twice attention written out in 16, from the same dequantised numbers."""
    value_dim = value_dim or head_dim
    segments = Segments(bounds(lengths))
    num_kv_heads = len(lengths) // batch_size
    dtype = torch.bfloat16 if kind in BITS else getattr(torch, kind)
    key = surrounded((randn(sum(lengths), head_dim, seed=1) * size[0]).to(dtype), 0)
    value = surrounded((randn(sum(lengths), value_dim, seed=2) * size[1]).to(dtype), 0)
    # Not contiguous, as a model's projection leaves them
    query_dtype = options.pop("query_dtype", dtype)
    query = randn(batch_size, q_len, num_kv_heads * group, head_dim, seed=3, dtype=query_dtype).transpose(1, 2)
    if tail_len is not None:
        heads = (batch_size, num_kv_heads, tail_len)
        options["tail"] = tuple(
            surrounded(randn(*heads, size, seed=seed, dtype=dtype), 2) for size, seed in ((head_dim, 4), (value_dim, 5))
        )
    packed = quantized(key, value, lengths, *BITS.get(kind, (16,)))
    if kind in BITS:
        key, value = (codes.dequantize(segments) for codes in packed)
        parts = ("codes", "scale", "minimum")
        packed = [replace(codes, **{part: surrounded(getattr(codes, part), 0) for part in parts}) for codes in packed]
    options["softmax_scale"] = head_dim**-0.5
    out, lse = triton_decode.decode_attention(query, *packed, segments, **options)
    assert out.dtype == lse.dtype == torch.float32

    expected, expected_lse = expected_decode(query, key, value, lengths, **options)
    assert out.shape == expected.shape and lse.shape == expected_lse.shape
    seen = expected_lse > -torch.inf
    assert (lse[~seen] == -torch.inf).all() and (out[~seen] == 0).all()
    bound = lse_bound = 3e-6
    if dtype != torch.float32:
        usual, usual_lse = expected_decode(query, key, value, lengths, **options, dtype=dtype)
        bound += 2 * float((usual - expected).abs().max())
        lse_bound += 2 * float((usual_lse - expected_lse)[seen].abs().max()) if seen.any() else 0.0
    torch.testing.assert_close(out.double(), expected, atol=bound, rtol=0)
    torch.testing.assert_close(lse[seen].double(), expected_lse[seen], atol=lse_bound, rtol=0)
    return out, lse


def causal(q_len: int, tail_len: int) -> torch.Tensor:
    """Queries are the last tokens of the tail."""
    return torch.ones(q_len, tail_len, dtype=torch.bool).tril_(tail_len - q_len)[None, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_ragged_shapes(name, kind):
    check(kind, SHAPES[name], batch_size=3 if name == "batch of three" else 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("q_len", [1, 5])
def test_groups_and_questions_before_a_causal_tail(kind, group, q_len):
    lengths = [0, 1, 150, 64] if q_len == 1 else [66, 5]
    check(kind, lengths, batch_size=2, group=group, q_len=q_len, tail_len=q_len + 9, tail_mask=causal(q_len, q_len + 9))


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_question_takes_several_row_tiles(kind, monkeypatch):
    if kind not in BITS:
        monkeypatch.setattr(triton_decode, "launch_config", lambda *_: LaunchConfig(16, 32, 4, 1, 2))
    check(kind, [65], group=2, q_len=70, tail_len=70, tail_mask=causal(70, 70), head_dim=32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tail_that_all_queries_see(kind):
    """It shares the launch of unquantised pairs. The same input gives the same bits again."""
    first, second = (check(kind, [270, 0], q_len=2, tail_len=33) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_long_tail_is_split(kind):
    check(kind, [10, 0], group=2, tail_len=600, head_dim=16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "head_dim, value_dim", [(16, 16), (32, 64), (80, 80), (96, 96), (128, 128), (256, 256), (128, 64)]
)
def test_head_sizes(kind, head_dim, value_dim):
    check(kind, [67], head_dim=head_dim, value_dim=value_dim, tail_len=3)


@pytest.mark.parametrize("kind", KINDS)
def test_softcap(kind):
    check(kind, [70, 5], softcap=2.0, tail_len=4, tail_mask=causal(1, 4))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("tail_len", [None, 0, 1, 40])
def test_no_context(kind, tail_len):
    """No pair was kept, and there may be no tail either: out 0 and log-sum-exp -inf."""
    check(kind, [0, 0], tail_len=tail_len)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 37), (2, 1, 1, 37), (2, 6, 1, 37), (1, 1, 5, 37), (2, 6, 5, 37), (1, 6, 5, 1)]
)
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_masks_of_any_shape(kind, shape):
    """A query may see nothing of the tail, and then nothing at all where its head is empty."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[..., -1, :] &= mask.shape[2] == 1
    check(kind, [0, 40, 5, 0], batch_size=2, q_len=5, tail_len=37, tail_mask=mask)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_queries_of_another_type(kind):
    check(kind, [70, 3], query_dtype=torch.float32, tail_len=5)


@pytest.mark.parametrize("kind", ["int8 and int4", "int4 and int8"])
def test_keys_and_values_of_different_bits(kind):
    check(kind, [70, 3], head_dim=128)


@pytest.mark.parametrize("kind", KINDS)
def test_channels_of_very_different_size(kind):
    """Keys have channels far larger than the rest, and the values of some heads are tiny."""
    key_size = torch.ones(64)
    key_size[[3, 40]] = torch.tensor([30.0, 0.001])
    out, _ = check(kind, [100, 64], size=(key_size, 1e-4))
    assert out.abs().max() < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_many_items_of_a_segment(kind, monkeypatch):
    """More partial results than the usual form of the combination takes at a time."""
    monkeypatch.setattr(triton_decode, "_MIN_ITEM", 64)
    monkeypatch.setattr(triton_decode, "launch_config", lambda *of: replace(launch_config(*of), blocks_per_sm=30))
    check(kind, [1100, 3], group=1, head_dim=32)


def test_queries_and_pairs_of_any_stride():
    """A layout that the kernels don't read is copied, not misread."""
    segments = Segments(torch.tensor([0, 20]))
    key, value = (randn(16, 20, seed=seed).T for seed in (1, 2))
    query = randn(1, 2, 16, 1, seed=3).transpose(2, 3)
    out, lse = triton_decode.decode_attention(query, key, value, segments, softmax_scale=0.25)
    expected, expected_lse = expected_decode(query, key, value, [20], 0.25)
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    "message, head_dim, bits, dtype",
    [
        ("takes float32, bfloat16 and float16, got torch.float64; use backend='torch'", 64, (64,), torch.float64),
        ("head sizes up to 256, got 260", 260, (32,), torch.float32),
        ("8 bits need a head_dim divisible by 2, got 17", 17, (8,), torch.float32),
        ("4 bits need a head_dim divisible by 4, got 18", 18, (4,), torch.float32),
        ("odd number of groups", 192, (8,), torch.float32),
        ("both quantised or neither", 64, (8, 32), torch.float32),
    ],
)
def test_what_the_kernels_do_not_take(message, head_dim, bits, dtype):
    packed = quantized(*torch.zeros(2, 3, head_dim, dtype=dtype), [3], *bits)
    with pytest.raises(ValueError, match=message):
        query = torch.zeros(1, 1, 1, head_dim, dtype=dtype)
        triton_decode.decode_attention(query, *packed, Segments(bounds([3])), softmax_scale=1.0)
