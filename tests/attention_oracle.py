"""Attention over a ragged context and its tail, and stored codes as numbers, written out in float64."""

from __future__ import annotations

import itertools

import torch

from kvzip_press.kernels.storage.quantization import QuantizedKeys, QuantizedValues, quantize_keys, quantize_values
from kvzip_press.kernels.storage.segments import Segments


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bounds(lengths) -> torch.Tensor:
    """cu_seqlens of segments of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)])


def stored_numbers(packed: torch.Tensor | QuantizedKeys | QuantizedValues, lengths: list[int]) -> torch.Tensor:
    """What packed keys or values stand for: code by code, as the format is described."""
    if isinstance(packed, torch.Tensor):
        return packed.double()
    half = packed.head_dim // 2
    numbers = torch.empty(packed.shape, dtype=torch.float64)
    codes, scale, minimum = packed.codes.tolist(), packed.scale.tolist(), packed.minimum.tolist()
    token, block = 0, 0
    for length in lengths:
        for within, channel in itertools.product(range(length), range(packed.head_dim)):
            code = codes[token + within][channel if packed.bits == 8 else channel % half]
            if packed.bits == 4:
                code = code // (1 if channel < half else 16) % 16
            if isinstance(packed, QuantizedKeys):
                row, column = block + within // 64, channel
            else:
                row, column = token + within, channel * len(scale[token]) // packed.head_dim
            numbers[token + within, channel] = code * scale[row][column] + minimum[row][column]
        token += length
        block += -(-length // 64)
    return numbers


def expected_decode(
    query, key, value, lengths, softmax_scale, softcap=None, tail=None, tail_mask=None, dtype=torch.float64
):
    """Output and log-sum-exp, the truth in float64; in 16 bits products are rounded to these, as is usual."""
    batch_size, num_heads, q_len, _ = query.shape
    num_kv_heads = len(lengths) // batch_size
    cu_seqlens = bounds(lengths)
    key, value = stored_numbers(key, lengths), stored_numbers(value, lengths)
    out = torch.zeros(batch_size, num_heads, q_len, value.shape[-1], dtype=torch.float64)
    lse = torch.full((batch_size, num_heads, q_len), -torch.inf, dtype=torch.float64)
    for row, head, step in itertools.product(range(batch_size), range(num_heads), range(q_len)):
        kv_head = head * num_kv_heads // num_heads
        segment = slice(*cu_seqlens[row * num_kv_heads + kv_head :][:2].tolist())
        keys, values = key[segment], value[segment]
        if tail is not None:
            tail_len = tail[0].shape[2]
            seen = torch.ones(tail_len, dtype=torch.bool)
            if tail_mask is not None:
                seen = tail_mask.expand(batch_size, num_heads, q_len, tail_len)[row, head, step]
            keys = torch.cat([keys, tail[0][row, kv_head][seen].double()])
            values = torch.cat([values, tail[1][row, kv_head][seen].double()])
        if len(keys) == 0:
            continue
        logits = keys.to(dtype) @ query[row, head, step].to(dtype) * softmax_scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        out[row, head, step] = (logits.softmax(0).to(dtype) @ values.to(dtype)).double()
        lse[row, head, step] = logits.logsumexp(0)
    return out, lse


def quantized(key, value, lengths, bits, value_bits=None):
    """Both in ``bits`` bits, or values in bits of their own; as they are for 16 and more."""
    value_bits = value_bits or bits
    return (
        key if bits >= 16 else quantize_keys(key, Segments(bounds(lengths)), bits),
        value if value_bits >= 16 else quantize_values(value, value_bits),
    )


def pairs_of(lengths, head_dim, bits=32, dtype=torch.float32, *, value_dim=None, value_bits=None):
    """Normally distributed keys and values of segments of these lengths."""
    key = randn(sum(lengths), head_dim, seed=1, dtype=dtype)
    value = randn(sum(lengths), value_dim or head_dim, seed=2, dtype=dtype)
    return quantized(key, value, lengths, bits, value_bits)


def surrounded(tensor, *dims):
    """The same numbers as a view of a larger tensor that holds NaN, or 255, around them in these dimensions."""
    sizes = [size + 5 * (dim in dims) for dim, size in enumerate(tensor.shape)]
    view = torch.full(sizes, torch.nan if tensor.is_floating_point() else 255, dtype=tensor.dtype)
    for dim in dims:
        view = view.narrow(dim, 2, tensor.shape[dim])
    return view.copy_(tensor)


def fill_fresh_memory(monkeypatch):
    """Whatever a kernel leaves unwritten, or reads before it is written, shows: it is NaN, or 1."""

    def filling(make):
        def filled(*args, **kwargs):
            made = make(*args, **kwargs)
            return made.fill_(torch.nan if made.is_floating_point() else 1)

        return filled

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filling(getattr(owner, name)))


def replay_inputs(
    batch_size=1, num_kv_heads=2, group=3, q_len=11, context_len=50, head_dim=16, value_dim=None, dtype=torch.float32
):
    """Queries, own keys and values, context keys and values."""
    heads = (num_kv_heads * group, *4 * (num_kv_heads,))
    rows, value_dim = (q_len, q_len, q_len, context_len, context_len), value_dim or head_dim
    shapes = zip(heads, rows, (head_dim, head_dim, value_dim, head_dim, value_dim), strict=True)
    return [randn(batch_size, *shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def assert_attended(result, query, packed, lengths, softmax_scale, bound, **options):
    """Output and log-sum-exp are those of the attention written out in float64, exactly so where no key is seen."""
    expected = expected_decode(query, *packed, lengths, softmax_scale, **options)
    unseen = expected[1] == -torch.inf
    assert (result[0][unseen] == 0).all() and (result[1][unseen] == -torch.inf).all()
    torch.testing.assert_close(result[0].double(), expected[0], atol=bound, rtol=1e-4)
    torch.testing.assert_close(result[1].double(), expected[1], atol=min(10 * bound, 1e-5), rtol=1e-5)
