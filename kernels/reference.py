"""The specification: per-head loops in float64, no blocks, no tricks. Everything faster is tested against it."""

from __future__ import annotations

import torch

from .storage.quantization import KEY_BLOCK, PackedKeys, PackedValues, QuantizedKeys, unpack_codes
from .storage.segments import Segments


def _logits(query: torch.Tensor, key: torch.Tensor, softmax_scale: float, softcap: float | None) -> torch.Tensor:
    logits = query.double() @ key.double().transpose(-1, -2) * softmax_scale  # [q_len, n]
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _stored_numbers(packed: PackedKeys | PackedValues, segments: Segments, index: int) -> torch.Tensor:
    """The keys or values of one segment as the numbers that are stored: float64, shape (n, head_dim)."""
    first, last = segments.bounds[index : index + 2]
    if isinstance(packed, torch.Tensor):
        return packed[first:last].double()
    codes = unpack_codes(packed.codes[first:last], packed.bits).double()
    if isinstance(packed, QuantizedKeys):
        block = int(packed.block_offsets[index]) + torch.arange(last - first) // KEY_BLOCK
        return codes * packed.scale[block].double() + packed.minimum[block].double()
    group = torch.arange(packed.head_dim) // (packed.head_dim // packed.scale.shape[1])
    return codes * packed.scale[first:last, group].double() + packed.minimum[first:last, group].double()


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
    """Specification of :func:`kvzip_press.kernels.api.decode_attention`, in float64."""
    batch_size, num_heads, q_len, _ = query.shape
    num_kv_heads = len(segments) // batch_size
    group = num_heads // num_kv_heads
    visible = query.new_ones(1, dtype=torch.bool) if tail_mask is None else tail_mask
    visible = visible.expand(batch_size, num_heads, q_len, 0 if tail is None else tail[0].shape[2])
    out = query.new_zeros(batch_size, num_heads, q_len, packed_value.shape[-1], dtype=torch.float64)
    lse = query.new_full((batch_size, num_heads, q_len), -torch.inf, dtype=torch.float64)
    for row in range(batch_size):
        for head in range(num_heads):
            kv_head = head // group
            keys = _stored_numbers(packed_key, segments, row * num_kv_heads + kv_head)
            values = _stored_numbers(packed_value, segments, row * num_kv_heads + kv_head)
            attended = torch.cat([visible.new_ones(q_len, len(keys)), visible[row, head]], dim=-1)
            if tail is not None:
                keys = torch.cat([keys, tail[0][row, kv_head].double()])
                values = torch.cat([values, tail[1][row, kv_head].double()])
            logits = _logits(query[row, head], keys, softmax_scale, softcap).masked_fill(~attended, -torch.inf)
            lse[row, head] = torch.logsumexp(logits, dim=-1)
            seeing = attended.any(dim=-1)
            out[row, head, seeing] = torch.softmax(logits[seeing], dim=-1) @ values
    return out, lse


def _visible(
    context_len: int, q_len: int, window: int | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the context and of the replayed tokens, and which of them each replayed token sees."""
    rows = torch.arange(context_len, context_len + q_len, device=device).unsqueeze(-1)
    columns = torch.arange(context_len + q_len, device=device)
    visible = columns <= rows
    if window is not None:
        visible &= columns > rows - window
    return columns, visible


def _in_score(columns: torch.Tensor, context_len: int, anchor: int, start: int, end: int) -> torch.Tensor:
    return (columns < anchor) | ((columns >= start) & (columns < end)) | (columns >= context_len)


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
    """Specification of :func:`kvzip_press.kernels.api.replay_attention`, in float64."""
    batch_size, num_heads, q_len, _ = query.shape
    num_kv_heads, context_len = context_key.shape[1:3]
    columns, attended = _visible(context_len, q_len, window, query.device)
    if local:
        attended = attended & _in_score(columns, context_len, anchor, start, end)
    out = query.new_zeros(batch_size, num_heads, q_len, own_value.shape[-1], dtype=torch.float64)
    for row in range(batch_size):
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            keys = torch.cat([context_key[row, kv_head], own_key[row, kv_head]])
            values = torch.cat([context_value[row, kv_head], own_value[row, kv_head]])
            logits = _logits(query[row, head], keys, softmax_scale, softcap).masked_fill(~attended, -torch.inf)
            out[row, head] = torch.softmax(logits, dim=-1) @ values.double()
    scores = replay_scores(
        query,
        own_key,
        context_key,
        anchor=anchor,
        start=start,
        end=end,
        softmax_scale=softmax_scale,
        softcap=softcap,
        window=window,
        reduction=reduction,
        row_weight=row_weight,
        column_weight=column_weight,
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
    """Specification of :func:`kvzip_press.kernels.api.replay_scores`, in float64."""
    batch_size, num_heads, q_len, _ = query.shape
    num_kv_heads, context_len = context_key.shape[1:3]
    group = num_heads // num_kv_heads
    columns, visible = _visible(context_len, q_len, window, query.device)
    in_score = _in_score(columns, context_len, anchor, start, end)
    scores = query.new_zeros(batch_size, num_kv_heads, end - start, dtype=torch.float64)
    for row in range(batch_size):
        for kv_head in range(num_kv_heads):
            keys = torch.cat([context_key[row, kv_head], own_key[row, kv_head]])
            candidates = []
            for member in range(group):
                logits = _logits(query[row, kv_head * group + member], keys, softmax_scale, softcap)
                logits = logits.masked_fill(~visible, -torch.inf)
                weights = logits
                if reduction != "logit":
                    weights = torch.softmax(logits.masked_fill(~in_score, -torch.inf), dim=-1)
                weights = weights[:, start:end]
                if row_weight is not None:
                    weights = weights * row_weight[row].double().unsqueeze(-1)
                if column_weight is not None:
                    weights = weights * column_weight[row, kv_head, member].double()
                candidates.append(weights)
            stacked = torch.cat(candidates)  # [group * q_len, end - start]
            if reduction in ("max", "logit"):
                scores[row, kv_head] = stacked.amax(dim=0)
            elif reduction == "sum_of_squares":
                scores[row, kv_head] = stacked.square().sum(dim=0)
            else:
                scores[row, kv_head] = stacked.sum(dim=0)
    return scores
