"""Attention of replayed tokens and the scores it gives to the context, in one blocked pass."""

from __future__ import annotations

import torch

from .replay_parts import gather_scored, gathered_columns, merge_rest, over_group
from .torch_decode import accumulation_dtype

# Elements of one block of logits: larger blocks gain little, smaller ones lose parallel work
_BLOCK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 24}
_MIN_BLOCK_ROWS = 16


def _reduce_rows(weights: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce (segments, group, rows, columns) over the rows."""
    if reduction in ("max", "logit"):
        return weights.amax(dim=2)
    if reduction == "sum_of_squares":
        return torch.einsum("sgrc,sgrc->sgc", weights, weights)
    return weights.sum(dim=2)


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
    """
    Attention over anchor, chunk and own keys and its log-sum-exp, each if asked for, and the scores.

    ``keys`` and ``values`` are those of the context and of the replayed tokens. The keys that enter the score are
    gathered once; each block of queries takes one product with them, one softmax, one column reduction and one product
    with their values.
    """
    batch_size, num_heads, q_len, head_dim = query.shape
    num_kv_heads, context_len = keys[0].shape[1:3]
    group, segments = num_heads // num_kv_heads, batch_size * num_kv_heads
    dtype = accumulation_dtype(query.dtype)
    device = query.device

    key_t = gather_scored(*keys, anchor, start, end, dtype).transpose(-1, -2)
    value = None if values is None else gather_scored(*values, anchor, start, end, dtype)
    n_scored = end - start
    first_own = anchor + n_scored
    columns = gathered_columns(anchor, start, end, context_len, q_len, device)
    out = None if value is None else query.new_empty(batch_size, num_heads, q_len, value.shape[-1], dtype=dtype)
    lse = query.new_empty(batch_size, num_heads, q_len, dtype=dtype) if with_lse else None
    fill = -torch.inf if reduction == "logit" else 0.0
    scores = torch.full((segments, group, n_scored), fill, dtype=dtype, device=device)

    elements = _BLOCK_ELEMENTS.get(device.type, _BLOCK_ELEMENTS["cuda"])
    block = max(_MIN_BLOCK_ROWS, elements // (segments * group * (first_own + q_len)))
    logits_buffer = torch.empty(segments * group * min(block, q_len) * (first_own + q_len), dtype=dtype, device=device)
    weights_buffer = torch.empty_like(logits_buffer)
    for first in range(0, q_len, block):
        last = min(first + block, q_len)
        n_rows, n_keys = last - first, first_own + last
        rows = query[:, :, first:last].to(dtype) * softmax_scale
        shape = (segments, group * n_rows, n_keys)
        size = segments * group * n_rows * n_keys
        logits, weights = logits_buffer[:size].view(shape), weights_buffer[:size].view(shape)
        torch.bmm(rows.reshape(segments, group * n_rows, head_dim), key_t[..., :n_keys], out=logits)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        by_group = logits.view(segments, group, n_rows, n_keys)
        future = torch.ones(n_rows, n_rows, dtype=torch.bool, device=device).triu_(1)
        by_group[..., n_keys - n_rows :].masked_fill_(future, -torch.inf)
        if window is not None:
            row_index = torch.arange(context_len + first, context_len + last, device=device).unsqueeze(-1)
            by_group.masked_fill_(columns[:n_keys] <= row_index - window, -torch.inf)
        if reduction != "logit" or out is not None:
            torch.softmax(logits, dim=-1, out=weights)
        if out is not None and value is not None:
            block_out = torch.bmm(weights, value[:, :n_keys])
            out[:, :, first:last] = block_out.view(batch_size, num_heads, n_rows, -1)
        if lse is not None:
            row_lse = logits.amax(dim=-1) - weights.amax(dim=-1).log()
            lse[:, :, first:last] = row_lse.view(batch_size, num_heads, n_rows)

        scored = (logits if reduction == "logit" else weights).view(segments, group, n_rows, n_keys)
        scored = scored[..., anchor:first_own]
        if row_weight is not None:
            factor = row_weight[:, first:last].to(dtype).repeat_interleave(num_kv_heads, dim=0)
            scored = scored * factor.view(segments, 1, n_rows, 1)
        block_scores = _reduce_rows(scored, reduction)
        if reduction in ("max", "logit"):
            torch.maximum(scores, block_scores, out=scores)
        else:
            scores += block_scores

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
    """
    Blocked over queries. See :func:`kvzip_press.kernels.api.replay_attention`.

    Full replay adds the attention over the columns that do not enter the score, merged by log-sum-exp, so no product is
    computed twice.
    """
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
