# mypy: disable-error-code="no-untyped-def"
"""Attention of replayed tokens in Triton, with the log-sum-exp that their scores are taken from."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..options import ReplayOptions
from ..triton_config import architecture, check_input, kind_of, launch, launch_config
from .triton_scores import column_scores
from .triton_tiles import LOG2_E, block_dim, kernel_shape, load_rows, of_head, products, softcapped, strided, whole_rows


@triton.jit
def _attend(
    acc,  # [BLOCK_M, BLOCK_V]
    total,  # [BLOCK_M]
    peak,  # [BLOCK_M], in base 2
    query_tile,  # [BLOCK_M, BLOCK_D]
    query_rows,  # see load_rows
    keys,  # pointer and distance of the tokens
    values,
    first,
    last,
    last_visible,  # [BLOCK_M]
    window,
    scale,
    softcap,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Take the columns ``[first, last)`` in. Whole tiles of context need no mask unless there is a window."""
    BLOCK_N: tl.constexpr = SHAPE.block_n
    ALL_MASKED: tl.constexpr = CAUSAL or SHAPE.has_window
    key, key_stride = keys
    value, value_stride = values
    column = tl.arange(0, BLOCK_N)
    rest = first
    if not ALL_MASKED:
        rest += tl.maximum(last - first, 0) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(1 if ALL_MASKED else 0, 2):
        for start in tl.range(
            rest if masked else first,
            last if masked else rest,
            BLOCK_N,
            num_stages=1 if masked and not ALL_MASKED else None,
        ):
            num_columns = last - start
            tile = tl.cast(start, tl.int64)
            key_rows = (key + tile * key_stride, column * key_stride, num_columns)
            logits = products(query_tile, query_rows, key_rows, masked == 1, SHAPE)  # [BLOCK_M, BLOCK_N]
            factor = scale
            if SHAPE.has_softcap:
                logits = softcapped(logits, scale, softcap)
                factor = 1.0
            if masked:
                newest = last_visible - start  # [BLOCK_M], within the tile
                if CAUSAL:
                    visible = column[None, :] <= newest[:, None]
                else:
                    visible = (column < num_columns)[None, :]
                if SHAPE.has_window:
                    visible = visible & (column[None, :] > (newest - window)[:, None])
                logits = tl.where(visible, logits, float("-inf"))
            raised = tl.maximum(peak, tl.max(logits, axis=1) * factor)
            shift = raised
            if CAUSAL and SHAPE.has_window:  # a row may have seen nothing yet
                shift = tl.where(raised == float("-inf"), 0.0, raised)
            weights = tl.exp2(logits * factor - shift[:, None])
            decay = tl.exp2(peak - shift)
            peak = raised
            total = total * decay + tl.sum(weights, axis=1)
            value_rows = (value + tile * value_stride, column * value_stride, num_columns)
            value_tile = load_rows(value_rows, 0, VALUE_DIM, BLOCK_V, masked == 1)  # [BLOCK_N, BLOCK_V]
            weights = weights.to(value_tile.dtype)
            if SHAPE.upcast:
                weights = weights.to(tl.float32)
                value_tile = value_tile.to(tl.float32)
            acc = tl.dot(weights, value_tile, acc * decay[:, None], input_precision="ieee")
    return acc, total, peak


