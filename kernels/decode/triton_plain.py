# mypy: disable-error-code="no-untyped-def,assignment"
"""Split-K attention over packed keys and values and the dense tail after them, one partial result an item."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..triton_config import INTERPRETED, DecodeConfig
from .split_k import Split

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_MIN_BLOCK_D = 16  # smallest depth of a matrix product
_MASKED_BLOCK_N = 16  # a wider tile of a mask takes more registers than there are


@triton.jit
def log2_logits(products, factor, cap, HAS_CAP: tl.constexpr):
    """
    Scaled and soft-capped logits in units of log 2.

    ``factor`` scales to units of log 2, or with a soft-cap (``cap`` in units of log 2) to the exponent of the tanh:
    ``cap * tanh(x) = cap - 2 * cap / (exp(2 * x) + 1)``.
    """
    logits = products * factor
    if HAS_CAP:
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


@triton.jit(
    do_not_specialize=[
        "mask",
        "first_item",
        "num_items",
        "num_rows",
        "q_len",
        "tail_len",
        "tail_chunk",
        "tail_splits",
        "mask_batch",
        "mask_head",
        "mask_token",
    ]
)
def _attend_kernel(
    query,
    key,
    value,
    tail_key,
    tail_value,
    mask,
    items,
    partial,
    partial_lse,
    query_batch,
    query_head,
    query_token,
    key_token,
    value_token,
    tail_key_batch,
    tail_key_head,
    tail_key_token,
    tail_value_batch,
    tail_value_head,
    tail_value_token,
    mask_batch,
    mask_head,
    mask_token,
    mask_key,
    first_item,
    num_items,
    num_rows,
    q_len,
    row_tiles,
    num_kv_heads,
    group,
    tail_len,
    tail_chunk,
    tail_splits,
    factor,
    cap,
    D: tl.constexpr,
    VALUE_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_VALUE_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    DTYPE: tl.constexpr,
    UPCAST: tl.constexpr,
):
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
    keys = tl.where(in_tail, tail_key + batch * tail_key_batch + kv_head * tail_key_head, key)
    values = tl.where(in_tail, tail_value + batch * tail_value_batch + kv_head * tail_value_head, value)
    key_stride = tl.where(in_tail, tail_key_token, key_token).to(tl.int64)
    value_stride = tl.where(in_tail, tail_value_token, value_token).to(tl.int64)

    rows = program % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    head = kv_head * group + rows // q_len
    token = (rows % q_len).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_VALUE_D)
    offs_n = tl.arange(0, BLOCK_N)
    query_rows = query + batch * query_batch + head * query_head + token * query_token
    in_query = is_row[:, None] & (offs_d < D)[None, :]
    q = tl.load(query_rows[:, None] + offs_d[None, :], mask=in_query, other=0.0).to(DTYPE)  # [BLOCK_M, BLOCK_D]
    key_tile = keys + (first + offs_n)[:, None] * key_stride + offs_d[None, :]
    value_tile = values + (first + offs_n)[:, None] * value_stride + offs_v[None, :]
    if HAS_MASK:
        mask_rows = batch * mask_batch + head * mask_head + token * mask_token
        mask_tile = mask + mask_rows[:, None] + ((first + offs_n) * mask_key)[None, :]

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
        logits = log2_logits(logits, factor, cap, HAS_CAP)
        visible = is_key[None, :]
        if HAS_MASK:
            is_visible = tl.load(mask_tile + at * mask_key, mask=visible & is_row[:, None], other=0)
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
    *,
    factor: float,
    cap: float | None,
    config: DecodeConfig,
) -> None:
    """
    Attention of each item over its own keys alone, written to the partial results of ``split``.

    Items of the packed tensors and of the tail take one launch, or two where the tail has a mask: then this is called
    once for each.

    Parameters
    ----------
    query : torch.Tensor
        Shape (batch_size, num_heads, q_len, head_dim), unit last stride. Products are computed in the type that its
        own and the keys' promote to.
    packed : tuple[torch.Tensor, torch.Tensor], optional
        Keys and values of the items of ``split.work``, shape (total, head_dim), unit last stride; None leaves these
        items out.
    tail : tuple[torch.Tensor, torch.Tensor], optional
        Keys and values of the further items, shape (batch_size, num_kv_heads, tail_len, head_dim), unit last stride,
        in the type of ``packed``; None leaves these items out.
    tail_mask : torch.Tensor, optional
        Boolean, shape (batch_size, num_heads, q_len, tail_len): True where a tail key is visible. Not with ``packed``.
    split : Split
        The items.
    factor, cap : float
        See :func:`log2_logits`; ``cap`` None for none.
    config : DecodeConfig
        The launch.
    """
    first_item = 0 if packed else len(split.work)
    last_item = split.num_partials if tail else len(split.work)
    row_tiles = triton.cdiv(split.num_rows, config.block_m)
    num_programs = (last_item - first_item) * row_tiles
    if num_programs == 0:
        return
    # In the place of absent pairs any will do: no item reads them
    if packed is None:
        assert tail is not None
        packed = (tail[0][0, 0], tail[1][0, 0])
    elif tail is None:
        tail = (packed[0][None, None], packed[1][None, None])
    (key, value), (tail_key, tail_value) = packed, tail
    head_dim, value_dim = key.shape[-1], value.shape[-1]
    _attend_kernel[(num_programs,)](
        query,
        key,
        value,
        tail_key,
        tail_value,
        None if tail_mask is None else tail_mask.view(torch.uint8),
        split.work.items,
        split.partial,
        split.partial_lse,
        *query.stride()[:3],
        key.stride(0),
        value.stride(0),
        *tail_key.stride()[:3],
        *tail_value.stride()[:3],
        *((0, 0, 0, 0) if tail_mask is None else tail_mask.stride()),
        first_item,
        len(split.work),
        split.num_rows,
        query.shape[2],
        row_tiles,
        split.num_kv_heads,
        query.shape[1] // split.num_kv_heads,
        tail_key.shape[2],
        split.tail_chunk,
        split.tail_splits,
        factor,
        0.0 if cap is None else cap,
        D=head_dim,
        VALUE_D=value_dim,
        BLOCK_D=max(_MIN_BLOCK_D, triton.next_power_of_2(head_dim)),
        BLOCK_VALUE_D=max(_MIN_BLOCK_D, triton.next_power_of_2(value_dim)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n if tail_mask is None else min(config.block_n, _MASKED_BLOCK_N),
        HAS_MASK=tail_mask is not None,
        HAS_CAP=cap is not None,
        DTYPE=_DTYPES[torch.promote_types(query.dtype, key.dtype)],
        UPCAST=INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
