"""What CPU threads do in a decode step, compiled: attention of query rows over a stretch of keys, and the merge."""

from __future__ import annotations

import numpy as np

from ..simd.formats import BYTES, FLOAT32, HALF_BYTES, ITEMSIZE, Rows, widen_float16, widen_rows
from ..simd.products import MAX_ROWS, Part, add_values, products
from ..simd.rows import add, cap, fill, fold_scales, multiply, peak_of, take_exponentials
from ..simd.threads import attend_item, finish_item, start_thread, take_item, worker
from ..simd.vectors import (
    LANES,
    compiled,
    even_lanes,
    exponential,
    lanes_maximum,
    load,
    load_byte,
    load_float,
    load_int,
    odd_lanes,
    splat,
    store,
    store_float,
    store_int,
)
from .cpu_job import BLOCK, BLOCK_ROW, PLACES, ROW_BLOCK, SCRATCH_SIZE, VECTOR, Block, Item, job_at, scratch_at


@compiled
def _vectors(numbers):  # type: ignore[no-untyped-def]
    return (numbers + LANES - 1) // LANES


@compiled
def _part_of(job, segment, index):  # type: ignore[no-untyped-def]
    """Address of the part of a segment's stretch, those of the tail last."""
    stretch = load_int(job.cut_offsets + 8 * segment) + segment * job.tail_stretches + index
    return job.parts + stretch * job.rows * job.value_row


@compiled
def _find_item(job, number):  # type: ignore[no-untyped-def]
    """Where the query rows, keys and values of an item lie."""
    row_block, stretch = divmod(number, job.stretches)
    first_row = row_block * ROW_BLOCK
    rows = min(ROW_BLOCK, job.rows - first_row)
    if stretch < job.context_stretches:
        cut = job.cuts + 24 * stretch
        segment, first, length = load_int(cut), load_int(cut + 8), load_int(cut + 16)
        begin = load_int(job.bounds + 8 * segment)
        key = Rows(job.key.address + begin * job.key.step, job.key.step)
        value = Rows(job.value.address + begin * job.value.step, job.value.step)
        key_kind, value_kind = job.key.kind, job.value.kind
        index = stretch - load_int(job.cut_offsets + 8 * segment)
    else:
        segment, index = divmod(stretch - job.context_stretches, job.tail_stretches)
        first = index * job.tail_stretch_length
        length = min(job.tail_stretch_length, job.tail_length - first)
        key, value = _tail_rows(job, job.tail_key, segment), _tail_rows(job, job.tail_value, segment)
        key_kind = value_kind = job.tail_kind
        index += load_int(job.cut_offsets + 8 * segment + 8) - load_int(job.cut_offsets + 8 * segment)
    parts = Rows(_part_of(job, segment, index) + first_row * job.value_row, job.value_row)
    in_tail = stretch >= job.context_stretches
    return Item(segment, first_row, rows, first, length, in_tail, key, key_kind, value, value_kind, parts)


@compiled
def _tail_rows(job, tail, segment):  # type: ignore[no-untyped-def]
    batch_row, head = divmod(segment, job.num_kv_heads)
    return Rows(tail.address + batch_row * tail.row + head * tail.head, tail.token)


@compiled
def _load_queries(job, item, scratch):  # type: ignore[no-untyped-def]
    """Write the item's scaled queries [rows, key_dim] as float32."""
    source = Rows(job.query.address + (item.segment * job.rows + item.first_row) * job.query.step, job.query.step)
    widen_rows(job.query.kind, source, Rows(scratch.queries, job.key_row), item.rows, job.key_dim)
    for row in range(item.rows):
        multiply(scratch.queries + row * job.key_row, 0, job.key_dim, job.scale)


@compiled
def _start_parts(job, item, scratch):  # type: ignore[no-untyped-def]
    """Sums of no weight yet; biases and offsets for keys and values that need none."""
    channels = LANES * _vectors(job.value_dim)
    for row in range(item.rows):
        part = item.parts.address + row * item.parts.step
        fill(part, 0, channels, 0.0)
        store_float(part + 4 * channels, -np.inf)
        store_float(part + 4 * channels + 4, 0.0)
    fill(scratch.biases, 0, ROW_BLOCK, 0.0)
    fill(scratch.offsets, 0, LANES, 0.0)


