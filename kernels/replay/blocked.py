"""Replay in blocks of rows: the loop that torch and the CPU share, whatever scores their columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..decode.torch import accumulation_dtype, dense_attention
from ..merge import merge_lse
from ..options import ReplayOptions

_MIN_BLOCK_ROWS = 16


@dataclass(frozen=True)
class Columns:
    """The gathered columns of one replay, and what their scores are made of."""

    members: int  # query heads, over all rows of the batch
    anchor: int
    first_own: int  # the scored columns are [anchor, first_own); the replayed tokens' own follow
    reduction: str
    softcap: float | None
    first_visible: torch.Tensor | None  # first column that each replayed token sees: [q_len], int64
    row_weight: torch.Tensor | None  # of each replayed token: [batch_size, q_len], contiguous, in dtype
    dtype: torch.dtype  # of logits, weights and scores
    device: torch.device


class ColumnScores:
    """Scores of the columns, gathered over blocks of rows; those of ``splits`` shares of each head's rows apart."""

    def __init__(self, columns: Columns, splits: int = 1) -> None:
        self._columns = columns
        fill = -torch.inf if columns.reduction == "logit" else 0.0
        shape = (columns.members, splits, columns.first_own - columns.anchor)
        self._scores = torch.full(shape, fill, dtype=columns.dtype, device=columns.device)

    @staticmethod
    def block_elements(device: torch.device) -> int:
        """Logits of a block of rows."""
        raise NotImplementedError

    def visit(self, logits: torch.Tensor, first_row: int, lse: torch.Tensor | None) -> torch.Tensor:
        """
        Take a block of rows into account, and return their softmax weights in the shape of ``logits``.

        ``logits``, contiguous [members, rows, keys], are scaled products of the queries from ``first_row`` on with all
        columns up to the last row's own; they are overwritten. ``lse``, contiguous [members, rows], receives each
        row's log-sum-exp.
        """
        raise NotImplementedError

    def result(self) -> torch.Tensor:
        """Scores of each query head, shape (members, columns)."""
        return self._scores.amax(dim=1) if self._columns.reduction in ("max", "logit") else self._scores.sum(dim=1)


