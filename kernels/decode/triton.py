# mypy: disable-error-code="no-untyped-def"
"""Decoding from ragged keys on a GPU: split-K attention over packed pairs and the tail, merged by log-sum-exp."""

from __future__ import annotations

import math
from functools import partial

import torch
import triton
import triton.language as tl

from ..storage.quantization import KEY_BLOCK, PackedKeys, PackedValues, QuantizedKeys, QuantizedValues
from ..storage.segments import Segments
from ..triton_config import LaunchConfig, architecture, check_input, kind_of, launch, launch_config, multiprocessors
from .split_k import Split, work_list
from .triton_plain import attend
from .triton_quantized import attend_quantized

_LOG2_E = math.log2(math.e)
_MIN_ITEM = 128  # pairs: a shorter item reads less than its partial result costs
_MIN_TAIL_CHUNK = 256  # pairs
# Partial results of a row and columns that a program of the combination loads at a time: a decode step has few rows,
# so their columns are shared out
_FEW_PARTIALS = (16, 128)
_MANY_PARTIALS = (128, 32)
_COMBINE_WARPS = 4


@triton.jit(do_not_specialize=["num_rows", "num_items", "tail_splits"])
def _combine_kernel(
    out,  # [num_segments, num_rows, VALUE_D]
    lse,  # [num_segments, num_rows]
    partial,  # [num_partials, num_rows, VALUE_D]
    partial_lse,  # [num_partials, num_rows], in base 2
    offsets,  # [num_segments + 1]
    num_rows,
    num_items,
    tail_splits,
    VALUE_D: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Merge the partial results of one row in ``BLOCK_V`` columns, in their order."""
    column = tl.program_id(0) % COLUMN_TILES
    out_row = tl.program_id(0) // COLUMN_TILES
    segment = out_row // num_rows
    row = out_row % num_rows
    first = tl.load(offsets + segment)
    from_items = tl.load(offsets + segment + 1) - first
    from_tail = num_items + segment * tail_splits - from_items
    count = from_items + tail_splits
    offs_p = tl.arange(0, BLOCK_P)
    offs_v = column * BLOCK_V + tl.arange(0, BLOCK_V)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, count, BLOCK_P):
        index = start + offs_p
        is_part = index < count
        at = tl.where(index < from_items, first + index, from_tail + index).to(tl.int64) * num_rows + row
        part_lse = tl.load(partial_lse + at, mask=is_part, other=float("-inf"))
        part = tl.load(
            partial + at[:, None] * VALUE_D + offs_v[None, :],
            mask=is_part[:, None] & (offs_v < VALUE_D)[None, :],
            other=0.0,
        )  # [BLOCK_P, BLOCK_V]
        new_peak = tl.maximum(peak, tl.max(part_lse, 0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(part_lse - shift)
        decay = tl.exp2(peak - shift)
        peak = new_peak
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(part * weights[:, None], 0)
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    out_row = tl.cast(out_row, tl.int64)
    tl.store(out + out_row * VALUE_D + offs_v, acc / total, mask=offs_v < VALUE_D)
    natural = (peak + tl.log2(total)) * 0.6931471805599453
    tl.store(lse + out_row, tl.where(seen, natural, float("-inf")), mask=column == 0)


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
    """
    Float32, bfloat16, float16 and quantised pairs on a GPU. See :func:`kvzip_press.kernels.api.decode_attention`.

    Never waits for the GPU, except at the first call with ``segments``, whose work list is copied there. Raises
    ``ValueError`` if a tensor is not on a GPU, or of a type or head size that the kernels don't have.
    """
    head_dim, value_dim = query.shape[-1], packed_value.shape[-1]
    wide = max(head_dim, value_dim)
    check_input(query.device, (query.dtype, packed_key.dtype), wide)
    if isinstance(packed_key, QuantizedKeys) != isinstance(packed_value, QuantizedValues):
        raise ValueError("backend 'triton' takes keys and values both quantised or neither; use backend='torch'")
    query = _unit_last_stride(query)
    tail_len = 0
    if tail is None:
        tail_mask = None
    else:
        tail = (_unit_last_stride(tail[0]), _unit_last_stride(tail[1]))
        tail_len = tail[0].shape[2]
    if tail_mask is not None:
        tail_mask = _unit_last_stride(tail_mask.expand(-1, -1, -1, tail_len)).expand(*query.shape[:3], tail_len)

    num_rows = query.shape[0] * query.shape[1] // len(segments) * query.shape[2]
    arch, kind = architecture(query.device), kind_of(torch.promote_types(query.dtype, packed_key.dtype))
    plain_config = launch_config("decode", kind, wide, arch, num_rows)
    split_for = partial(_split, segments, query, value_dim, tail_len, softmax_scale, softcap)
    packed = None
    if isinstance(packed_key, torch.Tensor) and isinstance(packed_value, torch.Tensor):
        split = split_for(plain_config)
        packed = (_unit_last_stride(packed_key), _unit_last_stride(packed_value))
        if tail_mask is not None:
            attend(query, packed, None, None, split, plain_config)
            packed = None
    else:
        assert isinstance(packed_key, QuantizedKeys) and isinstance(packed_value, QuantizedValues)
        kind = "int8" if 8 in (packed_key.bits, packed_value.bits) else "int4"
        config = launch_config("decode", kind, wide, arch, num_rows)
        split = split_for(config)
        attend_quantized(query, packed_key, packed_value, split, config)
    if packed is not None or tail is not None:
        attend(query, packed, tail, tail_mask, split, plain_config)
    return _combine(split, query, value_dim)


def _unit_last_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _split(
    segments: Segments,
    query: torch.Tensor,
    value_dim: int,
    tail_len: int,
    softmax_scale: float,
    softcap: float | None,
    config: LaunchConfig,
) -> Split:
    """As many items as the GPU holds blocks at a time, or one a segment where the rows alone give work enough."""
    batch_size, num_heads, q_len = query.shape[:3]
    num_segments = len(segments)
    num_rows = batch_size * num_heads // num_segments * q_len
    row_tiles = triton.cdiv(num_rows, config.block_m)
    programs = config.blocks_per_sm * multiprocessors(query.device) // max(1, row_tiles)
    # Room for one tail item a segment; many segments are cut to even their lengths, but not for every row tile
    limit = max(programs - num_segments, 2 * num_segments if row_tiles == 1 else num_segments)
    step = max(KEY_BLOCK, config.block_n)
    work = work_list(segments, query.device, step=step, limit=limit, min_length=_MIN_ITEM)

    chunk = max(_MIN_TAIL_CHUNK, work.max_length, triton.cdiv(tail_len, max(1, programs // num_segments)))
    tail_chunk = triton.cdiv(chunk, step) * step
    tail_splits = triton.cdiv(tail_len, tail_chunk)
    shape = (len(work) + num_segments * tail_splits, num_rows)
    factor, cap = softmax_scale * _LOG2_E, None
    if softcap is not None:
        factor, cap = 2 * factor / softcap, softcap * _LOG2_E
    return Split(
        work=work,
        num_kv_heads=num_segments // batch_size,
        num_rows=num_rows,
        tail_chunk=tail_chunk,
        tail_splits=tail_splits,
        partial=torch.empty(*shape, value_dim, dtype=torch.float32, device=query.device),
        partial_lse=torch.empty(shape, dtype=torch.float32, device=query.device),
        factor=factor,
        cap=cap,
    )


def _combine(split: Split, query: torch.Tensor, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(*query.shape[:3], value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    block_p, block_v = _MANY_PARTIALS if split.most_partials > _FEW_PARTIALS[0] else _FEW_PARTIALS
    column_tiles = triton.cdiv(value_dim, block_v)
    launch(
        _combine_kernel,
        (lse.numel() * column_tiles,),
        out,
        lse,
        split.partial,
        split.partial_lse,
        split.work.offsets,
        split.num_rows,
        len(split.work),
        split.tail_splits,
        VALUE_D=value_dim,
        COLUMN_TILES=column_tiles,
        BLOCK_P=block_p,
        BLOCK_V=block_v,
        num_warps=_COMBINE_WARPS,
    )
    return out, lse
