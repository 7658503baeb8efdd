"""Softmax over rows of logits and reduction of its weights over columns, in one visit of the memory."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ..options import REDUCTIONS
from ..simd.rows import add_onto, add_squares_onto, cap, fill, multiply, peak_of, raise_maxima, take_exponentials
from ..simd.threads import Counters, finish_item, integers, record_at, run_on_threads, take_item, worker
from ..simd.vectors import compiled, load_float, load_int, store_float
from .blocked import Columns, ColumnScores

_KNOWN = ("max", "sum_of_squares", "sum", "logit")
_MAX, _SUM_OF_SQUARES, _SUM, _LOGIT = map(REDUCTIONS.index, _KNOWN)
# Logits of a block: larger ones fall out of the caches, smaller ones make thin products
_BLOCK_ELEMENTS = 3 << 19
_MIN_ITEMS = 16  # fewer could not be shared evenly by the threads


class Job(ctypes.Structure):
    """
    What all threads know of a block of rows. An item is one of ``splits`` shares of the rows of one query head.

    ``logits`` is the address of float32 [members, rows, keys], ``lse`` of [members, rows] or 0, ``scores`` of [items,
    first_own - anchor]; ``first_visible`` of int64 [q_len] or 0, ``row_weight`` of float32 [batch_size, q_len] or 0.
    """

    __slots__ = ()
    _fields_ = [
        ("counters", Counters),
        *integers("logits rows keys first_row anchor first_own first_visible splits scores reduction lse"),
        *integers("row_weight row_weight_step members_per_row"),
        ("softcap", ctypes.c_float),  # 0 for none
    ]


_job_at = record_at(Job)


@compiled
def _visit_row(job, member, row, scores):  # type: ignore[no-untyped-def]
    """Replace the logits of one row by weights, and take them into the scores [first_own - anchor]."""
    index = job.first_row + row
    logits = job.logits + 4 * (member * job.rows + row) * job.keys
    low = load_int(job.first_visible + 8 * index) if job.first_visible != 0 else 0
    high = job.first_own + index + 1
    scored_low = max(low, job.anchor)
    target = scores + 4 * (scored_low - job.anchor)
    row_weight = np.float32(1.0)
    if job.row_weight != 0:
        batch_row = member // job.members_per_row
        row_weight = load_float(job.row_weight + batch_row * job.row_weight_step + 4 * index)
    if job.softcap > 0:
        cap(logits, low, high, job.softcap)
    if job.reduction == _LOGIT:
        raise_maxima(logits, scored_low, job.first_own, row_weight, target)
    peak = peak_of(logits, low, high)
    total = take_exponentials(logits, low, high, peak)
    if job.lse != 0:
        store_float(job.lse + 4 * (member * job.rows + row), peak + np.log(total))
    factor = np.float32(1.0) / total
    if job.reduction == _MAX:
        raise_maxima(logits, scored_low, job.first_own, factor * row_weight, target)
    elif job.reduction == _SUM_OF_SQUARES:
        add_squares_onto(logits, scored_low, job.first_own, factor * row_weight, target)
    elif job.reduction == _SUM:
        add_onto(logits, scored_low, job.first_own, factor * row_weight, target)
    multiply(logits, low, high, factor)
    fill(logits, 0, low, 0.0)
    fill(logits, high, job.keys, 0.0)


def cpu_softmax(address):  # type: ignore[no-untyped-def]
    """Do items until none is left."""
    job = _job_at(address)
    item = take_item(address)
    while item < job.counters.items:
        member, split = divmod(item, job.splits)
        scores = job.scores + 4 * item * (job.first_own - job.anchor)
        for row in range(job.rows * split // job.splits, job.rows * (split + 1) // job.splits):
            _visit_row(job, member, row, scores)
        finish_item(address)
        item = take_item(address)


_row_worker = worker(cpu_softmax)


class CpuColumnScores(ColumnScores):
    """Float32; weights take the place of the logits."""

    def __init__(self, columns: Columns) -> None:
        if columns.reduction not in _KNOWN:
            raise NotImplementedError(f"backend 'cpu' has no reduction {columns.reduction!r}")
        splits = -(-_MIN_ITEMS // columns.members)
        super().__init__(columns, splits)
        job = self._job = Job(anchor=columns.anchor, first_own=columns.first_own, softcap=columns.softcap or 0.0)
        job.counters.items, job.splits, job.scores = columns.members * splits, splits, self._scores.data_ptr()
        job.reduction = REDUCTIONS.index(columns.reduction)
        if columns.first_visible is not None:
            job.first_visible = columns.first_visible.data_ptr()
        if columns.row_weight is not None:
            job.row_weight, job.row_weight_step = columns.row_weight.data_ptr(), 4 * columns.row_weight.shape[1]
            job.members_per_row = columns.members // len(columns.row_weight)

    @staticmethod
    def block_elements(device: torch.device) -> int:
        """Logits of a block of rows."""
        return _BLOCK_ELEMENTS

    def visit(self, logits: torch.Tensor, first_row: int, lse: torch.Tensor | None) -> torch.Tensor:
        """Take a block of rows into account."""
        job = self._job
        job.logits, (_, job.rows, job.keys), job.first_row = logits.data_ptr(), logits.shape, first_row
        job.lse = 0 if lse is None else lse.data_ptr()
        run_on_threads(_row_worker, job, min(torch.get_num_threads(), job.counters.items))
        return logits
