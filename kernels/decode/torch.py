"""Attention over ragged and dense keys in plain torch, on any device."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..merge import merge_lse
from ..storage.quantization import PackedKeys, PackedValues
from ..storage.segments import Segments

# Elements of one block of logits: bounds scratch memory for long questions (float32: 16 MiB)
_BLOCK_ELEMENTS = 1 << 22


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which queries of ``dtype`` are attended, and results returned."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attention over dense keys, with its log-sum-exp; options as in :func:`kvzip_press.kernels.api.decode_attention`.

    ``query`` is [batch_size, num_heads, q_len, head_dim]; ``key`` and ``value``, [batch_size, num_kv_heads, kv_len,
    head_dim], are each shared by ``num_heads // num_kv_heads`` heads; ``mask`` is True where a key is visible,
    broadcastable to [batch_size, num_heads, q_len, kv_len]. Output and log-sum-exp, [batch_size, num_heads, q_len], are
    in float32 (float64 for float64 input). A row that sees no key has output 0 and log-sum-exp ``-inf``.
    """
    batch_size, num_heads, q_len, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    dtype, device = accumulation_dtype(query.dtype), query.device
    key_t = key.to(dtype).transpose(-1, -2)
    value = value.to(dtype)
    out = torch.empty(batch_size, num_heads, q_len, value.shape[-1], dtype=dtype, device=device)
    lse = torch.empty(batch_size, num_heads, q_len, dtype=dtype, device=device)
    block = max(1, _BLOCK_ELEMENTS // max(1, batch_size * num_heads * kv_len))
    for first in range(0, q_len, block):
        rows = slice(first, min(first + block, q_len))
        part = query[:, :, rows].to(dtype) * softmax_scale
        logits = torch.matmul(part.reshape(batch_size, num_kv_heads, -1, head_dim), key_t)  # [.., group * rows, kv_len]
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if mask is not None:
            visible = mask[..., rows, :] if mask.shape[-2] > 1 else mask
            visible = visible.expand(*part.shape[:3], kv_len).reshape(logits.shape)
            logits = logits.masked_fill(~visible, -torch.inf)
        row_lse = torch.logsumexp(logits, dim=-1, keepdim=True)
        # A row that sees nothing has logits of -inf: without this their exponentials would be NaN
        shift = row_lse.masked_fill(row_lse == -torch.inf, 0.0)
        out[:, :, rows] = torch.matmul((logits - shift).exp_(), value).view(*part.shape[:3], -1)
        lse[:, :, rows] = row_lse.view(part.shape[:3])
    return out, lse


def merge_tail(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    tail: tuple[torch.Tensor, torch.Tensor] | None,
    tail_mask: torch.Tensor | None,
    *,
    softmax_scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the dense tail to attention over the context, for decode modules whose kernel reads none."""
    if tail is None:
        return out, lse
    key, value = tail
    dense = dense_attention(query, key, value, softmax_scale=softmax_scale, softcap=softcap, mask=tail_mask)
    return merge_lse(out, lse, *dense)


def decode_attention(
    query: torch.Tensor,
    packed_key: PackedKeys,
    packed_value: PackedValues,
    segments: Segments,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    tail: tuple[torch.Tensor, torch.Tensor] | None = None,
    tail_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    One matrix product per (row, KV head) segment. See :func:`kvzip_press.kernels.api.decode_attention`.

    Quantised pairs are dequantised a segment at a time.
    """
    q_len, head_dim = query.shape[2:]
    dtype, device = accumulation_dtype(query.dtype), query.device
    grouped = query.reshape(len(segments), -1, q_len, head_dim)
    out = torch.zeros(*grouped.shape[:3], packed_value.shape[-1], dtype=dtype, device=device)
    lse = torch.full(grouped.shape[:3], -torch.inf, dtype=dtype, device=device)
    for segment, (first, last) in enumerate(pairwise(segments.bounds)):
        if first == last:
            continue
        key, value = (
            packed[first:last]
            if isinstance(packed, torch.Tensor)
            else packed.dequantize_segment(segments, segment, dtype)
            for packed in (packed_key, packed_value)
        )
        part = dense_attention(
            grouped[None, segment], key[None, None], value[None, None], softmax_scale=softmax_scale, softcap=softcap
        )
        out[segment], lse[segment] = part[0][0], part[1][0]
    out, lse = out.view(*query.shape[:3], -1), lse.view(query.shape[:3])
    return merge_tail(out, lse, query, tail, tail_mask, softmax_scale=softmax_scale, softcap=softcap)
