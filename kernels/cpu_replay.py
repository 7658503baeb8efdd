"""Replay on the CPU: the products by torch, and between them one visit of the logits for softmax and scores."""

from __future__ import annotations

import torch

from .cpu_softmax import ColumnScores
from .replay_parts import gather_scored, gathered_columns, merge_rest, over_group

# Float32 numbers of one block of logits: larger blocks fall out of the caches, smaller ones make thin products
_BLOCK_ELEMENTS = 3 << 19
_MIN_BLOCK_ROWS = 16


def _replay(
    query: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    values: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    anchor: int,
    start: int,
    end: int,
    with_lse: bool,
    softmax_scale: float,
    softcap: float | None,
    window: int | None,
    reduction: str,
    row_weight: torch.Tensor | None,
    column_weight: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Output and log-sum-exp over anchor, chunk and own keys, each if asked for, and the scores; float32."""
    batch_size, num_heads, q_len, head_dim = query.shape
    num_kv_heads, context_len = keys[0].shape[1:3]
    group, segments = num_heads // num_kv_heads, batch_size * num_kv_heads
    members = segments * group
    key_t = gather_scored(*keys, anchor, start, end, torch.float32).transpose(-1, -2)
    value = None if values is None else gather_scored(*values, anchor, start, end, torch.float32)
    first_own = anchor + end - start
    first_visible = None
    if window is not None:
        columns = gathered_columns(anchor, start, end, context_len, q_len, query.device)
        oldest = torch.arange(context_len, context_len + q_len) - window
        first_visible = torch.searchsorted(columns, oldest, right=True)
    if row_weight is not None:
        row_weight = row_weight.float().contiguous()
    out = None if value is None else torch.empty(batch_size, num_heads, q_len, value.shape[-1])
    lse = torch.empty(batch_size, num_heads, q_len) if with_lse else None
    columns_scores = ColumnScores(members, anchor, first_own, reduction, with_weights=value is not None)
    block = min(q_len, max(_MIN_BLOCK_ROWS, _BLOCK_ELEMENTS // (members * (first_own + q_len))))
    buffer = torch.empty(members * block * (first_own + q_len))
    for first in range(0, q_len, block):
        last = min(first + block, q_len)
        n_rows, n_keys = last - first, first_own + last
        rows = query[:, :, first:last].float() * softmax_scale
        logits = buffer[: members * n_rows * n_keys].view(segments, group * n_rows, n_keys)
        torch.bmm(rows.reshape(segments, group * n_rows, head_dim), key_t[..., :n_keys], out=logits)
        block_lse = None if lse is None else torch.empty(members, n_rows)
        columns_scores.visit(
            logits.view(members, n_rows, n_keys),
            first,
            softcap=softcap,
            first_visible=first_visible,
            row_weight=row_weight,
            lse=block_lse,
        )
        if out is not None and value is not None:
            block_out = torch.bmm(logits, value[:, :n_keys])
            out[:, :, first:last] = block_out.view(batch_size, num_heads, n_rows, -1)
        if lse is not None and block_lse is not None:
            lse[:, :, first:last] = block_lse.view(batch_size, num_heads, n_rows)
    scores = columns_scores.result().view(segments, group, end - start)
    return out, lse, over_group(scores, batch_size, reduction, column_weight)


def replay_attention(
    query: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    *,
    anchor: int,
    start: int,
    end: int,
    local: bool,
    softmax_scale: float,
    softcap: float | None = None,
    window: int | None = None,
    reduction: str = "max",
    row_weight: torch.Tensor | None = None,
    column_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocked over queries. See :func:`kvzip_press.kernels.api.replay_attention`."""
    out, lse, scores = _replay(
        query,
        (context_key, own_key),
        (context_value, own_value),
        anchor=anchor,
        start=start,
        end=end,
        with_lse=not local,
        softmax_scale=softmax_scale,
        softcap=softcap,
        window=window,
        reduction=reduction,
        row_weight=row_weight,
        column_weight=column_weight,
    )
    assert out is not None
    if lse is not None:
        out = merge_rest(
            out,
            lse,
            query,
            context_key,
            context_value,
            skipped=((0, anchor), (start, end)),
            softmax_scale=softmax_scale,
            softcap=softcap,
            window=window,
        )
    return out, scores


def replay_scores(
    query: torch.Tensor,
    own_key: torch.Tensor,
    context_key: torch.Tensor,
    *,
    anchor: int,
    start: int,
    end: int,
    softmax_scale: float,
    softcap: float | None = None,
    window: int | None = None,
    reduction: str = "max",
    row_weight: torch.Tensor | None = None,
    column_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Blocked over queries, without any product with values. See :func:`kvzip_press.kernels.api.replay_scores`."""
    return _replay(
        query,
        (context_key, own_key),
        None,
        anchor=anchor,
        start=start,
        end=end,
        with_lse=False,
        softmax_scale=softmax_scale,
        softcap=softcap,
        window=window,
        reduction=reduction,
        row_weight=row_weight,
        column_weight=column_weight,
    )[2]
