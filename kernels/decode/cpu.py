"""
Decoding from ragged keys on any CPU: compiled by numba on the user's machine, no compiler needed there.

Work is cut into items of nearly equal size, whatever the lengths of the heads. Threads take the next item until none is
left, and whoever finishes the last one merges: which thread did what changes no bit of the result.
"""

from __future__ import annotations

import numpy as np
import torch

from ..simd.products import MAX_ROWS, add_values, products
from ..simd.rows import fold_scales, padded, widen_row, widen_rows
from ..simd.threads import float_bits, run_on_threads, worker
from ..simd.vectors import (
    BFLOAT16,
    BYTES,
    FLOAT16,
    FLOAT32,
    HALF_BYTES,
    ITEMSIZE,
    LANES,
    capped,
    compiled,
    even_lanes,
    exponential,
    fetch_add,
    float_word,
    lanes_maximum,
    lanes_sum,
    load,
    load_byte,
    load_float,
    load_int,
    maximum_or_nan,
    odd_lanes,
    splat,
    store,
    store_float,
    store_int,
    word,
)
from ..storage.quantization import KEY_BLOCK, QuantizedKeys, QuantizedValues
from ..storage.segments import Segments

_BLOCK = KEY_BLOCK  # keys that are handled together; a key block's scales hold for one of them
_ROW_BLOCK = 64  # query rows of a segment that are handled together
_TAIL_PART_LENGTH = 1024
_ITEMS_PER_THREAD = 3
_MIN_ITEM = 256
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

# The job: 64-bit words, shared by all threads. Addresses and steps in bytes
(
    _STARTED,
    _NEXT,
    _DONE,
    _ITEMS,
    _CONTEXT_ITEMS,
    _TAIL_PARTS,
    _TAIL_PART,
    _SEGMENTS,
    _NUM_KV_HEADS,
    _ROWS,
    _Q_LEN,
    _KEY_DIM,
    _VALUE_DIM,
    _SCALE,
    _SOFTCAP,
    _QUERY,
    _QUERY_KIND,
    _QUERY_STEP,
    _KEY,
    _KEY_KIND,
    _KEY_STEP,
    _VALUE,
    _VALUE_KIND,
    _VALUE_STEP,
    _KEY_SCALE,
    _KEY_MINIMUM,
    _KEY_BLOCKS,
    _VALUE_SCALE,
    _VALUE_MINIMUM,
    _VALUE_GROUPS,
    _TAIL_LENGTH,
    _TAIL_KIND,
    _TAIL_KEY,
    _TAIL_KEY_ROW,
    _TAIL_KEY_HEAD,
    _TAIL_KEY_STEP,
    _TAIL_VALUE,
    _TAIL_VALUE_ROW,
    _TAIL_VALUE_HEAD,
    _TAIL_VALUE_STEP,
    _MASK,
    _MASK_ROW,
    _MASK_HEAD,
    _MASK_QUERY,
    _MASK_STEP,
    _BOUNDS,
    _CUTS,
    _CUT_OFFSETS,
    _PARTS,
    _SCRATCH,
    _OUT,
    _LSE,
    _WORDS,
) = range(53)


@compiled
def _part_step(value_dim):  # type: ignore[no-untyped-def]
    """Bytes of one partial result: the sum of values, then in one more vector its peak and its sum of weights."""
    return 4 * padded(value_dim)


@compiled
def _scalar_exponential(x):  # type: ignore[no-untyped-def]
    return lanes_maximum(exponential(splat(x)))


@compiled
def _softmax_step(logits, vectors, statistics):  # type: ignore[no-untyped-def]
    """
    Replace a block of logits by weights relative to the row's peak so far, and bring its statistics up to date.

    Returns the factor of what was summed before.
    """
    highest = load(logits)
    for vector in range(1, vectors):
        highest = maximum_or_nan(highest, load(logits + 4 * LANES * vector))
    old_peak = load_float(statistics)
    block_peak = lanes_maximum(highest)
    peak = old_peak if old_peak >= block_peak else block_peak  # NaN if the block's is
    if peak == -np.inf:
        for vector in range(vectors):
            store(logits + 4 * LANES * vector, splat(np.float32(0.0)))
        return np.float32(1.0)
    total = splat(np.float32(0.0))
    offset = splat(peak)
    for vector in range(vectors):
        address = logits + 4 * LANES * vector
        weights = exponential(load(address) - offset)
        store(address, weights)
        total = total + weights
    factor = _scalar_exponential(old_peak - peak)
    store_float(statistics, peak)
    store_float(statistics + 4, load_float(statistics + 4) * factor + lanes_sum(total))
    return factor


