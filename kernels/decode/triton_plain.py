# mypy: disable-error-code="no-untyped-def,assignment"
"""Split-K attention over packed keys and values and the dense tail after them, one partial result an item."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..triton_config import INTERPRETED, LaunchConfig, Strided, launch
from .split_k import Split

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_MIN_BLOCK_D = 16  # smallest depth of a matrix product
_MASKED_BLOCK_N = 16  # a wider tile of a mask takes more registers than there are


@triton.jit
def log2_logits(products, factor, cap):
    """
    Scaled and soft-capped logits in units of log 2.

    ``factor`` scales to units of log 2, or with a soft-cap (``cap`` in units of log 2, else None) to the exponent of
    the tanh: ``cap * tanh(x) = cap - 2 * cap / (exp(2 * x) + 1)``.
    """
    logits = products * factor
    if cap is not None:
        logits = cap - 2.0 * cap / (tl.exp2(logits) + 1.0)
    return logits


@triton.jit
def rounded(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """A float32 tile as ``dtype``, rounded to nearest even; the interpreter cuts bfloat16 off, so there by hand."""
    if UPCAST and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """Matrix product added to ``acc``; the interpreter would multiply the words of bfloat16, so there in float32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


# As a tail grows, nothing is compiled anew where a number happens to be 1 or divisible by 16
_MASK = ["mask", "mask_batch", "mask_head", "mask_token"]
_LENGTHS = ["first_item", "num_items", "tail_len", "tail_chunk", "tail_splits", "num_rows", "q_len"]


