"""Blocked replay for any device with matrix products: one loop over blocks of rows, whatever scores the columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..decode.torch import accumulation_dtype, dense_attention
from ..merge import merge_lse

_MIN_BLOCK_ROWS = 16


@dataclass(frozen=True)
class Columns:
    """
    The gathered columns of one replay, and what their scores are made of.

    Parameters
    ----------
    members : int
        Query heads, over all rows of the batch.
    anchor, first_own : int
        The scored columns are ``[anchor, first_own)``; the replayed tokens' own follow.
    reduction : str
        See :func:`kvzip_press.kernels.api.replay_attention`.
    softcap : float, optional
        ``softcap * tanh(logits / softcap)`` replaces the logits.
    first_visible : torch.Tensor, optional
        First column that each replayed token sees, shape (q_len,), int64.
    row_weight : torch.Tensor, optional
        Factor of each replayed token's weights, contiguous, in ``dtype``, shape (batch_size, q_len).
    dtype : torch.dtype
        Of logits, weights and scores.
    device : torch.device
        Where they are.
    """

    members: int
    anchor: int
    first_own: int
    reduction: str
    softcap: float | None
    first_visible: torch.Tensor | None
    row_weight: torch.Tensor | None
    dtype: torch.dtype
    device: torch.device


class ColumnScores(Protocol):
    """Scores of the columns, gathered over blocks of rows."""

    def __init__(self, columns: Columns) -> None: ...

    @staticmethod
    def block_elements(device: torch.device) -> int:
        """Logits of a block of rows."""
        ...

    def visit(self, logits: torch.Tensor, first_row: int, lse: torch.Tensor | None) -> torch.Tensor:
        """
        Take a block of rows into account.

        Parameters
        ----------
        logits : torch.Tensor
            Contiguous, shape (members, rows, keys): scaled products of the queries from ``first_row`` on with all
            columns up to the last row's own. Overwritten.
        first_row : int
            Index of the first query among the replayed tokens.
        lse : torch.Tensor, optional
            Receives the log-sum-exp of each row, contiguous, shape (members, rows).

        Returns
        -------
        torch.Tensor
            The softmax weights, in the shape of ``logits``.
        """
        ...

    def result(self) -> torch.Tensor:
        """Scores of each query head, shape (members, columns)."""
        ...


def _gather_scored(
    context: torch.Tensor, own: torch.Tensor, anchor: int, start: int, end: int, dtype: torch.dtype
) -> torch.Tensor:
    """
    Keys or values of the anchor, the chunk and the replayed tokens, one after another.

    Parameters
    ----------
    context, own : torch.Tensor
        Shape (batch_size, num_kv_heads, context_len or q_len, head_dim).
    anchor, start, end : int
        See :func:`kvzip_press.kernels.api.replay_attention`.
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    torch.Tensor
        Shape (batch_size * num_kv_heads, anchor + end - start + q_len, head_dim).
    """
    parts = [context[:, :, :anchor], context[:, :, start:end], own]
    return torch.cat(parts, dim=2).to(dtype).flatten(0, 1)


def _gathered_columns(
    anchor: int, start: int, end: int, context_len: int, q_len: int, device: torch.device
) -> torch.Tensor:
    """Positions of what :func:`_gather_scored` gathers, rising, int64."""
    regions = ((0, anchor), (start, end), (context_len, context_len + q_len))
    return torch.cat([torch.arange(*region, device=device) for region in regions])


def _over_group(
    scores: torch.Tensor, batch_size: int, reduction: str, column_weight: torch.Tensor | None
) -> torch.Tensor:
    """
    Reduce the scores of query heads, shape (segments, group, columns), to those of KV heads.

    Returns
    -------
    torch.Tensor
        Shape (batch_size, num_kv_heads, columns).
    """
    if column_weight is not None:
        factor = column_weight.to(scores.dtype).reshape(scores.shape)
        scores = scores * (factor.square() if reduction == "sum_of_squares" else factor)
    reduced = scores.amax(dim=1) if reduction in ("max", "logit") else scores.sum(dim=1)
    return reduced.view(batch_size, len(scores) // batch_size, scores.shape[-1])


def _merge_rest(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    *,
    skipped: tuple[tuple[int, int], tuple[int, int]],
    softmax_scale: float,
    softcap: float | None,
    window: int | None,
) -> torch.Tensor:
    """
    Merge attention over the remaining context, by log-sum-exp, into that over the scored columns.

    Parameters
    ----------
    out, lse : torch.Tensor
        Attention over the scored columns, shape (batch_size, num_heads, q_len, head_dim) and (batch_size, num_heads,
        q_len).
    query, context_key, context_value, softmax_scale, softcap, window
        See :func:`kvzip_press.kernels.api.replay_attention`.
    skipped : tuple[tuple[int, int], tuple[int, int]]
        The scored columns: anchor and chunk.
    """
    (_, anchor), (start, end) = skipped
    context_len = context_key.shape[2]
    for first, last in ((anchor, start), (end, context_len)):
        if first >= last:
            continue
        keys, values = context_key[:, :, first:last], context_value[:, :, first:last]
        if window is None:
            rest, rest_lse = _rest_attention(query, keys, values, softmax_scale, softcap)
        else:
            columns = torch.arange(first, last, device=query.device)
            rest, rest_lse = _windowed_rest(query, keys, values, columns, context_len, window, softmax_scale, softcap)
        out, lse = merge_lse(out, lse, rest.to(out.dtype), rest_lse.to(out.dtype))
    return out


def _rest_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax_scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over context columns that every replayed token sees, with log-sum-exp; grouped rows, no mask."""
    batch_size, num_heads, q_len, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if query.device.type != "cpu" or softcap is not None or value.shape[-1] != head_dim:
        return dense_attention(query, key, value, softmax_scale=softmax_scale, softcap=softcap)
    grouped = query.reshape(batch_size, num_kv_heads, -1, head_dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, key, value, 0.0, False, scale=softmax_scale
    )
    return out.reshape(query.shape), lse.reshape(batch_size, num_heads, q_len)


