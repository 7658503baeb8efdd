"""Rows of packed storage as float32, and the scales of quantised ones, for the CPU kernels."""

from __future__ import annotations

import numpy as np

from .vectors import (
    BFLOAT16,
    BYTES,
    FLOAT16,
    FLOAT32,
    HALF_BYTES,
    LANES,
    compiled,
    lanes_sum,
    load,
    load_bfloat16,
    load_byte,
    load_bytes,
    load_float16,
    load_high_halves,
    load_low_halves,
    multiply_add,
    splat,
    store,
    store_byte,
    store_float,
)

_ROW = 4 * LANES  # bytes of one vector


@compiled
def padded(channels):  # type: ignore[no-untyped-def]
    """Channels of a float32 row that vectors may overrun."""
    return (channels + LANES - 1) // LANES * LANES + LANES


@compiled
def _load_as(kind, address):  # type: ignore[no-untyped-def]
    if kind == FLOAT32:
        return load(address)
    if kind == BFLOAT16:
        return load_bfloat16(address)
    if kind == FLOAT16:
        return load_float16(address)
    return load_bytes(address)


@compiled
def _copy_rest(source, spare, count):  # type: ignore[no-untyped-def]
    """Copy ``count`` bytes into a vector of zeros: what lies behind the last row is not ours to read."""
    store(spare, splat(np.float32(0.0)))
    for byte in range(count):
        store_byte(spare + byte, load_byte(source + byte))


@compiled
def widen_row(kind, source, target, channels, spare):  # type: ignore[no-untyped-def]
    """Write one row as float32, zeros up to the next whole vector; ``spare`` has room for one vector."""
    itemsize = 4 if kind == FLOAT32 else 1 if kind == BYTES else 2
    whole = channels // LANES * LANES
    for channel in range(0, whole, LANES):
        store(target + 4 * channel, _load_as(kind, source + itemsize * channel))
    if whole < channels:
        _copy_rest(source + itemsize * whole, spare, itemsize * (channels - whole))
        store(target + 4 * whole, _load_as(kind, spare))


@compiled
def _widen_half_bytes(source, target, channels, spare):  # type: ignore[no-untyped-def]
    half = channels // 2
    whole = half // LANES * LANES
    for channel in range(0, whole, LANES):
        store(target + 4 * channel, load_low_halves(source + channel))
    if whole < half:
        _copy_rest(source + whole, spare, half - whole)
        store(target + 4 * whole, load_low_halves(spare))
    # After the low halves, whose last vector reaches into the channels of the high ones
    for channel in range(0, whole, LANES):
        store(target + 4 * (half + channel), load_high_halves(source + channel))
    if whole < half:
        store(target + 4 * (half + whole), load_high_halves(spare))


@compiled
def widen_rows(kind, source, step, target, count, channels, spare):  # type: ignore[no-untyped-def]
    """Write ``count`` rows, ``step`` bytes apart, as float32 rows of ``padded(channels)``; codes stay codes."""
    target_step = 4 * padded(channels)
    if kind == HALF_BYTES:
        for row in range(count):
            _widen_half_bytes(source + row * step, target + row * target_step, channels, spare)
    elif kind == BYTES:
        for row in range(count):
            widen_row(BYTES, source + row * step, target + row * target_step, channels, spare)
    elif kind == BFLOAT16:
        for row in range(count):
            widen_row(BFLOAT16, source + row * step, target + row * target_step, channels, spare)
    elif kind == FLOAT16:
        for row in range(count):
            widen_row(FLOAT16, source + row * step, target + row * target_step, channels, spare)
    else:
        for row in range(count):
            widen_row(FLOAT32, source + row * step, target + row * target_step, channels, spare)


@compiled
def fold_scales(rows, folded, offsets, count, step, length, scale, minimum):  # type: ignore[no-untyped-def]
    """
    Move scales from codes to what meets them: ``x . (u * scale + minimum) = (x * scale) . u + x . minimum``.

    ``rows`` and ``folded`` are ``count`` float32 rows of ``length``, ``step`` bytes apart; ``scale`` and ``minimum``
    are float32 [length]; all with room for whole vectors. Writes the folded rows and the offset of each. Of keys, the
    rows are queries and ``length`` is in channels; of values, they are weights and it is in tokens.
    """
    for row in range(count):
        offset = splat(np.float32(0.0))
        for vector in range((length + LANES - 1) // LANES):
            place = row * step + _ROW * vector
            number = load(rows + place)
            offset = multiply_add(number, load(minimum + _ROW * vector), offset)
            store(folded + place, number * load(scale + _ROW * vector))
        store_float(offsets + 4 * row, lanes_sum(offset))
