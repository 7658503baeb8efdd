"""The specification: per-head loops in float64, no blocks, no tricks. Everything faster is tested against it."""

from __future__ import annotations

import itertools

import torch

from .options import ReplayOptions
from .storage.quantization import KEY_BLOCK, PackedKeys, PackedValues, QuantizedKeys, unpack_codes
from .storage.segments import Segments

_REDUCE = {
    "max": lambda weights: weights.amax(dim=0),
    "sum_of_squares": lambda weights: weights.square().sum(dim=0),
    "sum": lambda weights: weights.sum(dim=0),
    "logit": lambda logits: logits.amax(dim=0),
}


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
        blocks, times, dim = slice(*packed.block_offsets[index : index + 2].tolist()), KEY_BLOCK, 0
    else:
        blocks, times, dim = slice(first, last), packed.head_dim // packed.scale.shape[1], 1
    scale, minimum = (part[blocks].double().repeat_interleave(times, dim) for part in (packed.scale, packed.minimum))
    return codes * scale[: last - first] + minimum[: last - first]


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
    tail_len = 0 if tail is None else tail[0].shape[2]
    visible = torch.ones(1, dtype=torch.bool, device=query.device) if tail_mask is None else tail_mask
    visible = visible.expand(batch_size, num_heads, q_len, tail_len)
    out = torch.zeros(batch_size, num_heads, q_len, packed_value.shape[-1], dtype=torch.float64, device=query.device)
    lse = torch.full((batch_size, num_heads, q_len), -torch.inf, dtype=torch.float64, device=query.device)
    for row, head in itertools.product(range(batch_size), range(num_heads)):
        kv_head = head // (num_heads // num_kv_heads)
        keys = _stored_numbers(packed_key, segments, row * num_kv_heads + kv_head)
        values = _stored_numbers(packed_value, segments, row * num_kv_heads + kv_head)
        context = torch.ones(q_len, len(keys), dtype=torch.bool, device=query.device)
        attended = torch.cat([context, visible[row, head]], dim=-1)
        if tail is not None:
            keys = torch.cat([keys, tail[0][row, kv_head].double()])
            values = torch.cat([values, tail[1][row, kv_head].double()])
        logits = _logits(query[row, head], keys, softmax_scale, softcap).masked_fill(~attended, -torch.inf)
        lse[row, head] = torch.logsumexp(logits, dim=-1)
        seeing = attended.any(dim=-1)
        out[row, head, seeing] = torch.softmax(logits[seeing], dim=-1) @ values
    return out, lse


def replay_attention(
    query: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    options: ReplayOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Specification of :func:`kvzip_press.kernels.api.replay_attention`, in float64."""
    batch_size, num_heads, q_len, _ = query.shape
    num_kv_heads, context_len = context_key.shape[1:3]
    group, chunk = num_heads // num_kv_heads, slice(options.start, options.end)
    columns = torch.arange(context_len + q_len, dtype=torch.int64, device=query.device)
    rows = columns[context_len:].unsqueeze(-1)
    visible = columns <= rows  # [q_len, context_len + q_len]
    if options.window is not None:
        visible &= columns > rows - options.window
    in_chunk = (columns >= options.start) & (columns < options.end)
    in_score = visible & ((columns < options.anchor) | in_chunk | (columns >= context_len))
    attended = in_score if options.local else visible
    out = torch.zeros(*query.shape[:3], own_value.shape[-1], dtype=torch.float64, device=query.device)
    num_columns = options.end - options.start
    scores = torch.zeros(batch_size, num_kv_heads, num_columns, dtype=torch.float64, device=query.device)
    for row, kv_head in itertools.product(range(batch_size), range(num_kv_heads)):
        keys = torch.cat([context_key[row, kv_head], own_key[row, kv_head]])
        values = torch.cat([context_value[row, kv_head], own_value[row, kv_head]]).double()
        members = []
        for member in range(group):
            head = kv_head * group + member
            logits = _logits(query[row, head], keys, options.softmax_scale, options.softcap)
            out[row, head] = torch.softmax(logits.masked_fill(~attended, -torch.inf), dim=-1) @ values
            if options.reduction == "logit":
                weights = logits.masked_fill(~visible, -torch.inf)[:, chunk]
            else:
                weights = torch.softmax(logits.masked_fill(~in_score, -torch.inf), dim=-1)[:, chunk]
            if options.row_weight is not None:
                weights = weights * options.row_weight[row].double().unsqueeze(-1)
            if options.column_weight is not None:
                weights = weights * options.column_weight[row, kv_head, member].double()
            members.append(weights)
        scores[row, kv_head] = _REDUCE[options.reduction](torch.cat(members))  # of [group * q_len, num_columns]
    return out, scores
