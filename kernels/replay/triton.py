# mypy: disable-error-code="no-untyped-def"
"""Attention of replayed tokens in Triton, with the log-sum-exp that their scores are taken from."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..triton_config import INTERPRETED, MAX_HEAD_DIM, architecture, decode_kind, replay_config
from .triton_scores import LOG2_E, block_channels, block_dim, column_scores, load_rows, products, softcapped

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _attend_tile(
    acc,  # [BLOCK_M, BLOCK_V]
    total,  # [BLOCK_M]
    peak,  # [BLOCK_M], in base 2
    query_tile,  # [BLOCK_M, BLOCK_D]
    query,
    query_offset,  # [BLOCK_M]
    num_rows,
    key,
    value,
    first_column,
    last,
    last_visible,  # [BLOCK_M]
    window,
    scale,
    softcap,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Take ``BLOCK_N`` columns in; without ``MASKED`` all rows see all of them."""
    column = tl.arange(0, BLOCK_N)
    num_columns = last - first_column
    tile = tl.cast(first_column, tl.int64)
    logits = products(
        query_tile,
        query,
        query_offset,
        num_rows,
        key + tile * KEY_STRIDE,
        column * KEY_STRIDE,
        num_columns,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_C,
        BLOCK_M,
        BLOCK_N,
        MASKED,
        UPCAST,
    )  # [BLOCK_M, BLOCK_N]
    factor = scale
    if HAS_SOFTCAP:
        logits = softcapped(logits, scale, softcap)
        factor = 1.0
    if MASKED:
        newest = last_visible - first_column  # [BLOCK_M], within the tile
        if CAUSAL:
            visible = column[None, :] <= newest[:, None]
        else:
            visible = (column < num_columns)[None, :]
        if HAS_WINDOW:
            visible = visible & (column[None, :] > (newest - window)[:, None])
        logits = tl.where(visible, logits, float("-inf"))
    raised = tl.maximum(peak, tl.max(logits, axis=1) * factor)
    shift = raised
    if CAUSAL and HAS_WINDOW:  # a row may have seen nothing yet
        shift = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(logits * factor - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, axis=1)
    if HAS_VALUES:
        value_rows = value + tile * VALUE_STRIDE
        value_offset = column * VALUE_STRIDE
        value_tile = load_rows(
            value_rows, value_offset, num_columns, VALUE_DIM, BLOCK_N, BLOCK_V, MASKED, VALUE_DIM < BLOCK_V
        )
        weights = weights.to(value_tile.dtype)
        if UPCAST:
            weights = weights.to(tl.float32)
            value_tile = value_tile.to(tl.float32)
        acc = tl.dot(weights, value_tile, acc * decay[:, None], input_precision="ieee")
    return acc, total, raised