def _windowed_rest(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor,
    context_len: int,
    window: int,
    softmax_scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(context_len, context_len + query.shape[2], device=query.device).unsqueeze(-1)
    visible = (columns > rows - window).view(1, 1, query.shape[2], -1)
    return dense_attention(query, key, value, softmax_scale=softmax_scale, softcap=softcap, mask=visible)


def _replay(
    scorer: type[ColumnScores],
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
    segments, members = batch_size * num_kv_heads, batch_size * num_heads
    dtype, device = accumulation_dtype(query.dtype), query.device
    key_t = _gather_scored(*keys, anchor, start, end, dtype).transpose(-1, -2)
    value = None if values is None else _gather_scored(*values, anchor, start, end, dtype)
    first_own = anchor + end - start
    first_visible = None
    if window is not None:
        gathered = _gathered_columns(anchor, start, end, context_len, q_len, device)
        last_hidden = torch.arange(context_len, context_len + q_len, device=device) - window
        first_visible = torch.searchsorted(gathered, last_hidden, right=True)
    if row_weight is not None:
        row_weight = row_weight.to(dtype).contiguous()
    scores = scorer(Columns(members, anchor, first_own, reduction, softcap, first_visible, row_weight, dtype, device))
    out = None if value is None else query.new_empty(batch_size, num_heads, q_len, value.shape[-1], dtype=dtype)
    lse = query.new_empty(batch_size, num_heads, q_len, dtype=dtype) if with_lse else None
    row_elements = members * (first_own + q_len)
    block = max(1, min(q_len, max(_MIN_BLOCK_ROWS, scorer.block_elements(device) // max(1, row_elements))))
    buffer = torch.empty(block * row_elements, dtype=dtype, device=device)
    for first in range(0, q_len, block):
        last = min(first + block, q_len)
        n_rows, n_keys = last - first, first_own + last
        rows = query[:, :, first:last].to(dtype) * softmax_scale
        rows = rows.reshape(segments, num_heads // num_kv_heads * n_rows, head_dim)
        logits = buffer[: members * n_rows * n_keys].view(members, n_rows, n_keys)
        torch.bmm(rows, key_t[..., :n_keys], out=logits.view(segments, -1, n_keys))
        block_lse = None if lse is None else lse.new_empty(members, n_rows)
        weights = scores.visit(logits, first, block_lse)
        if out is not None and value is not None:
            block_out = torch.bmm(weights.view(segments, -1, n_keys), value[:, :n_keys])
            out[:, :, first:last] = block_out.view(batch_size, num_heads, n_rows, -1)
        if lse is not None and block_lse is not None:
            lse[:, :, first:last] = block_lse.view(batch_size, num_heads, n_rows)
    by_group = scores.result().view(segments, num_heads // num_kv_heads, end - start)
    return out, lse, _over_group(by_group, batch_size, reduction, column_weight)


def replay_attention(
    scorer: type[ColumnScores],
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
    See :func:`kvzip_press.kernels.api.replay_attention`; ``scorer`` reduces the columns.

    Full replay adds the attention over the columns that do not enter the score, merged by log-sum-exp, so no product is
    computed twice.
    """
    out, lse, scores = _replay(
        scorer,
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
        out = _merge_rest(
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
    scorer: type[ColumnScores],
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
    """See :func:`kvzip_press.kernels.api.replay_scores`; ``scorer`` reduces the columns. No product with values."""
    return _replay(
        scorer,
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
