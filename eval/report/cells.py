"""What one press at one ratio did on one task (a cell), and on all of them (an average)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..results.record import Record
from .uncertainty import mean_and_error, paired_difference, ratio_of_means

FULL = "full"
# Standard errors that the full cache's score must be above 0
FAILED_BELOW_ERRORS = 2
# Setting, task, press, ratio.
Place = tuple[str, str, str, float]
# Means per context by the names of COSTS; None where it was not measured.
Cost = dict[str, float | None]


@dataclass(frozen=True)
class Cell:
    """One press at one ratio on one task in one setting; what compares with the full cache is of the same contexts."""

    setting: str
    task: str
    press: str
    ratio: float
    samples: int  # contexts that were answered
    score: float  # mean over the contexts
    error: float | None  # its standard error, which a single context does not have
    difference: tuple[float, float, float] | None  # minus the full cache's score, and bounds of its bootstrap interval
    relative: float | None  # divided by the full cache's score; None where that is 0 or was not measured
    relative_error: float | None
    kept: float  # mean fraction of the compressible pairs that was really kept
    cost: Cost
    # Divided by the full cache's. Compression is here prefill and compression divided by the full cache's prefill,
    # since some presses compress while they prefill.
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
    """Aggregate the answered records of a place; `full` has the full cache's by setting, task and sample."""
    pairs = [(record, base) for record in group if (base := full.get((*place[:2], record["sample"])))]
    ours, theirs = [record for record, _ in pairs], [base for _, base in pairs]
    scores = [record["score"] for record in ours], [base["score"] for base in theirs]
    score, error = mean_and_error([record["score"] for record in group])
    relative, relative_error = ratio_of_means(*scores)
    return Cell(
        *place,
        samples=len(group),
        score=score,
        error=error,
        difference=paired_difference(*scores) if pairs and place[2] != FULL else None,
        relative=relative,
        relative_error=relative_error,
        kept=fmean(record["kept"] for record in group),
        cost=_cost(group),
        relative_cost=_relative_cost(_cost(ours), _cost(theirs)),
    )


def failed_tasks(cells: Iterable[Cell]) -> set[tuple[str, str]]:
    """Settings and tasks in which the full cache's score is not told from 0: a division by it says nothing."""
    return {
        (cell.setting, cell.task)
        for cell in cells
        if cell.press == FULL and cell.score <= FAILED_BELOW_ERRORS * (cell.error or 0)
    }


def averages_of(cells: list[Cell]) -> list[Average]:
    """Average over the tasks, each of the same weight, without those that can't be compared with the full cache."""
    failed = failed_tasks(cells)
    compared = [cell for cell in cells if cell.press != FULL and cell.relative is not None]
    comparable = [cell for cell in compared if (cell.setting, cell.task) not in failed]
    places = grouped(comparable, lambda cell: (cell.setting, cell.press, cell.ratio))
    return [_average(place, group) for place, group in places.items()]


def _average(place: tuple[str, str, float], group: list[Any]) -> Average:
    errors = [cell.relative_error for cell in group]
    return Average(
        *place,
        tasks=len(group),
        relative=fmean(cell.relative for cell in group),
        error=None if None in errors else math.hypot(*errors) / len(group),
        kept=fmean(cell.kept for cell in group),
        cost={name: _mean(cell.relative_cost[name] for cell in group) for name in COSTS},
    )


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Items by key, in the order of their first."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def _seconds(record: Record, *parts: str) -> float | None:
    seconds = record.get("seconds") or {}
    return None if any(seconds.get(part) is None for part in parts) else sum(seconds[part] for part in parts)


def _seconds_a_token(record: Record) -> float | None:
    tokens = sum((question.get("details") or {}).get("answer_tokens", 0) for question in record["questions"])
    return _divide(_seconds(record, "answer"), tokens)


# Bytes of the compressed cache, seconds, and seconds for each token of the answers.
COSTS: dict[str, Callable[[Record], float | None]] = {
    "cache_bytes": lambda record: record.get("cache_bytes"),
    "prefill": lambda record: _seconds(record, "prefill"),
    "compression": lambda record: _seconds(record, "score", "evict"),
    "answer": lambda record: _seconds(record, "answer"),
    "token": _seconds_a_token,
}


def _cost(records: list[Record]) -> Cost:
    return {name: _mean(map(measured, records)) for name, measured in COSTS.items()}


def _relative_cost(ours: Cost, full: Cost) -> Cost:
    prefill, compression = ours["prefill"], ours["compression"]
    both = None if prefill is None or compression is None else prefill + compression
    ours, full = ours | {"compression": both}, full | {"compression": full["prefill"]}
    return {name: _divide(ours[name], full[name]) for name in COSTS}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _divide(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
