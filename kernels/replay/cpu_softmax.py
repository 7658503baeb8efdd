"""Softmax over rows of logits and reduction of its weights over columns, in one visit of the memory."""

from __future__ import annotations

import numpy as np
import torch

from ..simd.threads import float_bits, run_on_threads, worker
from ..simd.vectors import (
    LANES,
    capped,
    compiled,
    exponential,
    fetch_add,
    float_word,
    lanes_maximum,
    lanes_sum,
    load,
    load_first,
    load_float,
    load_int,
    maximum_or_nan,
    splat,
    store,
    store_first,
    store_float,
    word,
)
from .blocked import Columns

REDUCTIONS = {"max": 0, "sum_of_squares": 1, "sum": 2, "logit": 3}
_MAX, _SUM_OF_SQUARES, _SUM, _LOGIT = REDUCTIONS.values()
_VECTOR = 4 * LANES
# Logits of a block: larger ones fall out of the caches, smaller ones make thin products
_BLOCK_ELEMENTS = 3 << 19
_MIN_ITEMS = 16  # fewer could not be shared evenly by the threads

# The job: 64-bit words, shared by all threads. Addresses and steps in bytes
(
    _NEXT,
    _ITEMS,
    _LOGITS,
    _ROWS,
    _STEP,
    _FIRST_ROW,
    _ANCHOR,
    _FIRST_OWN,
    _FIRST_VISIBLE,
    _SPLITS,
    _SCORES,
    _REDUCTION,
    _SOFTCAP,
    _ROW_WEIGHT,
    _ROW_WEIGHT_STEP,
    _MEMBERS_PER_ROW,
    _LSE,
    _KEYS,
    _WORDS,
) = range(19)


@compiled
def _load_up_to(address, left, others):  # type: ignore[no-untyped-def]
    return load(address) if left >= LANES else load_first(address, left, others)


@compiled
def _store_up_to(address, left, vector):  # type: ignore[no-untyped-def]
    if left >= LANES:
        store(address, vector)
    else:
        store_first(address, left, vector)


@compiled
def _cap_row(row, low, high, softcap):  # type: ignore[no-untyped-def]
    for column in range(low, high, LANES):
        address, left = row + 4 * column, high - column
        _store_up_to(address, left, capped(_load_up_to(address, left, splat(np.float32(0.0))), softcap))


@compiled
def _peak(row, low, high):  # type: ignore[no-untyped-def]
    lowest = splat(np.float32(-np.inf))
    first = second = lowest
    column = low
    while column + 2 * LANES <= high:
        first = maximum_or_nan(first, load(row + 4 * column))
        second = maximum_or_nan(second, load(row + 4 * column + _VECTOR))
        column += 2 * LANES
    while column < high:
        first = maximum_or_nan(first, _load_up_to(row + 4 * column, high - column, lowest))
        column += LANES
    return lanes_maximum(maximum_or_nan(first, second))


@compiled
def _exponentials(row, low, high, peak):  # type: ignore[no-untyped-def]
    """Sum of ``exp(logits - peak)``, which replace the logits."""
    offset = splat(peak)
    total = splat(np.float32(0.0))
    for column in range(low, high, LANES):
        address, left = row + 4 * column, high - column
        weights = exponential(_load_up_to(address, left, splat(np.float32(-np.inf))) - offset)
        _store_up_to(address, left, weights)
        total = total + weights
    return lanes_sum(total)


@compiled
def _scale(row, low, high, factor):  # type: ignore[no-untyped-def]
    for column in range(low, high, LANES):
        address, left = row + 4 * column, high - column
        _store_up_to(address, left, _load_up_to(address, left, splat(np.float32(0.0))) * splat(factor))


@compiled
def _fill_zeros(row, low, high):  # type: ignore[no-untyped-def]
    for column in range(low, high, LANES):
        _store_up_to(row + 4 * column, high - column, splat(np.float32(0.0)))


@compiled
def _raise_maxima(row, low, high, scores, factor):  # type: ignore[no-untyped-def]
    """``scores = max(scores, row * factor)``; the last vector's other lanes stay as they are."""
    for column in range(low, high, LANES):
        left = high - column
        target = scores + 4 * (column - low)
        if left >= LANES:
            candidate = load(row + 4 * column) * splat(factor)
            store(target, maximum_or_nan(candidate, load(target)))
        else:
            known = load_first(target, left, splat(np.float32(0.0)))
            candidate = load_first(row + 4 * column, left, splat(np.float32(0.0))) * splat(factor)
            store_first(target, left, maximum_or_nan(candidate, known))


@compiled
def _add_weights(row, low, high, scores, factor, squared):  # type: ignore[no-untyped-def]
    for column in range(low, high, LANES):
        left = high - column
        target = scores + 4 * (column - low)
        weight = _load_up_to(row + 4 * column, left, splat(np.float32(0.0))) * splat(factor)
        known = _load_up_to(target, left, splat(np.float32(0.0)))
        _store_up_to(target, left, known + (weight * weight if squared else weight))


