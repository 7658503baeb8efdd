"""What a results folder says: a cell for each setting, task, press and ratio, and averages over the tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ..results.answers import check_whole
from ..results.folder import sha256
from ..results.record import Record
from .cells import FULL, Average, Cell, Place, averages_of, cell_of, grouped

# A press holds down to a ratio while it keeps this share of the full cache's score.
SHARE = 0.95
# Metrics that say something else than how good the answers are: their tasks are in no average.
MEASURES = {
    "refusal": "refusal rate",
    "leak": "leak rate, less is better",
    "fidelity": "top-1 agreement with the full cache",
}
# Records that differ in any of these are never averaged or compared.
SETTING = (
    *("model", "weights", "dtype", "attention", "device", "window", "backend"),
    *("budget", "scorer", "protocol", "prompt"),
)
TASK = ("task", "length", "source", "seed", "task_version", "data")
# What a sample of a task holds, by its identity: it differs by corpus, edited files and shortened answers.
CONTENTS = ("context_sha256", "questions_sha256", "instruction", "max_new_tokens")


@dataclass(frozen=True)
class Summary:
    """All cells and what they are made of; names in the order of their first record, ratios rising."""

    settings: list[str]
    tasks: list[str]
    presses: list[str]
    ratios: list[float]
    imitations: list[str]  # tasks whose samples only resemble the published ones
    measures: dict[str, str]  # what the scores of a task say, where that is not how good the answers are
    cells: list[Cell]
    averages: list[Average]
    skipped: Counter[tuple[str, str, str, float, str]]  # contexts by setting, task, press, ratio and reason
    replaced: int  # records that a later one of the same cell and sample took the place of
    records: list[Record]  # those that count, each with its "setting" and "task_label"

    def title_of(self, task: str) -> str:
        """The task's label, marked where its samples only resemble the published ones."""
        return f"{task} (imitation)" if task in self.imitations else task

    def cells_of(self, setting: str, task: str) -> list[Cell]:
        """Those of a task, by press and ratio."""
        found = [cell for cell in self.cells if (cell.setting, cell.task) == (setting, task)]
        return sorted(found, key=lambda cell: (self.presses.index(cell.press), cell.ratio))

    def averages_of(self, setting: str) -> list[Average]:
        """Those over the tasks of a setting."""
        return [average for average in self.averages if average.setting == setting]

    def held_to(self, setting: str, press: str) -> float | None:
        """Smallest measured ratio from which on upwards the press holds `SHARE` of the full cache's score, if any."""
        averages = [average for average in self.averages_of(setting) if average.press == press]
        falling = sorted(averages, key=lambda average: -average.ratio)
        held = takewhile(lambda average: average.relative >= SHARE, falling)
        return min((average.ratio for average in held), default=None)


def summarise(records: Iterable[Record]) -> Summary:
    """Aggregate records as :func:`kvzip_press.eval.results.folder.read_records` returns them."""
    given = _told_apart(records)
    setting_of, task_of = _labels(given, SETTING), _labels(given, TASK)
    labelled = [
        record | {"setting": setting_of[_key(record, SETTING)], "task_label": task_of[_key(record, TASK)]}
        for record in given
    ]
    # A later record of the same place stands for a repeated run, of another version of the code for example.
    kept = list({(*_place(record), record["sample"]): record for record in labelled}.values())
    answered = [record for record in kept if not record.get("skipped")]
    full = {(*_place(record)[:2], record["sample"]): record for record in answered if record["press"] == FULL}
    cells = [cell_of(place, group, full) for place, group in grouped(answered, _place).items()]
    asked = [(record["task_label"], question["metric"]) for record in answered for question in record["questions"]]
    measures = {task: MEASURES[metric] for task, metric in asked if metric in MEASURES}
    return Summary(
        settings=_unique(record["setting"] for record in kept),
        tasks=_unique(record["task_label"] for record in kept),
        presses=sorted(_unique(record["press"] for record in kept), key=lambda press: press != FULL),
        ratios=sorted(_unique(record["ratio"] for record in answered if record["press"] != FULL)),
        imitations=_unique(record["task_label"] for record in kept if record.get("imitation")),
        measures=measures,
        cells=cells,
        averages=averages_of([cell for cell in cells if cell.task not in measures]),
        skipped=Counter((*_place(record), record["skipped"]) for record in kept if record.get("skipped")),
        replaced=len(given) - len(kept),
        records=kept,
    )


def _told_apart(records: Iterable[Record]) -> list[Record]:
    """Add what of a record's identity tells it apart: weights, and which of the contents seen of its sample it has."""
    seen: dict[tuple[Hashable, ...], list[str]] = {}
    told = []
    for record in records:
        check_whole(record)
        identity = record.get("identity") or {}
        contents = sha256([identity.get(name) for name in CONTENTS])
        known = seen.setdefault((*_key(record, TASK), record["sample"]), [])
        if contents not in known:
            known.append(contents)
        described = {name: identity.get(name) for name in ("window", "backend")}
        weights = (identity.get("model") or {}).get("weights")
        told.append({**record, **described, "weights": weights, "data": known.index(contents) + 1})
    return told


def _place(record: Record) -> Place:
    return record["setting"], record["task_label"], record["press"], record["ratio"]


def _key(record: Record, names: Sequence[str]) -> tuple[Hashable, ...]:
    return tuple(record.get(name) for name in names)


def _labels(records: list[Record], names: Sequence[str]) -> dict[tuple[Hashable, ...], str]:
    """Name each key by its first part and those of its other parts that differ among keys of that first part."""
    labels = {}
    for first, keys in grouped(_unique(_key(record, names) for record in records), lambda key: key[0]).items():
        varying = [i for i in range(1, len(names)) if len({key[i] for key in keys}) > 1]
        for key in keys:
            parts = (f"{names[i].removeprefix('task_').replace('_', ' ')} {key[i]}" for i in varying)
            labels[key] = ", ".join([str(first), *parts])
    return labels


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
