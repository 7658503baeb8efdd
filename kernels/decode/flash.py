"""
Decoding with flash-attn's kernel for sequences of different lengths.

Each (row, KV head) is one sequence with a single KV head. Checked by tests: the shapes and bounds handed to
``flash_attn_varlen_func``, and that its results are put back in place, against a stand-in that follows the function's
documentation (flash-attn 2.7) in float64 on the CPU. The kernel itself has not been run by our tests.
"""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func

from ..storage.segments import Segments
from .torch import merge_tail


def decode_attention(
    query: torch.Tensor,
    packed_key: torch.Tensor,
    packed_value: torch.Tensor,
    segments: Segments,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    tail: tuple[torch.Tensor, torch.Tensor] | None = None,
    tail_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Bfloat16 and float16 on CUDA GPUs. See :func:`kvzip_press.kernels.api.decode_attention`.

    flash-attn rounds its output to the type of the query; the tail is computed apart and merged in float32. Raises
    ``ValueError`` if query, keys and values differ in type or head size.
    """
    if query.dtype != packed_key.dtype or packed_value.shape[-1] != packed_key.shape[-1]:
        raise ValueError(
            f"backend 'flash' takes query, keys and values of one type and head_dim, got {query.dtype} x "
            f"{query.shape[-1]}, {packed_key.dtype} x {packed_key.shape[-1]} and {packed_value.dtype} x "
            f"{packed_value.shape[-1]}; use backend='auto'"
        )
    batch_size, num_heads, q_len, head_dim = query.shape
    num_segments, device = len(segments), query.device
    group = batch_size * num_heads // num_segments
    # A single query token of several heads is the shape that flash-attn splits over the length of the keys. Longer
    # queries are rows of one head, so that each key is read once for all of them
    heads, rows = (group, 1) if q_len == 1 else (1, group * q_len)
    row_bounds, key_bounds, empty = segments.derived(("flash", rows, device), lambda: _plan(segments, rows, device))
    out, lse, *_ = flash_attn_varlen_func(
        query.reshape(num_segments * rows, heads, head_dim),
        packed_key.unsqueeze(1),
        packed_value.unsqueeze(1),
        row_bounds,
        key_bounds,
        rows,
        segments.max_length,
        softmax_scale=softmax_scale,
        causal=False,
        softcap=softcap or 0.0,
        return_attn_probs=True,
    )
    # [heads, num_segments * rows]
    lse = lse.reshape(heads, num_segments, rows).transpose(0, 1)
    out = out.float().reshape(num_segments, -1)
    if empty is not None:
        # flash-attn's log-sum-exp of no keys is +inf
        lse, out = lse.index_fill(0, empty, -torch.inf), out.index_fill(0, empty, 0.0)
    out, lse = out.view(query.shape), lse.reshape(query.shape[:3])
    return merge_tail(out, lse, query, tail, tail_mask, softmax_scale=softmax_scale, softcap=softcap)


def _plan(
    segments: Segments, rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Bounds of the query rows and of the keys as the kernel reads them, and the segments that are empty, if any."""
    row_bounds = torch.arange(0, (len(segments) + 1) * rows, rows, dtype=torch.int32, device=device)
    key_bounds = segments.cu_seqlens.to(device=device, dtype=torch.int32)
    empty = (segments.lengths == 0).nonzero().flatten()
    return row_bounds, key_bounds, empty.to(device) if len(empty) else None