@compiled
def _run_item(job, item):  # type: ignore[no-untyped-def]
    """Visit one share of the rows of one query head."""
    rows, splits, reduction = word(job, _ROWS), word(job, _SPLITS), word(job, _REDUCTION)
    keys, anchor, first_own = word(job, _KEYS), word(job, _ANCHOR), word(job, _FIRST_OWN)
    member, split = item // splits, item % splits
    softcap = float_word(job, _SOFTCAP)
    scores = word(job, _SCORES) + 4 * item * (first_own - anchor)
    for row in range(rows * split // splits, rows * (split + 1) // splits):
        index = word(job, _FIRST_ROW) + row
        address = word(job, _LOGITS) + (member * rows + row) * word(job, _STEP)
        low, high = 0, first_own + index + 1
        if word(job, _FIRST_VISIBLE) != 0:
            low = load_int(word(job, _FIRST_VISIBLE) + 8 * index)
        scored_low, scored_high = max(low, anchor), first_own
        target = scores + 4 * (scored_low - anchor)
        row_weight = np.float32(1.0)
        if word(job, _ROW_WEIGHT) != 0:
            batch_row = member // word(job, _MEMBERS_PER_ROW)
            row_weight = load_float(word(job, _ROW_WEIGHT) + batch_row * word(job, _ROW_WEIGHT_STEP) + 4 * index)
        if softcap > 0:
            _cap_row(address, low, high, softcap)
        if reduction == _LOGIT:
            _raise_maxima(address, scored_low, scored_high, target, row_weight)
        peak = _peak(address, low, high)
        total = _exponentials(address, low, high, peak)
        if word(job, _LSE) != 0:
            store_float(word(job, _LSE) + 4 * (member * rows + row), np.float32(peak + np.log(total)))
        factor = np.float32(1.0) / total
        if reduction == _MAX:
            _raise_maxima(address, scored_low, scored_high, target, factor * row_weight)
        elif reduction != _LOGIT:
            squared = reduction == _SUM_OF_SQUARES
            _add_weights(address, scored_low, scored_high, target, factor * row_weight, squared)
        _scale(address, low, high, factor)
        _fill_zeros(address, 0, low)
        _fill_zeros(address, high, keys)


def _visit_rows(job):  # type: ignore[no-untyped-def]
    while True:
        item = fetch_add(job + 8 * _NEXT, 1)
        if item >= word(job, _ITEMS):
            break
        _run_item(job, item)


_row_worker = worker(_visit_rows)


class CpuColumnScores:
    """See :class:`kvzip_press.kernels.replay.blocked.ColumnScores`; float32, weights take the place of the logits."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        splits = -(-_MIN_ITEMS // columns.members)
        fill = -torch.inf if columns.reduction == "logit" else 0.0
        self._scores = torch.full((columns.members, splits, columns.first_own - columns.anchor), fill)
        job = self._job = [0] * _WORDS
        job[_ITEMS], job[_SPLITS], job[_SCORES] = columns.members * splits, splits, self._scores.data_ptr()
        job[_ANCHOR], job[_FIRST_OWN], job[_SOFTCAP] = (
            columns.anchor,
            columns.first_own,
            float_bits(columns.softcap or 0.0),
        )
        job[_REDUCTION] = REDUCTIONS[columns.reduction]
        if columns.first_visible is not None:
            job[_FIRST_VISIBLE] = columns.first_visible.data_ptr()
        if columns.row_weight is not None:
            job[_ROW_WEIGHT], job[_ROW_WEIGHT_STEP] = columns.row_weight.data_ptr(), 4 * columns.row_weight.shape[1]
            job[_MEMBERS_PER_ROW] = columns.members // len(columns.row_weight)

    @staticmethod
    def block_elements(device: torch.device) -> int:
        """Logits of a block of rows."""
        return _BLOCK_ELEMENTS

    def visit(self, logits: torch.Tensor, first_row: int, lse: torch.Tensor | None) -> torch.Tensor:
        """Take a block of rows into account."""
        _, rows, keys = logits.shape
        job = self._job
        job[_LOGITS], job[_ROWS], job[_KEYS], job[_STEP] = logits.data_ptr(), rows, keys, 4 * keys
        job[_FIRST_ROW], job[_LSE] = first_row, 0 if lse is None else lse.data_ptr()
        run_on_threads(_row_worker, job, min(torch.get_num_threads(), job[_ITEMS]))
        return logits

    def result(self) -> torch.Tensor:
        """Scores of each query head, shape (members, columns), float32."""
        if self._columns.reduction in ("max", "logit"):
            return self._scores.amax(dim=1)
        return self._scores.sum(dim=1)