@triton.jit
def _attend(
    acc,
    total,
    peak,
    query_tile,
    query,
    query_offset,
    num_rows,
    key,
    value,
    first,
    last,
    last_visible,
    window,
    scale,
    softcap,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Take the columns ``[first, last)`` in. Whole tiles of context need no mask unless there is a window."""
    MASKED: tl.constexpr = CAUSAL or HAS_WINDOW
    masked = first
    if not MASKED:
        masked += tl.maximum(last - first, 0) // BLOCK_N * BLOCK_N
        for column in tl.range(first, masked, BLOCK_N):
            acc, total, peak = _attend_tile(
                acc,
                total,
                peak,
                query_tile,
                query,
                query_offset,
                num_rows,
                key,
                value,
                column,
                last,
                last_visible,
                window,
                scale,
                softcap,
                KEY_STRIDE,
                VALUE_STRIDE,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_D,
                BLOCK_C,
                BLOCK_V,
                BLOCK_M,
                BLOCK_N,
                CAUSAL,
                False,
                HAS_SOFTCAP,
                HAS_WINDOW,
                HAS_VALUES,
                UPCAST,
            )
    for column in tl.range(masked, last, BLOCK_N, num_stages=None if MASKED else 1):
        acc, total, peak = _attend_tile(
            acc,
            total,
            peak,
            query_tile,
            query,
            query_offset,
            num_rows,
            key,
            value,
            column,
            last,
            last_visible,
            window,
            scale,
            softcap,
            KEY_STRIDE,
            VALUE_STRIDE,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_D,
            BLOCK_C,
            BLOCK_V,
            BLOCK_M,
            BLOCK_N,
            CAUSAL,
            True,
            HAS_SOFTCAP,
            HAS_WINDOW,
            HAS_VALUES,
            UPCAST,
        )
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
    query_stride_b,
    query_stride_h,
    query_stride_t,
    own_key_stride_b,
    own_key_stride_h,
    own_value_stride_b,
    own_value_stride_h,
    context_key_stride_b,
    context_key_stride_h,
    context_value_stride_b,
    context_value_stride_h,
    OWN_KEY_STRIDE: tl.constexpr,
    OWN_VALUE_STRIDE: tl.constexpr,
    CONTEXT_KEY_STRIDE: tl.constexpr,
    CONTEXT_VALUE_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """
    Attention of ``BLOCK_M`` rows, which are the query heads of a KV head at one token after another.

    The own keys come first (each row sees itself, so no later tile has to mind a row without any key), then the anchor
    and the chunk, where the log-sum-exp of the score is complete, then the rest of the context.
    """
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
    query += batch_row * query_stride_b + kv_head * GROUP * query_stride_h
    query_offset = token.to(tl.int64) * query_stride_t + member.to(tl.int64) * query_stride_h
    query_tile = load_rows(
        query, query_offset, num_rows - first_row, HEAD_DIM, BLOCK_M, BLOCK_D, True, HEAD_DIM < BLOCK_D
    )
    if UPCAST:
        query_tile = query_tile.to(tl.float32)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32) if HAS_VALUES else total
    own_key += batch_row * own_key_stride_b + kv_head * own_key_stride_h
    context_key += batch_row * context_key_stride_b + kv_head * context_key_stride_h
    if HAS_VALUES:
        own_value += batch_row * own_value_stride_b + kv_head * own_value_stride_h
        context_value += batch_row * context_value_stride_b + kv_head * context_value_stride_h

    first = tl.maximum(first_token - window + 1, 0) if HAS_WINDOW else 0
    acc, total, peak = _attend(
        acc,
        total,
        peak,
        query_tile,
        query,
        query_offset,
        num_rows - first_row,
        own_key,
        own_value,
        first,
        last_token + 1,
        token,
        window,
        scale,
        softcap,
        OWN_KEY_STRIDE,
        OWN_VALUE_STRIDE,
        HEAD_DIM,
        VALUE_DIM,
        BLOCK_D,
        BLOCK_C,
        BLOCK_V,
        BLOCK_M,
        BLOCK_N,
        True,
        HAS_SOFTCAP,
        HAS_WINDOW,
        HAS_VALUES,
        UPCAST,
    )
    for part in range(num_parts):  # the anchor, the chunk; between them, after them
        first = tl.where(part == 0, 0, tl.where(part == 1, start, tl.where(part == 2, anchor, end)))
        last = tl.where(part == 0, anchor, tl.where(part == 1, end, tl.where(part == 2, start, context_len)))
        if HAS_WINDOW:
            first = tl.maximum(first, context_len + first_token - window + 1)
        acc, total, peak = _attend(
            acc,
            total,
            peak,
            query_tile,
            query,
            query_offset,
            num_rows - first_row,
            context_key,
            context_value,
            first,
            last,
            context_len + token,
            window,
            scale,
            softcap,
            CONTEXT_KEY_STRIDE,
            CONTEXT_VALUE_STRIDE,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_D,
            BLOCK_C,
            BLOCK_V,
            BLOCK_M,
            BLOCK_N,
            False,
            HAS_SOFTCAP,
            HAS_WINDOW,
            HAS_VALUES,
            UPCAST,
        )
        if part == 1:
            tl.store(lse + segment * num_rows + row, peak + tl.log2(total), mask=row < num_rows)
    if HAS_VALUES:
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
    Attention of replayed tokens, and the score each context pair of the chunk gets from it.

    One kernel computes the output and each row's log-sum-exp over the columns of the score, a second one computes the
    chunk's logits again and reduces them by columns. Nothing grows as rows x columns and the host waits for nothing.

    Parameters
    ----------
    query : torch.Tensor
        Shape (batch_size, num_heads, q_len, head_dim), float32, bfloat16 or float16. Like all of the five, with any
        strides but a last one of 1.
    own_key, own_value : torch.Tensor
        Keys and values of the replayed tokens, shape (batch_size, num_kv_heads, q_len, head_dim or value_dim).
    context_key, context_value : torch.Tensor
        The cached context, shape (batch_size, num_kv_heads, context_len, head_dim or value_dim).
    anchor, start, end, local, softmax_scale, softcap, window, reduction, column_weight
        See :func:`kvzip_press.kernels.api.replay_attention`.
    row_weight : torch.Tensor, optional
        Shape (batch_size, q_len). With ``"max"``, a row of negative weight counts as one of weight 0.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        Output (batch_size, num_heads, q_len, value_dim) and scores (batch_size, num_kv_heads, end - start), float32.

    Raises
    ------
    ValueError
        If the kernels can't take the device, the dtypes, the head size, the strides or the scale.
    """
    out, lse = _attend_and_normalize(
        query,
        own_key,
        own_value,
        context_key,
        context_value,
        anchor=anchor,
        start=start,
        end=end,
        local=local,
        softmax_scale=softmax_scale,
        softcap=softcap,
        window=window,
    )
    assert out is not None
    scores = column_scores(
        query,
        context_key,
        None if reduction == "logit" else lse,
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
    """
    Compute the scores of :func:`replay_attention` without its output.

    ``"logit"`` takes one pass over the chunk; the other reductions first take each row's log-sum-exp.

    Parameters
    ----------
    query, own_key, context_key, row_weight
        See :func:`replay_attention`.
    anchor, start, end, softmax_scale, softcap, window, reduction, column_weight
        See :func:`kvzip_press.kernels.api.replay_attention`.

    Returns
    -------
    torch.Tensor
        float32, shape (batch_size, num_kv_heads, end - start).

    Raises
    ------
    ValueError
        If the kernels can't take the device, the dtypes, the head size, the strides or the scale.
    """
    lse = None
    if reduction == "logit":
        _check(softmax_scale, query, own_key, context_key)
    else:
        _, lse = _attend_and_normalize(
            query,
            own_key,
            None,
            context_key,
            None,
            anchor=anchor,
            start=start,
            end=end,
            local=True,
            softmax_scale=softmax_scale,
            softcap=softcap,
            window=window,
        )
    return column_scores(
        query,
        context_key,
        lse,
        start=start,
        end=end,
        softmax_scale=softmax_scale,
        softcap=softcap,
        window=window,
        reduction=reduction,
        row_weight=row_weight,
        column_weight=column_weight,
    )


def _attend_and_normalize(
    query: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor | None,
    context_key: torch.Tensor,
    context_value: torch.Tensor | None,
    *,
    anchor: int,
    start: int,
    end: int,
    local: bool,
    softmax_scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Output, if there are values, and log-sum-exp (batch_size * num_kv_heads, q_len, group) in base 2."""
    tensors = [tensor for tensor in (query, own_key, own_value, context_key, context_value) if tensor is not None]
    _check(softmax_scale, *tensors)
    batch_size, num_heads, q_len, head_dim = query.shape
    num_kv_heads, context_len = context_key.shape[1:3]
    group, segments = num_heads // num_kv_heads, batch_size * num_kv_heads
    if anchor == start:  # one range instead of two that meet
        anchor = start = 0
    value_dim = head_dim if own_value is None else own_value.shape[-1]
    config = replay_config("attention", decode_kind(query.dtype), max(head_dim, value_dim), architecture(query.device))
    out = None
    if own_value is not None:
        out = torch.empty(batch_size, num_heads, q_len, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(segments, q_len, group, dtype=torch.float32, device=query.device)
    own_value_strides = (0, 0, 0) if own_value is None else own_value.stride()
    context_value_strides = (0, 0, 0) if context_value is None else context_value.stride()
    attention_kernel[triton.cdiv(q_len * group, config.block_m), segments](
        out,
        lse,
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
        0 if window is None else window,
        2 if local else 4,
        num_kv_heads,
        softmax_scale * LOG2_E,
        1.0 if softcap is None else softcap * LOG2_E,
        *query.stride()[:3],
        *own_key.stride()[:2],
        *own_value_strides[:2],
        *context_key.stride()[:2],
        *context_value_strides[:2],
        OWN_KEY_STRIDE=own_key.stride(2),
        OWN_VALUE_STRIDE=own_value_strides[2],
        CONTEXT_KEY_STRIDE=context_key.stride(2),
        CONTEXT_VALUE_STRIDE=context_value_strides[2],
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=block_dim(head_dim),
        BLOCK_C=block_channels(head_dim, query.dtype),
        BLOCK_V=block_dim(value_dim),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n if softcap is None and window is None else config.block_n // 2,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=window is not None,
        HAS_VALUES=own_value is not None,
        UPCAST=INTERPRETED and query.dtype != torch.float32,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out, lse


def _check(softmax_scale: float, *tensors: torch.Tensor) -> None:
    query = tensors[0]
    if not (INTERPRETED or query.is_cuda):
        raise ValueError(f"backend 'triton' takes tensors on a GPU, got {query.device}; use backend='torch'")
    dtypes = {tensor.dtype for tensor in tensors}
    if query.dtype not in _DTYPES or len(dtypes) > 1:
        raise ValueError(
            "backend 'triton' takes tensors of one type, float32, bfloat16 or float16, got "
            f"{', '.join(sorted(map(str, dtypes)))}; use backend='torch'"
        )
    strides = [tensor.stride(-1) for tensor in tensors]
    if any(stride != 1 for stride in strides):
        raise ValueError(f"backend 'triton' takes contiguous channels, got strides {strides}; use backend='torch'")
    widest = max(tensor.shape[-1] for tensor in tensors)
    if widest > MAX_HEAD_DIM:
        raise ValueError(f"backend 'triton' takes head sizes up to {MAX_HEAD_DIM}, got {widest}; use backend='torch'")
    if not softmax_scale > 0:
        raise ValueError(f"backend 'triton' takes a positive softmax_scale, got {softmax_scale}; use backend='torch'")
