"""What one press at one ratio did on one task, and on all of them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..results.record import Record
from .uncertainty import mean_and_error, paired_difference

FULL = "full"
# Standard errors that the full cache's score must be above 0
FAILED_BELOW_ERRORS = 2
# Setting, task, press, ratio.
Place = tuple[str, str, str, float]


@dataclass(frozen=True)
class Cost:
    """Means per context: bytes of the compressed cache, seconds, and seconds for each token of the answers."""

    cache_bytes: float | None
    prefill: float | None
    compression: float | None
    answer: float | None
    token: float | None


@dataclass(frozen=True)
class Cell:
    """
    One press at one ratio on one task in one setting.

    Attributes
    ----------
    samples : int
        Contexts that were answered.
    score, error : float
        Mean over the contexts and its standard error, which a single context does not have.
    difference, interval : float, tuple[float, float]
        Minus the full cache's score on the same contexts, and the bootstrap interval of that.
    relative, relative_error : float
        Divided by the full cache's score on the same contexts; None where that is 0 or was not measured.
    kept : float
        Mean fraction of the compressible pairs that was really kept.
    cost, relative_cost : Cost
        Of a context; the relative one divides by the full cache's of the same contexts, and its compression is
        prefill and compression divided by the full cache's prefill, since some presses compress while they prefill.
    """

    setting: str
    task: str
    press: str
    ratio: float
    samples: int
    score: float
    error: float | None
    difference: float | None
    interval: tuple[float, float] | None
    relative: float | None
    relative_error: float | None
    kept: float
    cost: Cost
    relative_cost: Cost


@dataclass(frozen=True)
class Average:
    """A press at one ratio, relative to the full cache, averaged over the tasks (paper, section 5.2)."""

    setting: str
    press: str
    ratio: float
    tasks: int
    relative: float
    error: float | None
    kept: float
    cost: Cost


def cell_of(place: Place, group: list[Record], full: dict[tuple[str, str, str], Record]) -> Cell:
    """
    Aggregate the records of a place.

    Parameters
    ----------
    place : tuple
        Setting, task, press, ratio.
    group : list of dict
        Its records, none skipped.
    full : dict
        The full cache's records by setting, task and sample.
    """
    found = [(record, full.get((*place[:2], record["sample"]))) for record in group]
    pairs = [(record, base) for record, base in found if base is not None]
    scores = [record["score"] for record in group]
    ours, theirs = [record["score"] for record, _ in pairs], [base["score"] for _, base in pairs]
    score, error = mean_and_error(scores)
    compared = paired_difference(ours, theirs) if pairs and place[2] != FULL else None
    relative, relative_error = ratio_of_means(ours, theirs)
    return Cell(
        *place,
        samples=len(group),
        score=score,
        error=error,
        difference=compared[0] if compared else None,
        interval=(compared[1], compared[2]) if compared else None,
        relative=relative,
        relative_error=relative_error,
        kept=statistics.fmean(record["kept"] for record in group),
        cost=_cost(group),
        relative_cost=_relative_cost(pairs),
    )


def ratio_of_means(values: Sequence[float], bases: Sequence[float]) -> tuple[float | None, float | None]:
    """
    Ratio of two means over the same contexts and its standard error by linearisation.

    Returns
    -------
    tuple[float | None, float | None]
        Both None where there is nothing to divide by; no error for a single context.
    """
    base = statistics.fmean(bases) if bases else 0.0
    if base == 0:
        return None, None
    ratio = statistics.fmean(values) / base
    _, error = mean_and_error([value - ratio * other for value, other in zip(values, bases, strict=True)])
    return ratio, None if error is None else error / base


def failed_tasks(cells: Iterable[Cell]) -> set[tuple[str, str]]:
    """Settings and tasks in which the full cache's score is not told from 0: a division by it says nothing."""
    return {
        (cell.setting, cell.task)
        for cell in cells
        if cell.press == FULL and cell.score <= FAILED_BELOW_ERRORS * (cell.error or 0)
    }


def averages_of(cells: list[Cell]) -> list[Average]:
    """Average over the tasks, each of the same weight, without those that can't be compared with the full cache."""
    averages = []
    failed = failed_tasks(cells)
    comparable = [
        cell
        for cell in cells
        if cell.relative is not None and cell.press != FULL and (cell.setting, cell.task) not in failed
    ]
    for (setting, press, ratio), group in grouped(comparable, lambda c: (c.setting, c.press, c.ratio)).items():
        errors = [cell.relative_error for cell in group if cell.relative_error is not None]
        costs = [cell.relative_cost for cell in group]
        averages.append(
            Average(
                setting,
                press,
                ratio,
                tasks=len(group),
                relative=statistics.fmean(cell.relative for cell in group if cell.relative is not None),
                error=math.hypot(*errors) / len(group) if len(errors) == len(group) else None,
                kept=statistics.fmean(cell.kept for cell in group),
                cost=Cost(*(_mean(getattr(cost, name) for cost in costs) for name in Cost.__annotations__)),
            )
        )
    return averages


def _cost(group: list[Record]) -> Cost:
    return Cost(
        _mean(record.get("cache_bytes") for record in group),
        _mean(_seconds(record, "prefill") for record in group),
        _mean(_seconds(record, "score", "evict") for record in group),
        _mean(_seconds(record, "answer") for record in group),
        _mean(_seconds_a_token(record) for record in group),
    )


def _relative_cost(pairs: list[tuple[Record, Record]]) -> Cost:
    ours, full = _cost([record for record, _ in pairs]), _cost([base for _, base in pairs])
    both = None if ours.prefill is None or ours.compression is None else ours.prefill + ours.compression
    return Cost(
        _divide(ours.cache_bytes, full.cache_bytes),
        _divide(ours.prefill, full.prefill),
        _divide(both, full.prefill),
        _divide(ours.answer, full.answer),
        _divide(ours.token, full.token),
    )


def _seconds(record: Record, *parts: str) -> float | None:
    seconds = record.get("seconds") or {}
    return None if any(seconds.get(part) is None for part in parts) else sum(seconds[part] for part in parts)


def _seconds_a_token(record: Record) -> float | None:
    tokens = sum((question.get("details") or {}).get("answer_tokens", 0) for question in record["questions"])
    return _divide(_seconds(record, "answer"), tokens)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _divide(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Items by key, in the order of their first."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)
