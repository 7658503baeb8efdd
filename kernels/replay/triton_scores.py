# mypy: disable-error-code="no-untyped-def"
"""Scores of the replay in Triton: softmax weights or logits of a chunk's pairs, reduced over the rows that see them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..options import ReplayOptions
from ..triton_config import architecture, kind_of, launch, launch_config, multiprocessors
from .triton_tiles import LOG2_E, kernel_shape, of_head, products, softcapped, strided, whole_rows


@triton.jit
def _fold_rows(
    folded,  # [BLOCK_N, FOLD]
    begin,
    stop,
    key_tile,  # [BLOCK_N, BLOCK_D]
    keys,  # see load_rows
    queries,  # pointer, distance of the tokens, distance of the query heads
    lse,
    row_weight,
    first_token,
    end_token,  # [BLOCK_N]
    scale,
    softcap,
    MASKED: tl.constexpr,
    FOLD: tl.constexpr,
    REDUCTION: tl.constexpr,
    PACK: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Fold the rows ``[begin, stop)`` in; all tiles are whole unless ``MASKED``, and then there is at most one."""
    MAXIMUM: tl.constexpr = REDUCTION == "max" or REDUCTION == "logit"
    BLOCK_M: tl.constexpr = SHAPE.block_m
    BLOCK_N: tl.constexpr = SHAPE.block_n
    query, token_stride, head_stride = queries
    row = tl.arange(0, BLOCK_M)
    row_token, row_member = row // PACK, row % PACK
    query_offset = row_token * token_stride + row_member * head_stride  # within a tile: 32 bits hold it
    for first_row in tl.range(begin, stop, BLOCK_M, num_stages=1 if MASKED else None):
        num_rows = stop - first_row
        token = first_token + first_row // PACK
        query_rows = (query + tl.cast(token, tl.int64) * token_stride, query_offset, num_rows)
        logits = products(key_tile, keys, query_rows, MASKED, SHAPE)  # [BLOCK_N, BLOCK_M]
        factor = scale
        # The soft-cap rises with the logit: it can wait for the maximum unless the rows have weights
        if SHAPE.has_softcap and (REDUCTION != "logit" or row_weight is not None):
            logits = softcapped(logits, scale, softcap)
            factor = 1.0
        if row_weight is not None:
            weight = tl.load(row_weight + token + row_token, mask=row < num_rows, other=0.0)
        if REDUCTION == "logit":
            if row_weight is not None:
                logits *= (weight * factor)[None, :]
        else:
            row_lse = lse + token * SHAPE.group + row_token * SHAPE.group + row_member
            shift = tl.load(row_lse, mask=row < num_rows, other=float("inf"))
            if REDUCTION == "max" and row_weight is not None:
                shift -= tl.log2(tl.maximum(weight, 0.0))
            logits = logits * factor - shift[None, :]
        if SHAPE.has_window:
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
    REDUCTION: tl.constexpr,
    PACK: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """
    Reduce one block of columns of one KV head over ``split_tokens`` replayed tokens of its query heads.

    A tile holds ``BLOCK_M // PACK`` tokens of ``PACK`` query heads; the heads of a group are gone through ``PACK`` at a
    time. With weights of columns ``PACK`` is 1, since each head has its own.
    """
    FOLD: tl.constexpr = 16
    MAXIMUM: tl.constexpr = REDUCTION == "max" or REDUCTION == "logit"
    GROUP: tl.constexpr = SHAPE.group
    BLOCK_M: tl.constexpr = SHAPE.block_m
    BLOCK_N: tl.constexpr = SHAPE.block_n
    first_column = tl.program_id(0) * BLOCK_N
    segment = tl.program_id(2).to(tl.int64)
    batch_row, kv_head = segment // num_kv_heads, segment % num_kv_heads
    column = first_column + tl.arange(0, BLOCK_N)
    first_key = of_head(key, batch_row, kv_head) + (start + first_column).to(tl.int64) * key.token
    keys = (first_key, tl.arange(0, BLOCK_N) * key.token, num_columns - first_column)
    key_tile = whole_rows(keys, SHAPE)  # [BLOCK_N, BLOCK_D]

    first_token = tl.program_id(1) * split_tokens
    last_token = tl.minimum(first_token + split_tokens, q_len)
    end_token = column + window_end  # a column is out of sight from this token on
    if SHAPE.has_window:
        last_token = tl.minimum(last_token, first_column + BLOCK_N - 1 + window_end)
    num_rows = tl.maximum(last_token - first_token, 0) * PACK
    whole = num_rows // BLOCK_M * BLOCK_M

    first_query = of_head(query, batch_row, kv_head * GROUP)
    lse += segment * q_len * GROUP
    if row_weight is not None:
        row_weight += batch_row * q_len
    score = tl.full([BLOCK_N], float("-inf") if REDUCTION == "logit" else 0.0, tl.float32)
    for member in range(0, GROUP, PACK):
        folded = tl.full([BLOCK_N, FOLD], float("-inf") if MAXIMUM else 0.0, tl.float32)
        queries = (first_query + tl.cast(member, tl.int64) * query.head, query.token, query.head)
        for masked in tl.static_range(2):
            folded = _fold_rows(
                folded,
                whole if masked else 0,
                num_rows if masked else whole,
                key_tile,
                keys,
                queries,
                lse + member,
                row_weight,
                first_token,
                end_token,
                scale,
                softcap,
                masked == 1,
                FOLD,
                REDUCTION,
                PACK,
                SHAPE,
            )
        if MAXIMUM:
            reduced = tl.max(folded, axis=1)  # [BLOCK_N]
            if REDUCTION == "max":
                reduced = tl.exp2(reduced)
            elif row_weight is None:
                unseen = reduced == float("-inf")
                scaled = softcapped(reduced, scale, softcap) if SHAPE.has_softcap else reduced * scale
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
    query: torch.Tensor, context_key: torch.Tensor, lse: torch.Tensor, options: ReplayOptions
) -> torch.Tensor:
    """
    Reduce the weights (or logits) that replayed tokens give to the columns of the chunk.

    ``query`` and ``context_key`` are those of the replay; ``lse``, float32 [batch_size * num_kv_heads, q_len, group],
    is the log-sum-exp of each row's scaled logits in base 2, which ``"logit"`` doesn't read. Returns float32
    [batch_size, num_kv_heads, end - start].
    """
    batch_size, num_heads, q_len, head_dim = query.shape
    num_kv_heads, context_len = context_key.shape[1:3]
    group, segments, num_columns = num_heads // num_kv_heads, batch_size * num_kv_heads, options.end - options.start
    config = launch_config("scores", kind_of(query.dtype), head_dim, architecture(query.device))
    if options.softcap is not None or options.window is not None:
        config = replace(config, block_m=config.block_m // 2)
    # The query heads that share a tile; weights of columns are by head
    pack = 1 if options.column_weight is not None else math.gcd(group, config.block_m)
    tile_tokens = config.block_m // pack
    column_blocks = triton.cdiv(num_columns, config.block_n)
    splits = max(1, multiprocessors(query.device) * config.blocks_per_sm // max(1, column_blocks * segments))
    split_tokens = triton.cdiv(triton.cdiv(q_len, splits), tile_tokens) * tile_tokens
    splits = triton.cdiv(q_len, split_tokens)
    partial = torch.empty(splits, segments, num_columns, dtype=torch.float32, device=query.device)
    if options.reduction not in ("max", "sum_of_squares", "sum", "logit"):
        raise NotImplementedError(f"backend 'triton' has no reduction {options.reduction!r}")
    unit = 1.0 if options.reduction == "logit" else LOG2_E
    launch(
        scores_kernel,
        (column_blocks, splits, segments),
        partial,
        strided(query),
        strided(context_key),
        lse,
        *(
            None if weight is None else weight.to(torch.float32).contiguous()
            for weight in (options.row_weight, options.column_weight)
        ),
        q_len,
        options.start,
        num_columns,
        0 if options.window is None else options.start - context_len + options.window,
        split_tokens,
        num_kv_heads,
        options.softmax_scale * unit,
        1.0 if options.softcap is None else options.softcap * unit,
        REDUCTION=options.reduction,
        PACK=pack,
        SHAPE=kernel_shape(query, group, options, config),
        **config.options,
    )
    if splits == 1:
        scores = partial[0]
    else:
        scores = partial.amax(dim=0) if options.reduction in ("max", "logit") else partial.sum(dim=0)
    return scores.view(batch_size, num_kv_heads, num_columns)