@triton.jit(do_not_specialize=["q_len", "context_len", "anchor", "start", "end", "window", "num_parts", "num_kv_heads"])
def attention_kernel(
    out,  # [batch_size * num_kv_heads, GROUP, q_len, VALUE_DIM]
    lse,  # [batch_size * num_kv_heads, q_len, GROUP], in base 2
    query,
    own_key,
    own_value,
    context_key,
    context_value,
    q_len,
    context_len,
    anchor,
    start,
    end,
    window,
    num_parts,
    num_kv_heads,
    scale,
    softcap,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """
    Attention of ``BLOCK_M`` rows, which are the query heads of a KV head at one token after another.

    The own keys come first (each row sees itself, so no later tile has to mind a row without any key), then the anchor
    and the chunk, where the log-sum-exp of the score is complete, then the rest of the context.
    """
    GROUP: tl.constexpr = SHAPE.group
    BLOCK_M: tl.constexpr = SHAPE.block_m
    segment = tl.program_id(1).to(tl.int64)
    batch_row, kv_head = segment // num_kv_heads, segment % num_kv_heads
    # The last rows have most columns: they start first
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    num_rows = q_len * GROUP
    row = first_row + tl.arange(0, BLOCK_M)
    # Unsigned division by a power of two is one shift and leaves more registers to the tiles
    token = (row.to(tl.uint32) // GROUP).to(tl.int32)
    member = (row.to(tl.uint32) % GROUP).to(tl.int32)
    first_token = (first_row.to(tl.uint32) // GROUP).to(tl.int32)
    last_token = (tl.minimum(first_row + BLOCK_M, num_rows).to(tl.uint32) - 1) // GROUP
    last_token = last_token.to(tl.int32)
    query_offset = token.to(tl.int64) * query.token + member.to(tl.int64) * query.head
    query_pointer = of_head(query, batch_row, kv_head * GROUP)
    query_rows = (query_pointer, query_offset, num_rows - first_row)
    query_tile = whole_rows(query_rows, SHAPE)  # [BLOCK_M, BLOCK_D]

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    first = tl.maximum(first_token - window + 1, 0) if SHAPE.has_window else 0
    acc, total, peak = _attend(
        acc,
        total,
        peak,
        query_tile,
        query_rows,
        (of_head(own_key, batch_row, kv_head), own_key.token),
        (of_head(own_value, batch_row, kv_head), own_value.token),
        first,
        last_token + 1,
        token,
        window,
        scale,
        softcap,
        VALUE_DIM,
        BLOCK_V,
        True,
        SHAPE,
    )
    for part in range(num_parts):  # the anchor, the chunk; between them, after them
        first = tl.where(part == 0, 0, tl.where(part == 1, start, tl.where(part == 2, anchor, end)))
        last = tl.where(part == 0, anchor, tl.where(part == 1, end, tl.where(part == 2, start, context_len)))
        if SHAPE.has_window:
            first = tl.maximum(first, context_len + first_token - window + 1)
        acc, total, peak = _attend(
            acc,
            total,
            peak,
            query_tile,
            query_rows,
            (of_head(context_key, batch_row, kv_head), context_key.token),
            (of_head(context_value, batch_row, kv_head), context_value.token),
            first,
            last,
            context_len + token,
            window,
            scale,
            softcap,
            VALUE_DIM,
            BLOCK_V,
            False,
            SHAPE,
        )
        if part == 1:
            tl.store(lse + segment * num_rows + row, peak + tl.log2(total), mask=row < num_rows)
    channel = tl.arange(0, BLOCK_V)
    out += segment * num_rows * VALUE_DIM
    out_offset = (member.to(tl.int64) * q_len + token) * VALUE_DIM
    present = (row < num_rows)[:, None] & (channel < VALUE_DIM)[None, :]
    tl.store(out + out_offset[:, None] + channel[None, :], acc / total[:, None], mask=present)


def replay_attention(
    query: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    options: ReplayOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    See :func:`kvzip_press.kernels.api.replay_attention`; with ``"max"``, a row of negative weight counts as one of 0.

    One kernel computes the output and each row's log-sum-exp over the columns of the score, a second one computes the
    chunk's logits again and reduces them by columns. Nothing grows as rows x columns and the host waits for nothing.
    Tensors may have any strides but a last one of 1. Raises ``ValueError`` if the kernels can't take the device, the
    dtypes, the head sizes, the strides or the scale.
    """
    _check(options.softmax_scale, query, own_key, own_value, context_key, context_value)
    batch_size, num_heads, q_len, head_dim = query.shape
    num_kv_heads, context_len = context_key.shape[1:3]
    value_dim = own_value.shape[-1]
    group, segments = num_heads // num_kv_heads, batch_size * num_kv_heads
    arch = architecture(query.device)
    config = launch_config("attention", kind_of(query.dtype), max(head_dim, value_dim), arch)
    if options.softcap is not None or options.window is not None:
        config = replace(config, block_n=config.block_n // 2)
    # One range instead of two that meet
    anchor, start = (0, 0) if options.anchor == options.start else (options.anchor, options.start)
    out = torch.empty(batch_size, num_heads, q_len, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(segments, q_len, group, dtype=torch.float32, device=query.device)
    launch(
        attention_kernel,
        (triton.cdiv(q_len * group, config.block_m), segments),
        out,
        lse,
        *map(strided, (query, own_key, own_value, context_key, context_value)),
        q_len,
        context_len,
        anchor,
        start,
        options.end,
        options.window or 0,
        2 if options.local else 4,
        num_kv_heads,
        options.softmax_scale * LOG2_E,
        1.0 if options.softcap is None else options.softcap * LOG2_E,
        VALUE_DIM=value_dim,
        BLOCK_V=block_dim(value_dim),
        SHAPE=kernel_shape(query, group, options, config),
        **config.options,
    )
    return out, column_scores(query, context_key, lse, options)


def _check(softmax_scale: float, *tensors: torch.Tensor) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    check_input(tensors[0].device, dtypes, max(tensor.shape[-1] for tensor in tensors))
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"backend 'triton' takes tensors of one type, got {names}; use backend='torch'")
    strides = [tensor.stride(-1) for tensor in tensors]
    if any(stride != 1 for stride in strides):
        raise ValueError(f"backend 'triton' takes contiguous channels, got strides {strides}; use backend='torch'")
    if not softmax_scale > 0:
        raise ValueError(f"backend 'triton' takes a positive softmax_scale, got {softmax_scale}; use backend='torch'")