@triton.jit(do_not_specialize=_MASK + _LENGTHS)
def _attend_kernel(
    partial,  # [num_partials, num_rows, VALUE_D]
    partial_lse,  # [num_partials, num_rows]
    query,
    key,
    value,
    tail_key,
    tail_value,
    items,  # [num_items, 4]; placed here, the kernel takes the fewest registers
    mask,  # [batch_size, num_heads, q_len, tail_len], or None
    mask_batch,
    mask_head,
    mask_token,
    first_item,
    num_items,
    tail_len,
    tail_chunk,
    tail_splits,
    num_rows,
    q_len,
    row_tiles,
    num_kv_heads,
    group,
    factor,
    cap,
    D: tl.constexpr,
    VALUE_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_VALUE_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attention of ``BLOCK_M`` query rows of a segment over one item's keys."""
    program = tl.program_id(0)
    item = first_item + program // row_tiles  # row tiles of an item run side by side and share its keys in the cache
    in_tail = item >= num_items
    if in_tail:
        segment = (item - num_items) // tail_splits
        first = (item - num_items) % tail_splits * tail_chunk
        length = tl.minimum(tail_chunk, tail_len - first)
    else:
        segment = tl.load(items + item * 4)
        first = tl.load(items + item * 4 + 1)
        length = tl.load(items + item * 4 + 2) - first
    batch = (segment // num_kv_heads).to(tl.int64)
    kv_head = (segment % num_kv_heads).to(tl.int64)
    first = first.to(tl.int64)
    # Selected, not assigned in the branches: older compilers then still see that rows are aligned
    keys = tl.where(in_tail, tail_key.pointer + batch * tail_key.batch + kv_head * tail_key.head, key.pointer)
    values = tl.where(in_tail, tail_value.pointer + batch * tail_value.batch + kv_head * tail_value.head, value.pointer)
    key_stride = tl.where(in_tail, tail_key.token, key.token).to(tl.int64)
    value_stride = tl.where(in_tail, tail_value.token, value.token).to(tl.int64)

    rows = program % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    head = kv_head * group + rows // q_len
    token = (rows % q_len).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_VALUE_D)
    offs_n = tl.arange(0, BLOCK_N)
    query_rows = query.pointer + batch * query.batch + head * query.head + token * query.token
    in_query = is_row[:, None] & (offs_d < D)[None, :]
    q = tl.load(query_rows[:, None] + offs_d[None, :], mask=in_query, other=0.0).to(DTYPE)  # [BLOCK_M, BLOCK_D]
    key_tile = keys + (first + offs_n)[:, None] * key_stride + offs_d[None, :]
    value_tile = values + (first + offs_n)[:, None] * value_stride + offs_v[None, :]
    if mask is not None:
        mask_rows = mask + batch * mask_batch + head * mask_head + token * mask_token
        mask_tile = mask_rows[:, None] + (first + offs_n)[None, :]

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Summed over the keys after the loop: a sum across warps in each turn would cost two barriers
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_VALUE_D], tl.float32)
    for start in range(0, length, BLOCK_N):
        is_key = start + offs_n < length
        at = tl.cast(start, tl.int64)
        in_keys = is_key[:, None] & (offs_d < D)[None, :]
        k = tl.load(key_tile + at * key_stride, mask=in_keys, other=0.0)  # [BLOCK_N, BLOCK_D]
        logits = dot(q, tl.trans(k.to(DTYPE)), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), UPCAST)
        logits = log2_logits(logits, factor, cap)
        visible = is_key[None, :]
        if mask is not None:
            is_visible = tl.load(mask_tile + at, mask=visible & is_row[:, None], other=0)
            visible = visible & (is_visible != 0)
        logits = tl.where(visible, logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf - -inf would be NaN
        weights = tl.exp2(logits - shift[:, None])  # [BLOCK_M, BLOCK_N]
        decay = tl.exp2(peak - shift)
        peak = new_peak
        total = total * decay[:, None] + weights
        in_values = is_key[:, None] & (offs_v < VALUE_D)[None, :]
        v = tl.load(value_tile + at * value_stride, mask=in_values, other=0.0)  # [BLOCK_N, BLOCK_VALUE_D]
        acc = dot(rounded(weights, DTYPE, UPCAST), v.to(DTYPE), acc * decay[:, None], UPCAST)

    sums = tl.sum(total, 1)
    seen = sums > 0
    sums = tl.where(seen, sums, 1.0)
    out_rows = item.to(tl.int64) * num_rows + rows
    tl.store(
        partial + out_rows[:, None] * VALUE_D + offs_v[None, :],
        acc / sums[:, None],
        mask=is_row[:, None] & (offs_v < VALUE_D)[None, :],
    )
    tl.store(partial_lse + out_rows, tl.where(seen, peak + tl.log2(sums), float("-inf")), mask=is_row)


def attend(
    query: torch.Tensor,
    packed: tuple[torch.Tensor, torch.Tensor] | None,
    tail: tuple[torch.Tensor, torch.Tensor] | None,
    tail_mask: torch.Tensor | None,
    split: Split,
    config: LaunchConfig,
) -> None:
    """
    Attention of each item over its own keys alone, written to the partial results of ``split``.

    Items of ``packed``, [total, head_dim], and of ``tail``, [batch_size, num_kv_heads, tail_len, head_dim], take one
    launch; None leaves these items out. A ``tail_mask``, [batch_size, num_heads, q_len, tail_len], goes with the tail
    alone: then this is called once for each. Products are computed in the type that those of ``query``, [batch_size,
    num_heads, q_len, head_dim], and of the keys promote to. All tensors have a last stride of 1.
    """
    first_item = 0 if packed else len(split.work)
    last_item = len(split.partial) if tail else len(split.work)
    row_tiles = triton.cdiv(split.num_rows, config.block_m)
    # In the place of absent pairs any will do: no item reads them
    if packed is None:
        assert tail is not None
        packed = (tail[0][0, 0], tail[1][0, 0])
    elif tail is None:
        tail = (packed[0][None, None], packed[1][None, None])
    head_dim, value_dim = packed[0].shape[-1], packed[1].shape[-1]
    launch(
        _attend_kernel,
        ((last_item - first_item) * row_tiles,),
        split.partial,
        split.partial_lse,
        Strided(query, *query.stride()[:3]),
        *(Strided(pairs, 0, 0, pairs.stride(0)) for pairs in packed),
        *(Strided(pairs, *pairs.stride()[:3]) for pairs in tail),
        split.work.items,
        None if tail_mask is None else tail_mask.view(torch.uint8),
        *((0, 0, 0) if tail_mask is None else tail_mask.stride()[:3]),
        first_item,
        len(split.work),
        tail[0].shape[2],
        split.tail_chunk,
        split.tail_splits,
        split.num_rows,
        query.shape[2],
        row_tiles,
        split.num_kv_heads,
        query.shape[1] // split.num_kv_heads,
        split.factor,
        split.cap,
        D=head_dim,
        VALUE_D=value_dim,
        BLOCK_D=max(_MIN_BLOCK_D, triton.next_power_of_2(head_dim)),
        BLOCK_VALUE_D=max(_MIN_BLOCK_D, triton.next_power_of_2(value_dim)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n if tail_mask is None else min(config.block_n, _MASKED_BLOCK_N),
        DTYPE=_DTYPES[torch.promote_types(query.dtype, packed[0].dtype)],
        UPCAST=INTERPRETED,
        **config.options,
    )
