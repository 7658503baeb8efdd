"""What is done to rows of float32 numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .formats import read
from .vectors import (
    LANES,
    capped,
    compiled,
    exponential,
    first_lanes,
    lanes_maximum,
    lanes_sum,
    load,
    maximum_or_nan,
    multiply_add,
    splat,
    store,
    store_first,
    store_float,
)


@compiled
def fold_scales(rows, folded, offsets, count, length, scale, minimum):  # type: ignore[no-untyped-def]
    """
    Move scales from codes to what meets them: ``x . (u * scale + minimum) = (x * scale) . u + x . minimum``.

    ``rows`` and ``folded`` are ``count`` float32 :class:`Rows` of ``length``; ``scale`` and ``minimum`` are float32
    [length]; all with room for whole vectors. Writes the folded rows and the offset of each. Of keys, the rows are
    queries and ``length`` is in channels; of values, they are weights and it is in tokens.
    """
    for row in range(count):
        source, target = rows.address + row * rows.step, folded.address + row * folded.step
        offset = splat(0.0)
        for place in range(0, 4 * length, 4 * LANES):
            number = load(source + place)
            offset = multiply_add(number, load(minimum + place), offset)
            store(target + place, number * load(scale + place))
        store_float(offsets + 4 * row, lanes_sum(offset))


@compiled
def _store_up_to(address, left, vector):  # type: ignore[no-untyped-def]
    if left >= LANES:
        store(address, vector)
    else:
        store_first(address, left, vector)


@compiled
def _read_or_lowest(address, left):  # type: ignore[no-untyped-def]
    return load(address) if left >= LANES else first_lanes(left, read(address, left), splat(-np.inf))


@compiled
def fill(row, low, high, number):  # type: ignore[no-untyped-def]
    """Set the columns [low, high) of a float32 row to ``number``."""
    for column in range(low, high, LANES):
        _store_up_to(row + 4 * column, high - column, splat(number))


def in_place(function: Callable) -> Callable:
    """The function that replaces the columns [low, high) of a row by ``function`` of them and of a number."""

    @compiled
    def change(row, low, high, number):  # type: ignore[no-untyped-def]
        for column in range(low, high, LANES):
            address, left = row + 4 * column, high - column
            _store_up_to(address, left, function(read(address, left), number))

    return change


def onto(function: Callable) -> Callable:
    """The function that replaces sums [high - low] by ``function`` of them and of ``factor`` times the columns."""

    @compiled
    def combine(row, low, high, factor, sums):  # type: ignore[no-untyped-def]
        for column in range(low, high, LANES):
            target, left = sums + 4 * (column - low), high - column
            number = read(row + 4 * column, left) * splat(factor)
            _store_up_to(target, left, function(read(target, left), number))

    return combine


add = in_place(compiled(lambda vector, number: vector + splat(number)))
multiply = in_place(compiled(lambda vector, number: vector * splat(number)))
cap = in_place(capped)
raise_maxima = onto(compiled(lambda maxima, number: maximum_or_nan(number, maxima)))
add_onto = onto(compiled(lambda sums, number: sums + number))
add_squares_onto = onto(compiled(lambda sums, number: sums + number * number))


@compiled
def peak_of(row, low, high):  # type: ignore[no-untyped-def]
    """Largest of the columns [low, high); NaN if one is NaN, -inf if there are none."""
    first = second = splat(-np.inf)
    column = low
    while column + 2 * LANES <= high:
        first = maximum_or_nan(first, load(row + 4 * column))
        second = maximum_or_nan(second, load(row + 4 * (column + LANES)))
        column += 2 * LANES
    while column < high:
        first = maximum_or_nan(first, _read_or_lowest(row + 4 * column, high - column))
        column += LANES
    return lanes_maximum(maximum_or_nan(first, second))


@compiled
def take_exponentials(row, low, high, peak):  # type: ignore[no-untyped-def]
    """Replace the columns [low, high) by ``exp(logits - peak)``, and return their sum."""
    offset, total = splat(peak), splat(0.0)
    for column in range(low, high, LANES):
        address, left = row + 4 * column, high - column
        weights = exponential(_read_or_lowest(address, left) - offset)
        _store_up_to(address, left, weights)
        total = total + weights
    return lanes_sum(total)
