"""The specification: per-head loops in float64, no blocks, no tricks. Everything faster is tested against it."""

from __future__ import annotations

import torch


def _logits(query: torch.Tensor, key: torch.Tensor, softmax_scale: float, softcap: float | None) -> torch.Tensor:
    logits = query @ key.transpose(-1, -2) * softmax_scale  # [q_len, n]
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def decode_attention(
    query: torch.Tensor,
    packed_key: torch.Tensor,
    packed_value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    softmax_scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Specification of :func:`kvzip_press.kernels.api.decode_attention`, computed in float64."""
    batch_size, num_heads, q_len, _ = query.shape
    num_segments = len(cu_seqlens) - 1
    group = batch_size * num_heads // num_segments
    bounds = cu_seqlens.tolist()
    out = torch.zeros(batch_size, num_heads, q_len, packed_value.shape[-1], dtype=torch.float64, device=query.device)
    lse = torch.full((batch_size, num_heads, q_len), -torch.inf, dtype=torch.float64, device=query.device)
    for row in range(batch_size):
        for head in range(num_heads):
            segment = (row * num_heads + head) // group
            keys = packed_key[bounds[segment] : bounds[segment + 1]].double()
            values = packed_value[bounds[segment] : bounds[segment + 1]].double()
            if len(keys) == 0:
                continue
            logits = _logits(query[row, head].double(), keys, softmax_scale, softcap)
            lse[row, head] = torch.logsumexp(logits, dim=-1)
            out[row, head] = torch.softmax(logits, dim=-1) @ values
    return out, lse


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
    """Specification of :func:`kvzip_press.kernels.api.replay_attention`, computed in float64."""
    batch_size, num_heads, q_len, _ = query.shape
    num_kv_heads, context_len = context_key.shape[1:3]
    group = num_heads // num_kv_heads
    rows = torch.arange(context_len, context_len + q_len).unsqueeze(-1)
    columns = torch.arange(context_len + q_len)
    visible = columns <= rows
    if window is not None:
        visible &= columns > rows - window
    scored_keys = (columns < anchor) | ((columns >= start) & (columns < end)) | (columns >= context_len)
    attended = visible & scored_keys if local else visible
    out = torch.zeros(batch_size, num_heads, q_len, own_value.shape[-1], dtype=torch.float64)
    scores = torch.zeros(batch_size, num_kv_heads, end - start, dtype=torch.float64)
    for row in range(batch_size):
        for kv_head in range(num_kv_heads):
            keys = torch.cat([context_key[row, kv_head], own_key[row, kv_head]]).double()
            values = torch.cat([context_value[row, kv_head], own_value[row, kv_head]]).double()
            candidates = []
            for member in range(group):
                head = kv_head * group + member
                logits = _logits(query[row, head].double(), keys, softmax_scale, softcap)
                out[row, head] = torch.softmax(logits.masked_fill(~attended, -torch.inf), dim=-1) @ values
                if reduction == "logit":
                    weights = logits.masked_fill(~visible, -torch.inf)[:, start:end]
                else:
                    masked = logits.masked_fill(~(visible & scored_keys), -torch.inf)
                    weights = torch.softmax(masked, dim=-1)[:, start:end]
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
    return out, scores
