"""Attention over ragged and dense keys in plain torch, on any device."""

from __future__ import annotations

import torch

# Elements of one block of logits: bounds scratch memory for long questions (float32: 16 MiB)
_BLOCK_ELEMENTS = 1 << 22


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
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
    Attention over dense keys, with its log-sum-exp.

    Parameters
    ----------
    query : torch.Tensor
        Shape (batch_size, num_heads, q_len, head_dim).
    key, value : torch.Tensor
        Shape (batch_size, num_kv_heads, kv_len, head_dim); each is shared by ``num_heads // num_kv_heads`` heads.
    softmax_scale : float
        Factor of the logits.
    softcap : float, optional
        ``softcap * tanh(logits / softcap)`` replaces the logits.
    mask : torch.Tensor, optional
        Boolean, True where a key is visible, broadcastable to (batch_size, num_heads, q_len, kv_len).

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        Output (batch_size, num_heads, q_len, head_dim) and log-sum-exp (batch_size, num_heads, q_len), in float32
        (float64 for float64 input). A row that sees no key has output 0 and log-sum-exp ``-inf``.
    """
    batch_size, num_heads, q_len, head_dim = query.shape
    num_kv_heads, kv_len = key.shape[1:3]
    group = num_heads // num_kv_heads
    dtype = _accumulation_dtype(query.dtype)
    key_t = key.to(dtype).transpose(-1, -2)
    value = value.to(dtype)
    out = torch.empty(batch_size, num_heads, q_len, value.shape[-1], dtype=dtype, device=query.device)
    lse = torch.empty(batch_size, num_heads, q_len, dtype=dtype, device=query.device)
    block = max(1, _BLOCK_ELEMENTS // max(1, batch_size * num_heads * kv_len))
    for first in range(0, q_len, block):
        rows = slice(first, min(first + block, q_len))
        part = query[:, :, rows].to(dtype) * softmax_scale
        n_rows = part.shape[2]
        grouped = part.reshape(batch_size, num_kv_heads, group * n_rows, head_dim)
        logits = torch.matmul(grouped, key_t)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if mask is not None:
            visible = mask[..., rows, :] if mask.shape[-2] > 1 else mask
            visible = visible.expand(batch_size, num_heads, n_rows, kv_len).reshape(logits.shape)
            logits = logits.masked_fill(~visible, -torch.inf)
        row_lse = torch.logsumexp(logits, dim=-1, keepdim=True)
        shift = row_lse.masked_fill(row_lse == -torch.inf, 0.0)
        out[:, :, rows] = torch.matmul((logits - shift).exp_(), value).view(
            batch_size, num_heads, n_rows, value.shape[-1]
        )
        lse[:, :, rows] = row_lse.view(batch_size, num_heads, n_rows)
    return out, lse


def decode_attention(
    query: torch.Tensor,
    packed_key: torch.Tensor,
    packed_value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    softmax_scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One matrix product per (row, KV head) segment. See :func:`kvzip_press.kernels.api.decode_attention`."""
    batch_size, num_heads, q_len, head_dim = query.shape
    num_segments = len(cu_seqlens) - 1
    group = batch_size * num_heads // num_segments
    dtype = _accumulation_dtype(query.dtype)
    grouped = query.reshape(num_segments, group, q_len, head_dim)
    out = torch.zeros(num_segments, group, q_len, packed_value.shape[-1], dtype=dtype, device=query.device)
    lse = torch.full((num_segments, group, q_len), -torch.inf, dtype=dtype, device=query.device)
    bounds = cu_seqlens.tolist()
    for segment in range(num_segments):
        first, last = bounds[segment], bounds[segment + 1]
        if first == last:
            continue
        segment_out, segment_lse = dense_attention(
            grouped[None, segment],
            packed_key[None, None, first:last],
            packed_value[None, None, first:last],
            softmax_scale=softmax_scale,
            softcap=softcap,
        )
        out[segment] = segment_out[0]
        lse[segment] = segment_lse[0]
    return out.view(batch_size, num_heads, q_len, packed_value.shape[-1]), lse.view(batch_size, num_heads, q_len)
