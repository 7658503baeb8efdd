"""What the replay kernels share: the columns that enter a score, and attention over those that do not."""

from __future__ import annotations

import torch

from .merge import merge_lse
from .torch_decode import dense_attention


def gather_scored(
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


def gathered_columns(
    anchor: int, start: int, end: int, context_len: int, q_len: int, device: torch.device
) -> torch.Tensor:
    """Positions of what :func:`gather_scored` gathers, rising, int64."""
    regions = ((0, anchor), (start, end), (context_len, context_len + q_len))
    return torch.cat([torch.arange(*region, device=device) for region in regions])


def over_group(
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


def merge_rest(
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
