"""Decoding from ragged keys on any CPU: compiled by numba on the user's machine, no compiler needed there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

_BLOCK = 128
_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
# Below this many packed elements a second thread costs more than it brings
_MIN_ELEMENTS_PER_THREAD = 1 << 16


def _compiled(function: Callable) -> Callable:
    """Compile without the lock of the interpreter, once for all processes where a folder for that can be written."""
    options: dict[str, Any] = {"nogil": True, "fastmath": _FASTMATH}
    try:
        compiled: Callable = njit(cache=True, **options)(function)
    except RuntimeError:
        compiled = njit(**options)(function)
    return compiled


def _float_row(array, index, words, vector):  # type: ignore[no-untyped-def]
    """Row ``index`` as float32: itself, or bfloat16 words shifted into ``vector``, which views ``words``."""
    raise NotImplementedError("numba replaces this by one of the forms below")


@overload(_float_row, inline="always")
def _overload_float_row(array, index, words, vector):  # type: ignore[no-untyped-def]
    if array.dtype == types.float32:
        return lambda array, index, words, vector: array[index]

    def widen(array, index, words, vector):  # type: ignore[no-untyped-def]
        for d in range(array.shape[1]):
            words[d] = np.uint32(array[index, d]) << np.uint32(16)
        return vector

    return widen


@_compiled
def _decode_range(query, key, value, starts, ends, first, last, out, lse):  # type: ignore[no-untyped-def]
    """
    Attention of every segment [starts, ends) over the part of it inside the rows [first, last) of key, float32.

    query [segments, rows, head_dim] is already scaled; key and value [total, head_dim] hold float32, or bfloat16 as
    its 16-bit words. Writes out [segments, rows, value_dim] and lse [segments, rows].
    """
    segments, rows, head_dim = query.shape
    value_dim = value.shape[1]
    logits = np.empty((rows, _BLOCK), np.float32)
    words = np.empty(max(head_dim, value_dim), np.uint32)
    vector = words.view(np.float32)
    for segment in range(segments):
        begin, end = max(starts[segment], first), min(ends[segment], last)
        out[segment] = 0.0
        lse[segment] = -np.inf
        if begin >= end:
            continue
        peak = np.full(rows, -np.inf, np.float32)
        total = np.zeros(rows, np.float32)
        for block in range(begin, end, _BLOCK):
            count = min(_BLOCK, end - block)
            for item in range(count):
                key_row = _float_row(key, block + item, words, vector)
                for row in range(rows):
                    dot = np.float32(0.0)
                    for d in range(head_dim):
                        dot += query[segment, row, d] * key_row[d]
                    logits[row, item] = dot
            for row in range(rows):
                block_peak = peak[row]
                for item in range(count):
                    block_peak = max(block_peak, logits[row, item])
                scale = np.exp(peak[row] - block_peak)
                peak[row] = block_peak
                total[row] *= scale
                for d in range(value_dim):
                    out[segment, row, d] *= scale
                for item in range(count):
                    weight = np.exp(logits[row, item] - block_peak)
                    logits[row, item] = weight
                    total[row] += weight
            for item in range(count):
                value_row = _float_row(value, block + item, words, vector)
                for row in range(rows):
                    weight = logits[row, item]
                    for d in range(value_dim):
                        out[segment, row, d] += weight * value_row[d]
        for row in range(rows):
            lse[segment, row] = peak[row] + np.log(total[row])
            for d in range(value_dim):
                out[segment, row, d] /= total[row]


@_compiled
def _merge_parts(out, lse):  # type: ignore[no-untyped-def]
    """Merge out [parts, segments, rows, value_dim] and lse [parts, segments, rows] into part 0."""
    parts, segments, rows, value_dim = out.shape
    for segment in range(segments):
        for row in range(rows):
            peak = lse[:, segment, row].max()
            if peak == -np.inf:
                continue
            total = np.float32(0.0)
            for part in range(parts):
                total += np.exp(lse[part, segment, row] - peak)
            for part in range(parts):
                weight = np.exp(lse[part, segment, row] - peak) / total
                for d in range(value_dim):
                    if part == 0:
                        out[0, segment, row, d] *= weight
                    else:
                        out[0, segment, row, d] += weight * out[part, segment, row, d]
            lse[0, segment, row] = peak + np.log(total)


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="kvzip-decode")


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def _as_rows(states: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Flatten (batch, num_kv_heads, n, dim) to rows, a part of a larger buffer without a copy, and tell their step."""
    batch_size, num_kv_heads, length, dim = states.shape
    step = states.stride(1) // dim
    if states.stride() != (num_kv_heads * step * dim, step * dim, dim, 1):
        states, step = states.contiguous(), length
    rows = (batch_size * num_kv_heads - 1) * step + length
    return states.as_strided((rows, dim), (dim, 1)), step


def decode_attention(
    query: torch.Tensor,
    packed_key: torch.Tensor,
    packed_value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    softmax_scale: float,
    tail: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All cores, float32 and bfloat16 storage. See :func:`kvzip_press.kernels.api.decode_attention`."""
    batch_size, num_heads, q_len, head_dim = query.shape
    segments = len(cu_seqlens) - 1
    rows = batch_size * num_heads // segments * q_len
    scaled = (query.float() * softmax_scale).reshape(segments, rows, head_dim).numpy()
    key, value = _as_numpy(packed_key), _as_numpy(packed_value)
    bounds = cu_seqlens.numpy()
    total = len(key)
    parts = max(1, min(torch.get_num_threads(), total * head_dim // _MIN_ELEMENTS_PER_THREAD))
    out = np.empty((parts + (tail is not None), segments, rows, value.shape[1]), np.float32)
    lse = np.empty((len(out), segments, rows), np.float32)
    edges = [total * part // parts for part in range(parts + 1)]
    futures = [
        _pool().submit(
            _decode_range, scaled, key, value, bounds[:-1], bounds[1:], edges[p], edges[p + 1], out[p], lse[p]
        )
        for p in range(1, parts)
    ]
    _decode_range(scaled, key, value, bounds[:-1], bounds[1:], edges[0], edges[1], out[0], lse[0])
    if tail is not None:
        (tail_key, step), (tail_value, value_step) = _as_rows(tail[0]), _as_rows(tail[1])
        if step != value_step:
            (tail_key, step), (tail_value, _) = _as_rows(tail[0].contiguous()), _as_rows(tail[1].contiguous())
        starts = np.arange(segments, dtype=bounds.dtype) * step
        ends = starts + tail[0].shape[2]
        tail_rows = _as_numpy(tail_key), _as_numpy(tail_value)
        _decode_range(scaled, *tail_rows, starts, ends, 0, len(tail_key), out[parts], lse[parts])
    for future in futures:
        future.result()
    if len(out) > 1:
        _merge_parts(out, lse)
    shape = (batch_size, num_heads, q_len)
    return torch.from_numpy(out[0]).view(*shape, value.shape[1]), torch.from_numpy(lse[0]).view(shape)
