# mypy: disable-error-code="no-untyped-def"
"""Scores of the replay in Triton: softmax weights or logits of a chunk's pairs, reduced over the rows that see them."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..triton_config import INTERPRETED, architecture, decode_kind, multiprocessors, replay_config

LOG2_E = math.log2(math.e)


@triton.jit
def softcapped(logits, scale, softcap):
    """``softcap * tanh(logits * scale / softcap)``; ``scale`` and ``softcap`` in the same units."""
    growth = tl.exp2(logits * (scale / softcap * 2.8853900817779268))  # exp(2 x)
    return softcap - 2.0 * softcap / (growth + 1.0)


@triton.jit
def load_rows(
    pointer,
    row_offset,  # [BLOCK_ROWS]
    num_rows,
    num_channels,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_CHANNELS: tl.constexpr,
):
    """A tile [BLOCK_ROWS, BLOCK_C] of rows of contiguous channels; zeros in what is masked."""
    row, channel = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_C)
    pointers = pointer + row_offset[:, None] + channel[None, :]
    if MASK_ROWS and MASK_CHANNELS:
        return tl.load(pointers, mask=(row < num_rows)[:, None] & (channel < num_channels)[None, :], other=0.0)
    if MASK_ROWS:
        return tl.load(pointers, mask=(row < num_rows)[:, None], other=0.0)
    if MASK_CHANNELS:
        return tl.load(pointers, mask=(channel < num_channels)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def products(
    tile,  # [BLOCK_ROWS, BLOCK_D], the rows; not used with channels in blocks
    rows,
    row_offset,  # [BLOCK_ROWS]
    num_rows,
    others,
    other_offset,  # [BLOCK_OTHERS]
    num_others,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
    MASK_OTHERS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """
    Products of all ``rows`` with all ``others``: [BLOCK_ROWS, BLOCK_OTHERS], float32.

    A product in float32 holds its operands in registers: there the channels go through in blocks of ``BLOCK_C``.
    """
    if BLOCK_C == BLOCK_D:
        other = load_rows(
            others, other_offset, num_others, HEAD_DIM, BLOCK_OTHERS, BLOCK_D, MASK_OTHERS, HEAD_DIM < BLOCK_D
        )
        if UPCAST:
            other = other.to(tl.float32)
        return tl.dot(tile, tl.trans(other), input_precision="ieee")
    product = tl.zeros([BLOCK_ROWS, BLOCK_OTHERS], tl.float32)
    for channel in tl.range(0, BLOCK_D, BLOCK_C):
        left = HEAD_DIM - channel
        part = load_rows(rows + channel, row_offset, num_rows, left, BLOCK_ROWS, BLOCK_C, True, HEAD_DIM < BLOCK_D)
        other = load_rows(
            others + channel, other_offset, num_others, left, BLOCK_OTHERS, BLOCK_C, MASK_OTHERS, HEAD_DIM < BLOCK_D
        )
        product = tl.dot(part, tl.trans(other), product, input_precision="ieee")
    return product


@triton.jit
def _fold_rows(
    folded,  # [BLOCK_N, FOLD]
    begin,
    stop,
    key_tile,  # [BLOCK_N, BLOCK_D]
    key,
    num_keys,
    query,
    query_stride_h,
    lse,
    row_weight,
    first_token,
    end_token,  # [BLOCK_N]
    scale,
    softcap,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    REDUCTION: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FOLD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Fold the rows ``[begin, stop)`` in; all tiles are whole unless ``MASKED``, and then there is at most one."""
    MAXIMUM: tl.constexpr = REDUCTION == "max" or REDUCTION == "logit"
    row = tl.arange(0, BLOCK_M)
    row_token, row_member = row // PACK, row % PACK
    query_offset = row_token * QUERY_STRIDE + row_member * query_stride_h  # within a tile: 32 bits hold it
    for first_row in tl.range(begin, stop, BLOCK_M, num_stages=1 if MASKED else None):
        num_rows = stop - first_row
        token = first_token + first_row // PACK
        logits = products(
            key_tile,
            key,
            tl.arange(0, BLOCK_N) * KEY_STRIDE,
            num_keys,
            query + tl.cast(token, tl.int64) * QUERY_STRIDE,
            query_offset,
            num_rows,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_C,
            BLOCK_N,
            BLOCK_M,
            MASKED,
            UPCAST,
        )  # [BLOCK_N, BLOCK_M]
        factor = scale
        # The soft-cap rises with the logit: it can wait for the maximum unless the rows have weights
        if HAS_SOFTCAP and (REDUCTION != "logit" or row_weight is not None):
            logits = softcapped(logits, scale, softcap)
            factor = 1.0
        if row_weight is not None:
            weight = tl.load(row_weight + token + row_token, mask=row < num_rows, other=0.0)
        if REDUCTION == "logit":
            if row_weight is not None:
                logits *= (weight * factor)[None, :]
        else:
            shift = tl.load(
                lse + token * GROUP + row_token * GROUP + row_member, mask=row < num_rows, other=float("inf")
            )
            if REDUCTION == "max" and row_weight is not None:
                shift -= tl.log2(tl.maximum(weight, 0.0))
            logits = logits * factor - shift[None, :]
        if HAS_WINDOW:
            logits = tl.where((token + row_token)[None, :] < end_token[:, None], logits, float("-inf"))
        if MASKED and REDUCTION == "logit":
            logits = tl.where((row < num_rows)[None, :], logits, float("-inf"))
        if not MAXIMUM:
            logits = tl.exp2(logits)
            if row_weight is not None:
                logits *= weight[None, :]
            if REDUCTION == "sum_of_squares":
                logits *= logits
        # Rows FOLD apart lie in one thread's registers: warps exchange nothing before the last row
        split = tl.reshape(logits, [BLOCK_N, BLOCK_M // FOLD, FOLD])
        folded = tl.maximum(folded, tl.max(split, axis=1)) if MAXIMUM else folded + tl.sum(split, axis=1)
    return folded


@triton.jit(do_not_specialize=["q_len", "start", "num_columns", "window_end", "split_tokens", "num_kv_heads"])
def scores_kernel(
    partial,  # [row_splits, batch_size * num_kv_heads, num_columns]
    query,
    key,
    lse,  # [batch_size * num_kv_heads, q_len, GROUP], in base 2
    row_weight,  # [batch_size, q_len]
    column_weight,  # [batch_size * num_kv_heads, GROUP, num_columns]
    q_len,
    start,
    num_columns,
    window_end,
    split_tokens,
    num_kv_heads,
    scale,
    softcap,
    query_stride_b,
    query_stride_h,
    key_stride_b,
    key_stride_h,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    REDUCTION: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """
    Reduce one block of columns of one KV head over ``split_tokens`` replayed tokens of its query heads.

    A tile holds ``BLOCK_M // PACK`` tokens of ``PACK`` query heads; the heads of a group are gone through ``PACK`` at a
    time. With weights of columns ``PACK`` is 1, since each head has its own.
    """
    FOLD: tl.constexpr = 16
    MAXIMUM: tl.constexpr = REDUCTION == "max" or REDUCTION == "logit"
    first_column = tl.program_id(0) * BLOCK_N
    segment = tl.program_id(2).to(tl.int64)
    batch_row, kv_head = segment // num_kv_heads, segment % num_kv_heads
    column = first_column + tl.arange(0, BLOCK_N)
    key += batch_row * key_stride_b + kv_head * key_stride_h + (start + first_column).to(tl.int64) * KEY_STRIDE
    key_offset = tl.arange(0, BLOCK_N) * KEY_STRIDE
    num_keys = num_columns - first_column
    key_tile = load_rows(key, key_offset, num_keys, HEAD_DIM, BLOCK_N, BLOCK_D, True, HEAD_DIM < BLOCK_D)
    if UPCAST:
        key_tile = key_tile.to(tl.float32)

    first_token = tl.program_id(1) * split_tokens
    last_token = tl.minimum(first_token + split_tokens, q_len)
    end_token = column + window_end  # a column is out of sight from this token on
    if HAS_WINDOW:
        last_token = tl.minimum(last_token, first_column + BLOCK_N - 1 + window_end)
    num_rows = tl.maximum(last_token - first_token, 0) * PACK
    whole = num_rows // BLOCK_M * BLOCK_M

    query += batch_row * query_stride_b + kv_head * GROUP * query_stride_h
    if REDUCTION != "logit":
        lse += segment * q_len * GROUP
    if row_weight is not None:
        row_weight += batch_row * q_len
    score = tl.full([BLOCK_N], float("-inf") if REDUCTION == "logit" else 0.0, tl.float32)
    for member in range(0, GROUP, PACK):
        folded = tl.full([BLOCK_N, FOLD], float("-inf") if MAXIMUM else 0.0, tl.float32)
        member_query = query + tl.cast(member, tl.int64) * query_stride_h
        member_lse = lse if REDUCTION == "logit" else lse + member
        for masked in tl.static_range(2):
            folded = _fold_rows(
                folded,
                whole if masked else 0,
                num_rows if masked else whole,
                key_tile,
                key,
                num_keys,
                member_query,
                query_stride_h,
                member_lse,
                row_weight,
                first_token,
                end_token,
                scale,
                softcap,
                QUERY_STRIDE,
                KEY_STRIDE,
                REDUCTION,
                GROUP,
                PACK,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_C,
                BLOCK_M,
                BLOCK_N,
                FOLD,
                HAS_SOFTCAP,
                HAS_WINDOW,
                masked == 1,
                UPCAST,
            )
        if MAXIMUM:
            reduced = tl.max(folded, axis=1)  # [BLOCK_N]
            if REDUCTION == "max":
                reduced = tl.exp2(reduced)
            elif row_weight is None:
                unseen = reduced == float("-inf")
                scaled = softcapped(reduced, scale, softcap) if HAS_SOFTCAP else reduced * scale
                reduced = tl.where(unseen, reduced, scaled)
        else:
            reduced = tl.sum(folded, axis=1)
        if column_weight is not None:
            weight_offset = (segment * GROUP + member) * num_columns + column
            factor = tl.load(column_weight + weight_offset, mask=column < num_columns, other=0.0)
            if REDUCTION == "sum_of_squares":
                factor *= factor
            reduced = tl.where(reduced == float("-inf"), reduced, reduced * factor)
        score = tl.maximum(score, reduced) if MAXIMUM else score + reduced
    slot = tl.program_id(1) * tl.num_programs(2) + segment
    tl.store(partial + slot * num_columns + column, score, mask=column < num_columns)


def column_scores(
    query: torch.Tensor,
    context_key: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    start: int,
    end: int,
    softmax_scale: float,
    softcap: float | None,
    window: int | None,
    reduction: str,
    row_weight: torch.Tensor | None,
    column_weight: torch.Tensor | None,
) -> torch.Tensor:
    """
    Reduce the weights (or logits) that replayed tokens give to the columns ``[start, end)``.

    Parameters
    ----------
    query : torch.Tensor
        Shape (batch_size, num_heads, q_len, head_dim).
    context_key : torch.Tensor
        Shape (batch_size, num_kv_heads, context_len, head_dim).
    lse : torch.Tensor, optional
        Log-sum-exp of each row's scaled logits in base 2, float32, shape (batch_size * num_kv_heads, q_len, group).
        ``"logit"`` needs none.
    start, end, softmax_scale, softcap, window, reduction, row_weight, column_weight
        See :func:`kvzip_press.kernels.replay.triton.replay_attention`.

    Returns
    -------
    torch.Tensor
        float32, shape (batch_size, num_kv_heads, end - start).
    """
    batch_size, num_heads, q_len, head_dim = query.shape
    num_kv_heads, context_len = context_key.shape[1:3]
    group, segments, num_columns = num_heads // num_kv_heads, batch_size * num_kv_heads, end - start
    if num_columns == 0:
        return torch.empty(batch_size, num_kv_heads, 0, dtype=torch.float32, device=query.device)
    config = replay_config("scores", decode_kind(query.dtype), head_dim, architecture(query.device))
    block_m = config.block_m if softcap is None and window is None else config.block_m // 2
    pack = 1 if column_weight is not None else math.gcd(group, block_m)
    column_blocks = triton.cdiv(num_columns, config.block_n)
    splits = max(1, multiprocessors(query.device) * config.blocks_per_sm // (column_blocks * segments))
    tile_tokens = block_m // pack
    split_tokens = triton.cdiv(triton.cdiv(q_len, splits), tile_tokens) * tile_tokens
    splits = triton.cdiv(q_len, split_tokens)
    partial = torch.empty(splits, segments, num_columns, dtype=torch.float32, device=query.device)
    unit = 1.0 if reduction == "logit" else LOG2_E
    scores_kernel[column_blocks, splits, segments](
        partial,
        query,
        context_key,
        lse,
        None if row_weight is None else row_weight.to(torch.float32).contiguous(),
        None if column_weight is None else column_weight.to(torch.float32).contiguous(),
        q_len,
        start,
        num_columns,
        0 if window is None else start - context_len + window,
        split_tokens,
        num_kv_heads,
        softmax_scale * unit,
        1.0 if softcap is None else softcap * unit,
        *query.stride()[:2],
        *context_key.stride()[:2],
        QUERY_STRIDE=query.stride(2),
        KEY_STRIDE=context_key.stride(2),
        REDUCTION=reduction,
        GROUP=group,
        PACK=pack,
        HEAD_DIM=head_dim,
        BLOCK_D=block_dim(head_dim),
        BLOCK_C=block_channels(head_dim, query.dtype),
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=window is not None,
        UPCAST=INTERPRETED and query.dtype != torch.float32,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits == 1:
        scores = partial[0]
    else:
        scores = partial.amax(dim=0) if reduction in ("max", "logit") else partial.sum(dim=0)
    return scores.view(batch_size, num_kv_heads, num_columns)


def block_dim(head_dim: int) -> int:
    """Channels of a tile."""
    return max(16, triton.next_power_of_2(head_dim))


def block_channels(head_dim: int, dtype: torch.dtype) -> int:
    """Channels of a block in products of queries and keys."""
    return min(block_dim(head_dim), 32) if dtype == torch.float32 else block_dim(head_dim)