def replay_attention(
    scorer: type[ColumnScores],
    query: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    options: ReplayOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    See :func:`kvzip_press.kernels.api.replay_attention`; ``scorer`` reduces the columns.

    The columns that enter the score are gathered once; each block of queries takes one product with their keys, one
    softmax, one column reduction and one product with their values. Full replay adds the attention over the other
    columns, merged by log-sum-exp, so no product is computed twice.
    """
    batch_size, num_heads, q_len, head_dim = query.shape
    num_kv_heads = context_key.shape[1]
    segments, members = batch_size * num_kv_heads, batch_size * num_heads
    dtype, device = accumulation_dtype(query.dtype), query.device
    key_t = _gathered(context_key, own_key, options, dtype).transpose(-1, -2)
    value = _gathered(context_value, own_value, options, dtype)
    columns = _columns(query, context_key.shape[2], options)
    scores = scorer(columns)
    out = torch.empty(batch_size, num_heads, q_len, value.shape[-1], dtype=dtype, device=device)
    lse = None if options.local else torch.empty(batch_size, num_heads, q_len, dtype=dtype, device=device)
    row_elements = members * (columns.first_own + q_len)
    block = min(q_len, max(_MIN_BLOCK_ROWS, scorer.block_elements(device) // row_elements))
    buffer = torch.empty(block * row_elements, dtype=dtype, device=device)
    for first in range(0, q_len, block):
        last = min(first + block, q_len)
        n_rows, n_keys = last - first, columns.first_own + last
        rows = (query[:, :, first:last].to(dtype) * options.softmax_scale).reshape(segments, -1, head_dim)
        logits = buffer[: members * n_rows * n_keys].view(members, n_rows, n_keys)
        torch.bmm(rows, key_t[..., :n_keys], out=logits.view(segments, -1, n_keys))
        block_lse = None if lse is None else torch.empty(members, n_rows, dtype=dtype, device=device)
        weights = scores.visit(logits, first, block_lse).view(segments, -1, n_keys)
        out[:, :, first:last] = torch.bmm(weights, value[:, :n_keys]).view(batch_size, num_heads, n_rows, -1)
        if lse is not None and block_lse is not None:
            lse[:, :, first:last] = block_lse.view(batch_size, num_heads, n_rows)
    if lse is not None:
        out = _with_rest(out, lse, query, context_key, context_value, options)
    by_group = scores.result().unflatten(0, (batch_size, num_kv_heads, num_heads // num_kv_heads))
    return out, _over_group(by_group, options)


def _gathered(context: torch.Tensor, own: torch.Tensor, options: ReplayOptions, dtype: torch.dtype) -> torch.Tensor:
    """Anchor, chunk and the replayed tokens' own, shape (segments, anchor + end - start + q_len, head_dim)."""
    parts = [context[:, :, : options.anchor], context[:, :, options.start : options.end], own]
    return torch.cat(parts, dim=2).to(dtype).flatten(0, 1)


def _columns(query: torch.Tensor, context_len: int, options: ReplayOptions) -> Columns:
    batch_size, num_heads, q_len, _ = query.shape
    dtype, device = accumulation_dtype(query.dtype), query.device
    first_visible = row_weight = None
    if options.window is not None:
        regions = ((0, options.anchor), (options.start, options.end), (context_len, context_len + q_len))
        places = torch.cat([torch.arange(*region, dtype=torch.int64, device=device) for region in regions])
        last_hidden = places[-q_len:] - options.window
        first_visible = torch.searchsorted(places, last_hidden, right=True)
    if options.row_weight is not None:
        row_weight = options.row_weight.to(dtype).contiguous()
    return Columns(
        members=batch_size * num_heads,
        anchor=options.anchor,
        first_own=options.anchor + options.end - options.start,
        reduction=options.reduction,
        softcap=options.softcap,
        first_visible=first_visible,
        row_weight=row_weight,
        dtype=dtype,
        device=device,
    )


def _over_group(scores: torch.Tensor, options: ReplayOptions) -> torch.Tensor:
    """Reduce the scores of query heads, shape (batch_size, num_kv_heads, group, columns), to those of KV heads."""
    if options.column_weight is not None:
        factor = options.column_weight.to(scores.dtype)
        scores = scores * (factor.square() if options.reduction == "sum_of_squares" else factor)
    return scores.amax(dim=2) if options.reduction in ("max", "logit") else scores.sum(dim=2)


def _with_rest(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    options: ReplayOptions,
) -> torch.Tensor:
    """Merge attention over the columns of the context that don't enter the score into that over those that do."""
    context_len = context_key.shape[2]
    for first, last in ((options.anchor, options.start), (options.end, context_len)):
        if first < last:
            keys, values = context_key[:, :, first:last], context_value[:, :, first:last]
            rest, rest_lse = _rest_attention(query, keys, values, context_len - first, options)
            out, lse = merge_lse(out, lse, rest.to(out.dtype), rest_lse.to(out.dtype))
    return out


def _rest_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, distance: int, options: ReplayOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over context columns, the first ``distance`` before the replayed tokens, with its log-sum-exp."""
    batch_size, num_heads, q_len, head_dim = query.shape
    cpu, window, softcap = query.device.type == "cpu", options.window, options.softcap
    if cpu and window is None and softcap is None and value.shape[-1] == head_dim:
        # Every replayed token sees all of them: the heads of a group are rows of one, so that keys are read once
        grouped = query.reshape(batch_size, key.shape[1], -1, head_dim)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped, key, value, 0.0, False, scale=options.softmax_scale
        )
        return out.reshape(query.shape), lse.reshape(batch_size, num_heads, q_len)
    visible = None
    if window is not None:
        rows = torch.arange(distance, distance + q_len, dtype=torch.int64, device=query.device).unsqueeze(-1)
        columns = torch.arange(key.shape[2], dtype=torch.int64, device=query.device)
        visible = (columns > rows - window).view(1, 1, q_len, -1)
    return dense_attention(query, key, value, softmax_scale=options.softmax_scale, softcap=softcap, mask=visible)
