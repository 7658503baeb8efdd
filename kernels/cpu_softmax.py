"""Softmax over rows of logits and reduction of its weights over columns, in one visit of the memory."""

from __future__ import annotations

import numpy as np
import torch

from .cpu_simd import (
    LANES,
    capped,
    compiled,
    exponential,
    fetch_add,
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
)
from .cpu_threads import float_bits, run_on_threads, worker

REDUCTIONS = {"max": 0, "sum_of_squares": 1, "sum": 2, "logit": 3}
_MAX, _SUM_OF_SQUARES, _SUM, _LOGIT = REDUCTIONS.values()
_VECTOR = 4 * LANES
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
    _WEIGHTS,
    _ROW_WEIGHT,
    _ROW_WEIGHT_STEP,
    _MEMBERS_PER_ROW,
    _LSE,
    _KEYS,
    _WORDS,
) = range(20)


@compiled
def _word(job, word):  # type: ignore[no-untyped-def]
    return load_int(job + 8 * word)


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
def _exponentials(row, low, high, peak, write):  # type: ignore[no-untyped-def]
    """Sum of ``exp(logits - peak)``, which replaces the logits if asked to."""
    offset = splat(peak)
    total = splat(np.float32(0.0))
    for column in range(low, high, LANES):
        address, left = row + 4 * column, high - column
        weights = exponential(_load_up_to(address, left, splat(np.float32(-np.inf))) - offset)
        if write:
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
def _raise_maxima(row, low, high, scores, factor, offset):  # type: ignore[no-untyped-def]
    """``scores = max(scores, row * factor + offset)``; the last vector's other lanes stay as they are."""
    for column in range(low, high, LANES):
        left = high - column
        target = scores + 4 * (column - low)
        if left >= LANES:
            candidate = load(row + 4 * column) * splat(factor) + splat(offset)
            store(target, maximum_or_nan(candidate, load(target)))
        else:
            known = load_first(target, left, splat(np.float32(0.0)))
            candidate = load_first(row + 4 * column, left, splat(np.float32(0.0))) * splat(factor) + splat(offset)
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
    rows, splits, reduction = _word(job, _ROWS), _word(job, _SPLITS), _word(job, _REDUCTION)
    keys, anchor, first_own = _word(job, _KEYS), _word(job, _ANCHOR), _word(job, _FIRST_OWN)
    member, split = item // splits, item % splits
    softcap = load_float(job + 8 * _SOFTCAP)
    write = _word(job, _WEIGHTS) != 0
    scores = _word(job, _SCORES) + 4 * item * (first_own - anchor)
    for row in range(rows * split // splits, rows * (split + 1) // splits):
        index = _word(job, _FIRST_ROW) + row
        address = _word(job, _LOGITS) + (member * rows + row) * _word(job, _STEP)
        low, high = 0, first_own + index + 1
        if _word(job, _FIRST_VISIBLE) != 0:
            low = load_int(_word(job, _FIRST_VISIBLE) + 8 * index)
        scored_low, scored_high = max(low, anchor), first_own
        target = scores + 4 * (scored_low - anchor)
        row_weight = np.float32(1.0)
        if _word(job, _ROW_WEIGHT) != 0:
            batch_row = member // _word(job, _MEMBERS_PER_ROW)
            row_weight = load_float(_word(job, _ROW_WEIGHT) + batch_row * _word(job, _ROW_WEIGHT_STEP) + 4 * index)
        if softcap > 0:
            _cap_row(address, low, high, softcap)
        if reduction == _LOGIT:
            _raise_maxima(address, scored_low, scored_high, target, row_weight, np.float32(0.0))
            if not write:
                continue
        peak = _peak(address, low, high)
        # Without weights to hand on, the maximum is taken of logits: exp(max(x - lse)) = max(exp(x - lse))
        in_logits = reduction == _MAX and not write
        total = _exponentials(address, low, high, peak, not in_logits)
        lse = peak + np.log(total)
        if _word(job, _LSE) != 0:
            store_float(_word(job, _LSE) + 4 * (member * rows + row), np.float32(lse))
        if in_logits:
            offset = np.float32(np.log(row_weight) - lse)
            _raise_maxima(address, scored_low, scored_high, target, np.float32(1.0), offset)
            continue
        factor = np.float32(1.0) / total
        if reduction == _MAX:
            _raise_maxima(address, scored_low, scored_high, target, factor * row_weight, np.float32(0.0))
        elif reduction != _LOGIT:
            squared = reduction == _SUM_OF_SQUARES
            _add_weights(address, scored_low, scored_high, target, factor * row_weight, squared)
        if write:
            _scale(address, low, high, factor)
            _fill_zeros(address, 0, low)
            _fill_zeros(address, high, keys)


def _visit_rows(job):  # type: ignore[no-untyped-def]
    while True:
        item = fetch_add(job + 8 * _NEXT, 1)
        if item >= _word(job, _ITEMS):
            break
        _run_item(job, item)


_row_worker = worker(_visit_rows)


class ColumnScores:
    """
    Scores of the columns of one chunk, gathered over blocks of rows.

    Parameters
    ----------
    members : int
        Query heads, over all rows of the batch.
    anchor, first_own : int
        The scored columns are ``[anchor, first_own)`` of the gathered ones; the replayed tokens' own follow.
    reduction : str
        One of :data:`REDUCTIONS`.
    with_weights : bool
        Whether the softmax weights are needed in place of the logits.
    """

    def __init__(self, members: int, anchor: int, first_own: int, reduction: str, with_weights: bool) -> None:
        self._in_logits = reduction == "max" and not with_weights
        self._splits = -(-_MIN_ITEMS // members)
        fill = -torch.inf if reduction == "logit" or self._in_logits else 0.0
        self._scores = torch.full((members, self._splits, first_own - anchor), fill)
        self._reduction = reduction
        job = self._job = [0] * _WORDS
        job[_ITEMS], job[_SPLITS], job[_SCORES] = members * self._splits, self._splits, self._scores.data_ptr()
        job[_ANCHOR], job[_FIRST_OWN] = anchor, first_own
        job[_REDUCTION], job[_WEIGHTS] = REDUCTIONS[reduction], int(with_weights)

    def visit(
        self,
        logits: torch.Tensor,
        first_row: int,
        *,
        softcap: float | None,
        first_visible: torch.Tensor | None,
        row_weight: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> None:
        """
        Take a block of rows into account.

        Parameters
        ----------
        logits : torch.Tensor
            Float32, contiguous, shape (members, rows, keys): scaled products of the queries from ``first_row`` on.
            Replaced by the softmax weights if these were asked for.
        first_row : int
            Index of the first query among the replayed tokens.
        softcap : float, optional
            ``softcap * tanh(logits / softcap)`` replaces the logits.
        first_visible : torch.Tensor, optional
            First gathered column that each replayed token sees, shape (q_len,), int64.
        row_weight : torch.Tensor, optional
            Factor of each replayed token's weights, float32, contiguous, shape (batch_size, q_len).
        lse : torch.Tensor, optional
            Receives the log-sum-exp of each row, float32, contiguous, shape (members, rows).
        """
        members, rows, keys = logits.shape
        job = self._job
        job[_LOGITS], job[_ROWS], job[_KEYS], job[_STEP] = logits.data_ptr(), rows, keys, 4 * keys
        job[_FIRST_ROW], job[_SOFTCAP] = first_row, float_bits(softcap or 0.0)
        job[_FIRST_VISIBLE] = 0 if first_visible is None else first_visible.data_ptr()
        job[_LSE] = 0 if lse is None else lse.data_ptr()
        if row_weight is not None:
            job[_ROW_WEIGHT], job[_ROW_WEIGHT_STEP] = row_weight.data_ptr(), 4 * row_weight.shape[1]
            job[_MEMBERS_PER_ROW] = members // len(row_weight)
        run_on_threads(_row_worker, job, min(torch.get_num_threads(), job[_ITEMS]))

    def result(self) -> torch.Tensor:
        """Scores of each query head, shape (members, columns), float32."""
        if self._reduction in ("max", "logit"):
            scores = self._scores.amax(dim=1)
            return scores.exp() if self._in_logits else scores
        return self._scores.sum(dim=1)
