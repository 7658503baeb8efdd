"""Figures of single questions: subtasks of a task that mixes several, and how far compressed answers drift."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from ..results.record import Record
from .cells import FULL
from .format import Table, matrix, plus_minus
from .summary import Summary, title_of
from .uncertainty import mean_and_error

# What a question's details say beside its score, and what it is called.
DRIFT = {
    "kl": "KL(full, compressed), nats a token",
    "added_loss": "loss added on the full cache's answers, nats a token",
}


def part_tables(summary: Summary, setting: str, suffix: str = "") -> list[Table]:
    """Return a table for each subtask, and for each measure of drift, of the tasks that have them."""
    tables = []
    for task in summary.tasks:
        records = [
            record
            for record in summary.records
            if (record["setting"], record["task_label"]) == (setting, task) and not record.get("skipped")
        ]
        details = [_details(question) for record in records for question in record["questions"]]
        for subtask in dict.fromkeys(str(found["task"]) for found in details if "task" in found):
            tables.append(_table(summary, records, _score_of(subtask), "Subtasks" + suffix, task, subtask))
        for name, title in DRIFT.items():
            if any(name in found for found in details):
                tables.append(_table(summary, records, _detail(name), "Fidelity" + suffix, task, title))
    return tables


def _table(
    summary: Summary,
    records: list[Record],
    measured: Callable[[Record], float | None],
    section: str,
    task: str,
    title: str,
) -> Table:
    contexts: dict[tuple[str, float], list[float]] = {}
    for record in records:
        found = [value for question in record["questions"] if (value := measured(question)) is not None]
        if found:
            contexts.setdefault((record["press"], record["ratio"]), []).append(fmean(found))
    means = {place: mean_and_error(values) for place, values in contexts.items()}

    def show(mean: tuple[float, float | None]) -> str:
        return f"{mean[0]:.3f}{plus_minus(mean[1])}"

    note = "Mean over contexts ± standard error, by kept fraction asked for."
    note += "".join(f" Full cache: {show(mean)}." for (press, _), mean in means.items() if press == FULL)
    return matrix(section, f"{title_of(summary, task)}: {title}", summary, means, show, note)


def _score_of(subtask: str) -> Callable[[Record], float | None]:
    return lambda question: question["score"] if str(_details(question).get("task")) == subtask else None


def _detail(name: str) -> Callable[[Record], float | None]:
    return lambda question: _details(question).get(name)


def _details(question: Record) -> Record:
    return question.get("details") or {}