@compiled
def _fold_group(vector, group_vectors, weights, folded, offsets, rows, count, scales, minima):  # type: ignore[no-untyped-def]
    place = 4 * _BLOCK * (vector // group_vectors)
    fold_scales(weights, folded, offsets, rows, 4 * _BLOCK, count, scales + place, minima + place)


@compiled
def _add_block(  # type: ignore[no-untyped-def]
    kind,
    quantized,
    rows,
    values,
    step,
    count,
    weights,
    folded_weights,
    out,
    out_step,
    factors,
    offsets,
    vectors,
    group_vectors,
    scales,
    minima,
    high_half,
):
    """Add a block of weighted values to a few rows of output, as many channels at a time as registers hold."""
    stored = vectors // 2 if kind == HALF_BYTES else vectors
    vector = 0
    while vector < stored:
        left = stored - vector
        if quantized:
            left = min(left, group_vectors - vector % group_vectors)
            _fold_group(vector, group_vectors, weights, folded_weights, offsets, rows, count, scales, minima)
        width = 4 if left >= 4 else 2 if left >= 2 else 1
        if kind == HALF_BYTES:
            left = min(left, group_vectors - (stored + vector) % group_vectors)
            width = 2 if left >= 2 else 1
            other_weights, other_offsets = folded_weights, offsets
            if (stored + vector) // group_vectors != vector // group_vectors:
                other_weights, other_offsets = folded_weights + MAX_ROWS * 4 * _BLOCK, offsets + 4 * LANES
                _fold_group(
                    stored + vector,
                    group_vectors,
                    weights,
                    other_weights,
                    other_offsets,
                    rows,
                    count,
                    scales,
                    minima,
                )
            store_int(high_half, other_weights)
            store_int(high_half + 8, out + 4 * LANES * (stored + vector))
            store_int(high_half + 16, other_offsets)
        add_values(
            kind,
            rows,
            width,
            values + LANES * ITEMSIZE[kind] * vector,
            step,
            _BLOCK * step,
            count,
            folded_weights if quantized else weights,
            4 * _BLOCK,
            out + 4 * LANES * vector,
            out_step,
            factors,
            offsets,
            high_half,
        )
        vector += width


@compiled
def _zero_rows(rows, step, first, last, vectors):  # type: ignore[no-untyped-def]
    for row in range(first, last):
        for vector in range(vectors):
            store(rows + row * step + 4 * LANES * vector, splat(np.float32(0.0)))


@compiled
def _load_value_scales(source, target, count, groups, rows, spare):  # type: ignore[no-untyped-def]
    """Write float16 [count, groups] as float32 [groups, _BLOCK]; ``rows`` has room for as much."""
    if groups == 1:
        widen_row(FLOAT16, source, target, count, spare)
        return
    if count < _BLOCK:
        # The last vector's other lanes meet weights of 0, and must be numbers
        _zero_rows(rows, 4 * _BLOCK, 0, groups, _BLOCK // LANES)
        _zero_rows(target, 4 * _BLOCK, 0, groups, _BLOCK // LANES)
    widen_row(FLOAT16, source, rows, count * groups, spare)
    if groups == 2:
        for vector in range((count + LANES - 1) // LANES):
            first, second = load(rows + 8 * LANES * vector), load(rows + 8 * LANES * vector + 4 * LANES)
            store(target + 4 * LANES * vector, even_lanes(first, second))
            store(target + 4 * (_BLOCK + LANES * vector), odd_lanes(first, second))
    else:
        for item in range(count):
            for group in range(groups):
                store_float(target + 4 * (_BLOCK * group + item), load_float(rows + 4 * (groups * item + group)))


@compiled
def _load_queries(job, segment, first_row, rows, target, spare):  # type: ignore[no-untyped-def]
    """Write the scaled queries of a block of rows as float32."""
    channels = word(job, _KEY_DIM)
    source = word(job, _QUERY) + (segment * word(job, _ROWS) + first_row) * word(job, _QUERY_STEP)
    widen_rows(word(job, _QUERY_KIND), source, word(job, _QUERY_STEP), target, rows, channels, spare)
    scale = splat(float_word(job, _SCALE))
    step = 4 * padded(channels)
    for row in range(rows):
        for vector in range((channels + LANES - 1) // LANES):
            address = target + row * step + 4 * LANES * vector
            store(address, load(address) * scale)


@compiled
def _mask_logits(job, logits, segment, row, first, count):  # type: ignore[no-untyped-def]
    """Set the logits of tail keys to -inf that the mask hides from this row."""
    q_len = word(job, _Q_LEN)
    num_kv_heads = word(job, _NUM_KV_HEADS)
    head = segment % num_kv_heads * (word(job, _ROWS) // q_len) + row // q_len
    mask = word(job, _MASK) + segment // num_kv_heads * word(job, _MASK_ROW) + head * word(job, _MASK_HEAD)
    mask += row % q_len * word(job, _MASK_QUERY) + first * word(job, _MASK_STEP)
    for item in range(count):
        if load_byte(mask + item * word(job, _MASK_STEP)) == 0:
            store_float(logits + 4 * item, np.float32(-np.inf))


@compiled
def _run_item(job, item, scratch):  # type: ignore[no-untyped-def]
    """Attention of one block of rows over one stretch of the context or of the tail."""
    key_dim, value_dim = word(job, _KEY_DIM), word(job, _VALUE_DIM)
    context_items = word(job, _CONTEXT_ITEMS)
    items = context_items + word(job, _SEGMENTS) * word(job, _TAIL_PARTS)
    index = item % items
    first_row = item // items * _ROW_BLOCK
    rows = min(_ROW_BLOCK, word(job, _ROWS) - first_row)
    in_tail = index >= context_items
    if in_tail:
        segment = (index - context_items) // word(job, _TAIL_PARTS)
        first = (index - context_items) % word(job, _TAIL_PARTS) * word(job, _TAIL_PART)
        length = min(word(job, _TAIL_PART), word(job, _TAIL_LENGTH) - first)
        batch_row, head = segment // word(job, _NUM_KV_HEADS), segment % word(job, _NUM_KV_HEADS)
        key_kind = value_kind = word(job, _TAIL_KIND)
        key_step, value_step = word(job, _TAIL_KEY_STEP), word(job, _TAIL_VALUE_STEP)
        keys = word(job, _TAIL_KEY) + batch_row * word(job, _TAIL_KEY_ROW) + head * word(job, _TAIL_KEY_HEAD)
        values = word(job, _TAIL_VALUE) + batch_row * word(job, _TAIL_VALUE_ROW)
        values += head * word(job, _TAIL_VALUE_HEAD)
    else:
        cut = word(job, _CUTS) + 24 * index
        segment, first, length = load_int(cut), load_int(cut + 8), load_int(cut + 16)
        begin = load_int(word(job, _BOUNDS) + 8 * segment)
        key_kind, value_kind = word(job, _KEY_KIND), word(job, _VALUE_KIND)
        key_step, value_step = word(job, _KEY_STEP), word(job, _VALUE_STEP)
        keys = word(job, _KEY) + begin * key_step
        values = word(job, _VALUE) + begin * value_step

    key_vectors, value_vectors = (key_dim + LANES - 1) // LANES, (value_dim + LANES - 1) // LANES
    wide_key_step, wide_value_step, logits_step = 4 * padded(key_dim), 4 * padded(value_dim), 4 * _BLOCK
    groups = word(job, _VALUE_GROUPS)
    spare = scratch
    biases = spare + 8 * LANES
    factors = biases + 4 * _ROW_BLOCK
    offsets = factors + 4 * LANES
    high_half = offsets + 8 * LANES
    logits = high_half + 4 * LANES
    folded_weights = logits + MAX_ROWS * logits_step
    scales = folded_weights + 2 * MAX_ROWS * logits_step
    minima = scales + wide_key_step
    value_scales = minima + wide_key_step
    value_minima = value_scales + groups * logits_step
    raw = value_minima + groups * logits_step
    queries = raw + groups * logits_step
    folded_queries = queries + _ROW_BLOCK * wide_key_step
    wide_keys = folded_queries + _ROW_BLOCK * wide_key_step
    wide_values = wide_keys + _BLOCK * wide_key_step
    softcap = float_word(job, _SOFTCAP)
    part_step = _part_step(value_dim)
    parts = word(job, _PARTS) + (index * word(job, _ROWS) + first_row) * part_step
    statistics = 4 * LANES * value_vectors
    keys_in_place = key_dim % (2 * LANES if key_kind == HALF_BYTES else LANES) == 0
    values_in_place = value_dim % (2 * LANES if value_kind == HALF_BYTES else LANES) == 0

    _load_queries(job, segment, first_row, rows, queries, spare)
    for row in range(rows):
        store_float(biases + 4 * row, np.float32(0.0))
        for vector in range(value_vectors):
            store(parts + row * part_step + 4 * LANES * vector, splat(np.float32(0.0)))
        store_float(parts + row * part_step + statistics, np.float32(-np.inf))
        store_float(parts + row * part_step + statistics + 4, np.float32(0.0))
    for row in range(MAX_ROWS):
        store_float(offsets + 4 * row, np.float32(0.0))

    for block in range(first, first + length, _BLOCK):
        count = min(_BLOCK, first + length - block)
        vectors = (count + LANES - 1) // LANES
        block_keys, block_key_step, block_key_kind, block_queries = keys + block * key_step, key_step, key_kind, queries
        if not keys_in_place or count % LANES != 0:
            widen_rows(key_kind, block_keys, key_step, wide_keys, count, key_dim, spare)
            _zero_rows(wide_keys, wide_key_step, count, vectors * LANES, key_vectors)
            block_keys, block_key_step, block_key_kind = wide_keys, wide_key_step, FLOAT32
        if key_kind >= BYTES:
            key_block = load_int(word(job, _KEY_BLOCKS) + 8 * segment) + block // _BLOCK
            widen_row(FLOAT16, word(job, _KEY_SCALE) + 2 * key_block * key_dim, scales, key_dim, spare)
            widen_row(FLOAT16, word(job, _KEY_MINIMUM) + 2 * key_block * key_dim, minima, key_dim, spare)
            fold_scales(queries, folded_queries, biases, rows, wide_key_step, key_dim, scales, minima)
            block_queries = folded_queries
        block_values, block_value_step, block_value_kind = values + block * value_step, value_step, value_kind
        if not values_in_place:
            widen_rows(value_kind, block_values, value_step, wide_values, count, value_dim, spare)
            block_values, block_value_step, block_value_kind = wide_values, wide_value_step, FLOAT32
        if value_kind >= BYTES:
            pair = load_int(word(job, _BOUNDS) + 8 * segment) + block
            _load_value_scales(word(job, _VALUE_SCALE) + 2 * pair * groups, value_scales, count, groups, raw, spare)
            _load_value_scales(word(job, _VALUE_MINIMUM) + 2 * pair * groups, value_minima, count, groups, raw, spare)

        for group_row in range(0, rows, MAX_ROWS):
            group_rows = min(MAX_ROWS, rows - group_row)
            for vector in range(vectors):
                products(
                    block_key_kind,
                    group_rows,
                    block_keys + vector * LANES * block_key_step,
                    block_key_step,
                    _BLOCK * block_key_step if group_row == 0 else 0,
                    block_queries + group_row * wide_key_step,
                    wide_key_step,
                    key_vectors,
                    logits + 4 * LANES * vector,
                    logits_step,
                )
            for row in range(group_rows):
                row_logits = logits + row * logits_step
                bias = splat(load_float(biases + 4 * (group_row + row)))
                if key_kind >= BYTES or softcap > 0:
                    for vector in range(vectors):
                        address = row_logits + 4 * LANES * vector
                        scores = load(address) + bias
                        store(address, capped(scores, softcap) if softcap > 0 else scores)
                for missing in range(count, vectors * LANES):
                    store_float(row_logits + 4 * missing, np.float32(-np.inf))
                if in_tail and word(job, _MASK) != 0:
                    _mask_logits(job, row_logits, segment, first_row + group_row + row, block, count)
                part = parts + (group_row + row) * part_step + statistics
                store_float(factors + 4 * row, _softmax_step(row_logits, vectors, part))
            _add_block(
                block_value_kind,
                value_kind >= BYTES,
                group_rows,
                block_values,
                block_value_step,
                count,
                logits,
                folded_weights,
                parts + group_row * part_step,
                part_step,
                factors,
                offsets,
                value_vectors,
                value_vectors // groups,
                value_scales,
                value_minima,
                high_half,
            )


@compiled
def _merge_row(job, segment, row, total_vector):  # type: ignore[no-untyped-def]
    """Merge the parts of one query row by their peaks and write its output and log-sum-exp."""
    value_dim = word(job, _VALUE_DIM)
    vectors = (value_dim + LANES - 1) // LANES
    part_step, statistics = _part_step(value_dim), 4 * LANES * vectors
    rows = word(job, _ROWS)
    first_cut = load_int(word(job, _CUT_OFFSETS) + 8 * segment)
    cuts = load_int(word(job, _CUT_OFFSETS) + 8 * segment + 8) - first_cut
    tail_parts = word(job, _TAIL_PARTS)
    first_tail = word(job, _CONTEXT_ITEMS) + segment * tail_parts
    peak = np.float32(-np.inf)
    for index in range(cuts + tail_parts):
        item = first_cut + index if index < cuts else first_tail + index - cuts
        part_peak = load_float(word(job, _PARTS) + (item * rows + row) * part_step + statistics)
        peak = peak if peak >= part_peak else part_peak
    for vector in range(vectors):
        store(total_vector + 4 * LANES * vector, splat(np.float32(0.0)))
    total = np.float32(0.0)
    for index in range(cuts + tail_parts):
        item = first_cut + index if index < cuts else first_tail + index - cuts
        part = word(job, _PARTS) + (item * rows + row) * part_step
        part_peak = load_float(part + statistics)
        if part_peak == -np.inf:
            continue
        weight = _scalar_exponential(part_peak - peak)
        total += weight * load_float(part + statistics + 4)
        for vector in range(vectors):
            address = total_vector + 4 * LANES * vector
            store(address, load(address) + load(part + 4 * LANES * vector) * splat(weight))
    out = word(job, _OUT) + 4 * (segment * rows + row) * value_dim
    for channel in range(value_dim):
        summed = load_float(total_vector + 4 * channel)
        store_float(out + 4 * channel, np.float32(0.0) if total == 0 else summed / total)
    lse = np.float32(-np.inf) if total == 0 else peak + np.log(total)
    store_float(word(job, _LSE) + 4 * (segment * rows + row), lse)


@compiled
def _scratch_floats(key_dim, value_dim, groups):  # type: ignore[no-untyped-def]
    """What a thread needs: see the addresses at the top of :func:`_run_item`."""
    floats = 6 * LANES + _ROW_BLOCK + (3 * MAX_ROWS + 3 * groups) * _BLOCK + 2 * padded(key_dim)
    return floats + (2 * _ROW_BLOCK + _BLOCK) * padded(key_dim) + _BLOCK * padded(value_dim)


def _decode(job):  # type: ignore[no-untyped-def]
    floats = _scratch_floats(word(job, _KEY_DIM), word(job, _VALUE_DIM), word(job, _VALUE_GROUPS))
    scratch = word(job, _SCRATCH) + 4 * floats * fetch_add(job + 8 * _STARTED, 1)
    items = word(job, _ITEMS)
    while True:
        item = fetch_add(job + 8 * _NEXT, 1)
        if item >= items:
            break
        _run_item(job, item, scratch)
        if fetch_add(job + 8 * _DONE, 1) == items - 1:
            for segment in range(word(job, _SEGMENTS)):
                for row in range(word(job, _ROWS)):
                    _merge_row(job, segment, row, scratch)


_decode_worker = worker(_decode)


class _Cuts:
    """
    Stretches of the segments, nearly equal in length.

    Table [n, 3] of segment, first pair and pairs, and the index of each segment's first stretch; with their addresses,
    which cost microseconds to ask for.
    """

    def __init__(self, segments: Segments, pieces: int) -> None:
        size = max(_MIN_ITEM, -(-segments.total // pieces))
        size = -(-size // _BLOCK) * _BLOCK
        table, offsets = [], [0]
        for segment, length in enumerate(segments.lengths.tolist()):
            table += [(segment, first, min(size, length - first)) for first in range(0, length, size)]
            offsets.append(len(table))
        self._table, self._offsets = np.array(table, np.int64), np.array(offsets, np.int64)
        self.count = len(table)
        self.addresses = (segments.cu_seqlens.data_ptr(), self._table.ctypes.data, self._offsets.ctypes.data)


def _rows_of(packed: torch.Tensor | QuantizedKeys | QuantizedValues) -> tuple[torch.Tensor, int]:
    """The stored rows and their format."""
    if isinstance(packed, torch.Tensor):
        return (packed if packed.stride(1) == 1 else packed.contiguous()), _KINDS[packed.dtype]
    return packed.codes, BYTES if packed.bits == 8 else HALF_BYTES


def decode_attention(
    query: torch.Tensor,
    packed_key: torch.Tensor | QuantizedKeys,
    packed_value: torch.Tensor | QuantizedValues,
    segments: Segments,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    tail: tuple[torch.Tensor, torch.Tensor] | None = None,
    tail_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    All cores; float32, bfloat16, float16 and quantised storage, any number of queries, the tail taken along.

    See :func:`kvzip_press.kernels.api.decode_attention`. The working memory depends on the number of queries and
    threads, not on the length of the context.
    """
    batch_size, num_heads, q_len, key_dim = query.shape
    value_dim, num_segments = packed_value.shape[1], len(segments)
    rows = batch_size * num_heads // num_segments * q_len
    row_blocks = -(-rows // _ROW_BLOCK)
    threads = torch.get_num_threads()
    pieces = -(-threads * _ITEMS_PER_THREAD // row_blocks)
    cuts = segments.derived(("cpu", pieces), lambda: _Cuts(segments, pieces))
    query = query.contiguous()
    keys, key_kind = _rows_of(packed_key)
    values, value_kind = _rows_of(packed_value)

    job = [0] * _WORDS
    job[_CONTEXT_ITEMS] = cuts.count
    job[_SEGMENTS], job[_NUM_KV_HEADS], job[_ROWS], job[_Q_LEN] = num_segments, num_segments // batch_size, rows, q_len
    job[_KEY_DIM], job[_VALUE_DIM], job[_VALUE_GROUPS] = key_dim, value_dim, 1
    job[_SCALE], job[_SOFTCAP] = float_bits(softmax_scale), float_bits(softcap or 0.0)
    job[_BOUNDS], job[_CUTS], job[_CUT_OFFSETS] = cuts.addresses
    job[_QUERY], job[_QUERY_KIND], job[_QUERY_STEP] = query.data_ptr(), _KINDS[query.dtype], key_dim * query.itemsize
    job[_KEY], job[_KEY_KIND], job[_KEY_STEP] = keys.data_ptr(), key_kind, keys.stride(0) * keys.itemsize
    job[_VALUE], job[_VALUE_KIND], job[_VALUE_STEP] = values.data_ptr(), value_kind, values.stride(0) * values.itemsize
    if isinstance(packed_key, QuantizedKeys):
        job[_KEY_SCALE], job[_KEY_MINIMUM] = packed_key.scale.data_ptr(), packed_key.minimum.data_ptr()
        job[_KEY_BLOCKS] = packed_key.block_offsets.data_ptr()
    if isinstance(packed_value, QuantizedValues):
        job[_VALUE_SCALE], job[_VALUE_MINIMUM] = packed_value.scale.data_ptr(), packed_value.minimum.data_ptr()
        job[_VALUE_GROUPS] = packed_value.scale.shape[1]
    if tail is not None and tail[0].shape[2] > 0:
        tail_key, tail_value = (part if part.stride(3) == 1 else part.contiguous() for part in tail)
        length, itemsize = tail_key.shape[2], tail_key.itemsize
        job[_TAIL_LENGTH], job[_TAIL_KIND] = length, _KINDS[tail_key.dtype]
        job[_TAIL_KEY], job[_TAIL_VALUE] = tail_key.data_ptr(), tail_value.data_ptr()
        job[_TAIL_KEY_ROW : _TAIL_KEY_STEP + 1] = [step * itemsize for step in tail_key.stride()[:3]]
        job[_TAIL_VALUE_ROW : _TAIL_VALUE_STEP + 1] = [step * itemsize for step in tail_value.stride()[:3]]
        job[_TAIL_PART] = _TAIL_PART_LENGTH if row_blocks < threads else length
        job[_TAIL_PARTS] = -(-length // job[_TAIL_PART])
        if tail_mask is not None:
            visible = tail_mask.expand(batch_size, num_heads, q_len, length)
            job[_MASK] = visible.data_ptr()
            job[_MASK_ROW : _MASK_STEP + 1] = visible.stride()
    items = cuts.count + num_segments * job[_TAIL_PARTS]
    if items == 0:
        shape = (batch_size, num_heads, q_len)
        return query.new_zeros(*shape, value_dim, dtype=torch.float32), torch.full(shape, -torch.inf)
    job[_ITEMS] = items * row_blocks
    threads = min(threads, job[_ITEMS])
    out = torch.empty(batch_size, num_heads, q_len, value_dim)
    lse = torch.empty(batch_size, num_heads, q_len)
    parts = items * rows * padded.py_func(value_dim)
    memory = torch.empty(parts + threads * _scratch_floats.py_func(key_dim, value_dim, job[_VALUE_GROUPS]))
    job[_PARTS] = memory.data_ptr()
    job[_SCRATCH] = job[_PARTS] + 4 * parts
    job[_OUT], job[_LSE] = out.data_ptr(), lse.data_ptr()
    run_on_threads(_decode_worker, job, threads)
    return out, lse