@compiled
def _load_scales(source, target, count):  # type: ignore[no-untyped-def]
    widen_float16(Rows(source, 0), Rows(target, 0), 1, count)


@compiled
def _load_value_scales(source, target, count, groups, unsorted):  # type: ignore[no-untyped-def]
    """Write float16 [count, groups] as float32 [groups, BLOCK]; ``unsorted`` has room for as much."""
    if groups == 1:
        _load_scales(source, target, count)
        return
    if count < BLOCK:
        # The last vector's other lanes meet weights of 0, and must be numbers
        fill(unsorted, 0, groups * BLOCK, 0.0)
        fill(target, 0, groups * BLOCK, 0.0)
    _load_scales(source, unsorted, count * groups)
    if groups == 2:
        for place in range(0, 4 * count, VECTOR):
            first, second = load(unsorted + 2 * place), load(unsorted + 2 * place + VECTOR)
            store(target + place, even_lanes(first, second))
            store(target + BLOCK_ROW + place, odd_lanes(first, second))
    else:
        for pair in range(count):
            for group in range(groups):
                store_float(target + BLOCK_ROW * group + 4 * pair, load_float(unsorted + 4 * (groups * pair + group)))


@compiled
def _load_block(job, item, first, scratch):  # type: ignore[no-untyped-def]
    """Make a block readable by whole vectors, and fold the scales of quantised keys into the queries."""
    queries = Rows(scratch.queries, job.key_row)
    count = min(BLOCK, item.first + item.length - first)
    key, key_kind = Rows(item.key.address + first * item.key.step, item.key.step), item.key_kind
    if job.key_dim % (2 * LANES if key_kind == HALF_BYTES else LANES) != 0 or count % LANES != 0:
        wide = Rows(scratch.keys, job.key_row)
        widen_rows(key_kind, key, wide, count, job.key_dim)
        for row in range(count, LANES * _vectors(count)):
            fill(wide.address + row * wide.step, 0, LANES * _vectors(job.key_dim), 0.0)
        key, key_kind = wide, FLOAT32
    if item.key_kind >= BYTES:
        scales = 2 * job.key_dim * (load_int(job.key_blocks + 8 * item.segment) + first // BLOCK)
        _load_scales(job.key.scale + scales, scratch.key_scale, job.key_dim)
        _load_scales(job.key.minimum + scales, scratch.key_minimum, job.key_dim)
        folded, scale, minimum = Rows(scratch.folded_queries, job.key_row), scratch.key_scale, scratch.key_minimum
        fold_scales(queries, folded, scratch.biases, item.rows, job.key_dim, scale, minimum)
        queries = folded
    value, value_kind = Rows(item.value.address + first * item.value.step, item.value.step), item.value_kind
    if job.value_dim % (2 * LANES if value_kind == HALF_BYTES else LANES) != 0:
        wide = Rows(scratch.values, job.value_row)
        widen_rows(value_kind, value, wide, count, job.value_dim)
        value, value_kind = wide, FLOAT32
    if item.value_kind >= BYTES:
        scales = 2 * job.value_groups * (load_int(job.bounds + 8 * item.segment) + first)
        _load_value_scales(job.value.scale + scales, scratch.value_scale, count, job.value_groups, scratch.unsorted)
        _load_value_scales(job.value.minimum + scales, scratch.value_minimum, count, job.value_groups, scratch.unsorted)
    return Block(first, count, key, key_kind, value, value_kind, queries)


@compiled
def _write_logits(job, item, block, row, rows, scratch):  # type: ignore[no-untyped-def]
    """Products of a few query rows, from ``row`` on, with the block's keys; -inf behind the last key."""
    queries = Rows(block.queries.address + row * block.queries.step, block.queries.step)
    columns = LANES * _vectors(block.length)
    ahead = BLOCK * block.key.step if row == 0 else 0  # later rows find the next block asked for already
    for first in range(0, columns, LANES):
        key = Rows(block.key.address + first * block.key.step, block.key.step)
        out = Rows(scratch.logits + 4 * first, BLOCK_ROW)
        products(block.key_kind, rows, key, ahead, queries, _vectors(job.key_dim), out)
    for index in range(rows):
        logits = scratch.logits + index * BLOCK_ROW
        if item.key_kind >= BYTES:
            add(logits, 0, columns, load_float(scratch.biases + 4 * (row + index)))
        if job.softcap > 0:
            cap(logits, 0, columns, job.softcap)
        fill(logits, block.length, columns, -np.inf)
        if item.in_tail and job.mask.address != 0:
            _mask_logits(job, logits, item.segment, item.first_row + row + index, block)


@compiled
def _mask_logits(job, logits, segment, row, block):  # type: ignore[no-untyped-def]
    """Set the logits of tail keys to -inf that the mask hides from this row."""
    mask = job.mask
    batch_row, kv_head = divmod(segment, job.num_kv_heads)
    group_head, query = divmod(row, job.q_len)
    head = kv_head * (job.rows // job.q_len) + group_head
    visible = mask.address + batch_row * mask.row + head * mask.head + query * mask.query + block.first * mask.token
    for token in range(block.length):
        if load_byte(visible + token * mask.token) == 0:
            store_float(logits + 4 * token, -np.inf)


@compiled
def _exponential_of(number):  # type: ignore[no-untyped-def]
    return lanes_maximum(exponential(splat(number)))


@compiled
def _softmax_step(logits, columns, statistics):  # type: ignore[no-untyped-def]
    """
    Replace a block of logits by weights relative to the row's peak so far, and bring its statistics up to date.

    Returns the factor of what was summed before.
    """
    old_peak = load_float(statistics)
    block_peak = peak_of(logits, 0, columns)
    peak = old_peak if old_peak >= block_peak else block_peak  # NaN if the block's is
    if peak == -np.inf:
        fill(logits, 0, columns, 0.0)
        return np.float32(1.0)
    total = take_exponentials(logits, 0, columns, peak)
    factor = _exponential_of(old_peak - peak)
    store_float(statistics, peak)
    store_float(statistics + 4, load_float(statistics + 4) * factor + total)
    return factor


@compiled
def _fold_weights(job, block, vector, rows, place, scratch):  # type: ignore[no-untyped-def]
    """Fold the value scales of a vector of channels into the weights; where those and their offsets then lie."""
    group = BLOCK_ROW * (vector // (_vectors(job.value_dim) // job.value_groups))
    folded = Rows(scratch.folded_weights + place * MAX_ROWS * BLOCK_ROW, BLOCK_ROW)
    offsets = scratch.offsets + place * VECTOR
    scale, minimum = scratch.value_scale + group, scratch.value_minimum + group
    fold_scales(Rows(scratch.logits, BLOCK_ROW), folded, offsets, rows, block.length, scale, minimum)
    return folded, offsets


@compiled
def _add_block(job, item, block, row, rows, scratch):  # type: ignore[no-untyped-def]
    """Add the block's weighted values to the parts of a few rows, as many channels at a time as registers hold."""
    quantized, half_bytes = item.value_kind >= BYTES, block.value_kind == HALF_BYTES
    vectors = _vectors(job.value_dim)
    in_group = vectors // job.value_groups
    stored = vectors // 2 if half_bytes else vectors  # in 4 bits, each with the vector of channels ``stored`` further
    weights, offsets = Rows(scratch.logits, BLOCK_ROW), scratch.offsets
    high_weights, high_offsets = weights, offsets
    vector = 0
    while vector < stored:
        left = stored - vector
        if quantized:
            left = min(left, in_group - vector % in_group)
            weights, offsets = _fold_weights(job, block, vector, rows, 0, scratch)
        width = 4 if left >= 4 else 2 if left >= 2 else 1
        if half_bytes:
            left = min(left, in_group - (stored + vector) % in_group)
            width = 2 if left >= 2 else 1
            high_weights, high_offsets = weights, offsets
            if (stored + vector) // in_group != vector // in_group:
                high_weights, high_offsets = _fold_weights(job, block, stored + vector, rows, 1, scratch)
        sums = item.parts.address + row * item.parts.step + VECTOR * vector
        low = Part(weights, Rows(sums, item.parts.step), offsets)
        high = Part(high_weights, Rows(sums + VECTOR * stored, item.parts.step), high_offsets)
        values = Rows(block.value.address + LANES * ITEMSIZE[block.value_kind] * vector, block.value.step)
        ahead = BLOCK * block.value.step
        add_values(block.value_kind, rows, width, values, ahead, block.length, scratch.factors, low, high)
        vector += width


@compiled
def _run_item(job, number, scratch):  # type: ignore[no-untyped-def]
    """Attention of one block of query rows over one stretch of the context or of the tail."""
    item = _find_item(job, number)
    _load_queries(job, item, scratch)
    _start_parts(job, item, scratch)
    vector_of_statistics = item.parts.address + VECTOR * _vectors(job.value_dim)
    for first in range(item.first, item.first + item.length, BLOCK):
        block = _load_block(job, item, first, scratch)
        for row in range(0, item.rows, MAX_ROWS):
            rows = min(MAX_ROWS, item.rows - row)
            _write_logits(job, item, block, row, rows, scratch)
            for index in range(rows):
                logits = scratch.logits + index * BLOCK_ROW
                statistics = vector_of_statistics + (row + index) * item.parts.step
                factor = _softmax_step(logits, LANES * _vectors(block.length), statistics)
                store_float(scratch.factors + 4 * index, factor)
            _add_block(job, item, block, row, rows, scratch)


@compiled
def _merge_row(job, segment, row, total_vector):  # type: ignore[no-untyped-def]
    """Merge the parts of one query row by their peaks and write its output and log-sum-exp."""
    vectors = _vectors(job.value_dim)
    statistics = VECTOR * vectors
    first, end = _part_of(job, segment, 0), _part_of(job, segment + 1, 0)
    first, end = first + row * job.value_row, end + row * job.value_row
    peak = np.float32(-np.inf)
    for part in range(first, end, job.rows * job.value_row):
        part_peak = load_float(part + statistics)
        peak = peak if peak >= part_peak else part_peak
    fill(total_vector, 0, LANES * vectors, 0.0)
    total = np.float32(0.0)
    for part in range(first, end, job.rows * job.value_row):
        part_peak = load_float(part + statistics)
        if part_peak == -np.inf:
            continue
        weight = _exponential_of(part_peak - peak)
        total += weight * load_float(part + statistics + 4)
        for place in range(0, statistics, VECTOR):
            store(total_vector + place, load(total_vector + place) + load(part + place) * splat(weight))
    out = job.out + 4 * (segment * job.rows + row) * job.value_dim
    for channel in range(job.value_dim):
        summed = load_float(total_vector + 4 * channel)
        store_float(out + 4 * channel, np.float32(0.0) if total == 0 else summed / total)
    lse = np.float32(-np.inf) if total == 0 else peak + np.log(total)
    store_float(job.lse + 4 * (segment * job.rows + row), lse)


@compiled
def _start_scratch(address, job):  # type: ignore[no-untyped-def]
    """The addresses of this thread's arrays."""
    memory = job.scratch + job.scratch_size * start_thread(address)
    for field in range(0, SCRATCH_SIZE, 8):
        store_int(memory + field, memory + load_int(address + PLACES + field))
    return scratch_at(memory)


def cpu_decode(address):  # type: ignore[no-untyped-def]
    """Do items until none is left; whoever attends to the last one merges all of them."""
    job = job_at(address)
    scratch = _start_scratch(address, job)
    item = take_item(address)
    while item < job.counters.items:
        _run_item(job, item, scratch)
        if attend_item(address) == job.counters.items - 1:
            for segment in range(job.segments):
                for row in range(job.rows):
                    _merge_row(job, segment, row, scratch.values)
        finish_item(address)
        item = take_item(address)


decode_worker = worker(cpu_decode)
