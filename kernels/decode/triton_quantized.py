# mypy: disable-error-code="no-untyped-def,assignment,var-annotated"
"""Split-K attention over packed keys and values in 8 or 4 bits, dequantised in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..storage.quantization import KEY_BLOCK, VALUE_GROUP, QuantizedKeys, QuantizedValues
from ..triton_config import INTERPRETED, LaunchConfig, Strided, launch
from .split_k import Split
from .triton_codes import center, channels, halves, key_codes, key_offset, value_codes, value_offset
from .triton_plain import dot, log2_logits, rounded


@triton.jit
def _load_key_words(words, block, D: tl.constexpr, BLOCK_U: tl.constexpr, BITS: tl.constexpr):
    """Scales (or minima) of a key block, two channels a word, in the order of the units."""
    units = tl.arange(0, BLOCK_U)
    at = words + tl.cast(block, tl.int64) * (D // 2) + units
    is_unit = units < D * BITS // 16
    low = tl.load(at, mask=is_unit, other=0)
    if BITS == 8:
        return (low,)
    else:
        return (low, tl.load(at + D // 4, mask=is_unit, other=0))


@triton.jit
def _key_numbers(words, BITS: tl.constexpr):
    """Scales (or minima) of each part, float32."""
    if BITS == 8:
        return halves(words[0])
    else:
        low_even, low_odd = halves(words[0])
        high_even, high_odd = halves(words[1])
        return low_even, high_even, low_odd, high_odd


@triton.jit
def _load_value_words(words, start, last, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr):
    """Scales (or minima) of the values of a tile: float16 for one group, else two groups a word."""
    tokens = start + tl.arange(0, BLOCK_N)
    WORDS: tl.constexpr = (GROUPS + 1) // 2
    loaded = ()
    for word in tl.static_range(WORDS):
        loaded = loaded + (tl.load(words + tokens.to(tl.int64) * WORDS + word, mask=tokens < last, other=0),)
    return loaded


@triton.jit
def _value_numbers(words, GROUPS: tl.constexpr):
    """Scales (or minima) of each group, float32."""
    numbers = ()
    if GROUPS == 1:
        numbers = (words[0].to(tl.float32),)
    else:
        for word in tl.static_range(GROUPS // 2):
            numbers = numbers + halves(words[word])
    return numbers


@triton.jit
def _load_queries(query_rows, is_row, D: tl.constexpr, BLOCK_U: tl.constexpr, BITS: tl.constexpr):
    """
    Each part's channels of the queries [BLOCK_M, BLOCK_U], divided by their largest [BLOCK_M].

    At most 1, they stay in the range of float16 when a scale is multiplied in.
    """
    units = tl.arange(0, BLOCK_U)
    loaded = ()
    largest = tl.zeros([query_rows.shape[0]], tl.float32)
    for part in tl.static_range(16 // BITS):
        q = tl.load(
            query_rows[:, None] + channels(units, part, D, BITS)[None, :],
            mask=is_row[:, None] & (units < D * BITS // 16)[None, :],
            other=0.0,
        ).to(tl.float32)
        loaded = loaded + (q,)
        largest = tl.maximum(largest, tl.max(tl.abs(q), 1))
    largest = tl.where(largest > 0, largest, 1.0)
    queries = ()
    for part in tl.static_range(16 // BITS):
        queries = queries + (loaded[part] / largest[:, None],)
    return queries, largest


@triton.jit
def _products(queries, codes, scales, minima, BITS: tl.constexpr, UPCAST: tl.constexpr):
    """Products of the keys of a block, of which each part has its codes, with the queries: [BLOCK_N, BLOCK_M]."""
    products = tl.zeros([codes[0].shape[0], queries[0].shape[0]], tl.float32)
    constant = tl.zeros(queries[0].shape, tl.float32)  # what a query adds to all products of the block
    for part in tl.static_range(16 // BITS):
        scaled = (queries[part] * scales[part][None, :]).to(tl.float16)
        constant += queries[part] * (minima[part] + center(BITS) * scales[part])[None, :]
        constant -= scaled.to(tl.float32) * (key_offset(part, BITS) + center(BITS))
        products = dot(codes[part], tl.trans(scaled), products, UPCAST)
    return products + tl.sum(constant, 1)[None, :]


@triton.jit
def _scale_weights(weights, scales, minima, old, decay, BITS: tl.constexpr, UPCAST: tl.constexpr):
    """Weights times the scales of each group, and with its minima added to the ``old`` ones: all [BLOCK_N, BLOCK_M]."""
    scaled = ()
    new = ()
    for part in tl.static_range(len(scales)):
        of_group = rounded(weights * scales[part][:, None], tl.bfloat16, UPCAST)
        centers = minima[part] + center(BITS) * scales[part]
        added = old[part] * decay + weights * centers[:, None]
        if BITS == 4:
            added -= of_group.to(tl.float32) * (value_offset(BITS) + center(BITS))
        scaled = scaled + (of_group,)
        new = new + (added,)
    return scaled, new


@triton.jit
def _add_values(
    acc,  # by columns and parts: [BLOCK_VALUE_U, BLOCK_M]
    decay,
    weights,  # by groups: [BLOCK_N, BLOCK_M]
    rows,  # where the values' units begin: [BLOCK_N]
    is_key,
    VALUE_UNITS: tl.constexpr,
    BLOCK_VALUE_U: tl.constexpr,
    BITS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Products of a tile's values with the weights of its keys, added to what decays of the tiles before."""
    PARTS: tl.constexpr = 16 // BITS
    GROUPS: tl.constexpr = len(weights)
    new = ()
    for column in tl.static_range(len(acc) // PARTS):
        units = column * BLOCK_VALUE_U + tl.arange(0, BLOCK_VALUE_U)
        in_values = is_key[None, :] & (units < VALUE_UNITS)[:, None]
        v = tl.load(rows[None, :] + units[:, None], mask=in_values, other=0)  # [BLOCK_VALUE_U, BLOCK_N]
        codes = value_codes(v, BITS, UPCAST)
        for part in tl.static_range(PARTS):
            of_group = weights[column + (part % 2 * (GROUPS // 2) if BITS == 4 else 0)]
            new = new + (dot(codes[part], of_group, acc[column * PARTS + part] * decay, UPCAST),)
    return new


@triton.jit(do_not_specialize=["num_rows", "q_len"])
def _attend_quantized_kernel(
    partial,  # [num_partials, num_rows, VALUE_D]
    partial_lse,  # [num_partials, num_rows]
    items,  # [num_items, 4]
    query,
    key,  # [total, KEY_UNITS], 16 bits each
    key_scale,  # [key blocks, D // 2], two float16 a word; minima likewise
    key_minimum,
    value,  # [total, VALUE_UNITS]
    value_scale,  # [total, (GROUPS + 1) // 2]
    value_minimum,
    num_rows,
    q_len,
    row_tiles,
    num_kv_heads,
    group,
    factor,
    cap,
    D: tl.constexpr,
    VALUE_D: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_VALUE_U: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attention of ``BLOCK_M`` query rows of a segment over one item's keys."""
    VALUE_PARTS: tl.constexpr = 16 // VALUE_BITS
    KEY_UNITS: tl.constexpr = D * KEY_BITS // 16
    VALUE_UNITS: tl.constexpr = VALUE_D * VALUE_BITS // 16
    # Columns of units whose parts each lie in one group; in 4 bits, odd parts lie GROUPS // 2 groups further
    COLUMNS: tl.constexpr = GROUPS if VALUE_BITS == 8 else (GROUPS + 1) // 2

    program = tl.program_id(0)
    item = program // row_tiles
    segment = tl.load(items + item * 4)
    first = tl.load(items + item * 4 + 1)
    last = tl.load(items + item * 4 + 2)
    block = tl.load(items + item * 4 + 3)
    batch = (segment // num_kv_heads).to(tl.int64)
    kv_head = (segment % num_kv_heads).to(tl.int64)

    rows = program % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    head = kv_head * group + rows // q_len
    token = (rows % q_len).to(tl.int64)
    query_rows = query.pointer + batch * query.batch + head * query.head + token * query.token
    units = tl.arange(0, BLOCK_U)
    value_units = tl.arange(0, BLOCK_VALUE_U)
    offs_n = tl.arange(0, BLOCK_N)

    queries, largest = _load_queries(query_rows, is_row, D, BLOCK_U, KEY_BITS)

    # Keys are rows of all tiles and queries columns: then 8 queries fill an instruction's tile
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    minima = ()
    for _ in tl.static_range(GROUPS):
        minima = minima + (tl.zeros([BLOCK_N, BLOCK_M], tl.float32),)
    acc = ()
    for _ in tl.static_range(COLUMNS * VALUE_PARTS):
        acc = acc + (tl.zeros([BLOCK_VALUE_U, BLOCK_M], tl.float32),)
    # Scales are loaded a turn ahead, as the compiler does with codes
    key_scale_words = _load_key_words(key_scale, block, D, BLOCK_U, KEY_BITS)
    key_minimum_words = _load_key_words(key_minimum, block, D, BLOCK_U, KEY_BITS)
    value_scale_words = _load_value_words(value_scale, first, last, BLOCK_N, GROUPS)
    value_minimum_words = _load_value_words(value_minimum, first, last, BLOCK_N, GROUPS)

    for start in range(first, last, BLOCK_N):
        tokens = start + offs_n
        is_key = tokens < last
        k = tl.load(
            key + tokens.to(tl.int64)[:, None] * KEY_UNITS + units[None, :],
            mask=is_key[:, None] & (units < KEY_UNITS)[None, :],
            other=0,
        )  # [BLOCK_N, BLOCK_U]
        codes = key_codes(k, KEY_BITS, UPCAST)
        scales = _key_numbers(key_scale_words, KEY_BITS)
        key_minima = _key_numbers(key_minimum_words, KEY_BITS)
        products = _products(queries, codes, scales, key_minima, KEY_BITS, UPCAST)  # [BLOCK_N, BLOCK_M]
        logits = log2_logits(products, (largest * factor)[None, :], cap)
        logits = tl.where(is_key[:, None], logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(logits - shift[None, :])  # [BLOCK_N, BLOCK_M]
        decay = tl.exp2(peak - shift)[None, :]
        peak = new_peak
        total = total * decay + weights

        scales = _value_numbers(value_scale_words, GROUPS)
        value_minima = _value_numbers(value_minimum_words, GROUPS)
        scaled_weights, minima = _scale_weights(weights, scales, value_minima, minima, decay, VALUE_BITS, UPCAST)
        value_rows = value + tokens.to(tl.int64) * VALUE_UNITS
        acc = _add_values(
            acc, decay, scaled_weights, value_rows, is_key, VALUE_UNITS, BLOCK_VALUE_U, VALUE_BITS, UPCAST
        )
        block += 1
        if start + BLOCK_N < last:
            key_scale_words = _load_key_words(key_scale, block, D, BLOCK_U, KEY_BITS)
            key_minimum_words = _load_key_words(key_minimum, block, D, BLOCK_U, KEY_BITS)
            value_scale_words = _load_value_words(value_scale, start + BLOCK_N, last, BLOCK_N, GROUPS)
            value_minimum_words = _load_value_words(value_minimum, start + BLOCK_N, last, BLOCK_N, GROUPS)

    sums = tl.sum(total, 0)
    seen = sums > 0
    sums = tl.where(seen, sums, 1.0)
    out_rows = item.to(tl.int64) * num_rows + rows
    for column in tl.static_range(COLUMNS):
        in_column = column * BLOCK_VALUE_U + value_units
        for part in tl.static_range(VALUE_PARTS):
            of_group = minima[column + (part % 2 * (GROUPS // 2) if VALUE_BITS == 4 else 0)]
            tl.store(
                partial + out_rows[None, :] * VALUE_D + channels(in_column, part, VALUE_D, VALUE_BITS)[:, None],
                (acc[column * VALUE_PARTS + part] + tl.sum(of_group, 0)[None, :]) / sums[None, :],
                mask=is_row[None, :] & (in_column < VALUE_UNITS)[:, None],
            )
    tl.store(partial_lse + out_rows, tl.where(seen, peak + tl.log2(sums), float("-inf")), mask=is_row)


def attend_quantized(
    query: torch.Tensor, key: QuantizedKeys, value: QuantizedValues, split: Split, config: LaunchConfig
) -> None:
    """
    Attention of each item of the packed tensors over its own keys alone, written to the partial results of ``split``.

    ``query`` is [batch_size, num_heads, q_len, head_dim], its last stride 1. Raises ``ValueError`` if a head size does
    not divide into units or groups.
    """
    groups = value.scale.shape[1]
    for codes in (key, value):
        if codes.head_dim * codes.bits % 16:
            raise ValueError(
                f"{codes.bits} bits need a head_dim divisible by {16 // codes.bits}, got {codes.head_dim}; "
                "use backend='torch'"
            )
    if groups > 1 and value.head_dim % (2 * VALUE_GROUP):
        raise ValueError(f"value head_dim {value.head_dim} has an odd number of groups; use backend='torch'")
    columns = groups if value.bits == 8 else (groups + 1) // 2
    row_tiles = triton.cdiv(split.num_rows, config.block_m)
    value_words = torch.float16 if groups == 1 else torch.int32
    assert config.block_n == KEY_BLOCK
    launch(
        _attend_quantized_kernel,
        (len(split.work) * row_tiles,),
        split.partial,
        split.partial_lse,
        split.work.items,
        Strided(query, *query.stride()[:3]),
        key.codes.view(torch.int16),
        key.scale.view(torch.int32),
        key.minimum.view(torch.int32),
        value.codes.view(torch.int16),
        value.scale.view(value_words),
        value.minimum.view(value_words),
        split.num_rows,
        query.shape[2],
        row_tiles,
        split.num_kv_heads,
        query.shape[1] // split.num_kv_heads,
        split.factor,
        split.cap,
        D=key.head_dim,
        VALUE_D=value.head_dim,
        BLOCK_U=max(16, triton.next_power_of_2(key.head_dim * key.bits // 16)),
        BLOCK_VALUE_U=max(16, triton.next_power_of_2(value.head_dim * value.bits // 16 // columns)),
        KEY_BITS=key.bits,
        VALUE_BITS=value.bits,
        GROUPS=groups,
        BLOCK_M=config.block_m,
        BLOCK_N=KEY_BLOCK,
        UPCAST=INTERPRETED,
        **config.options,
    )
