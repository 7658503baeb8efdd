"""The tables of a report, in Markdown and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .cells import FULL, Average, Cell, failed_tasks
from .format import MISSING, Table, figure, matrix, plus_minus
from .parts import part_tables
from .summary import SHARE, Summary, held_to, title_of

MEBIBYTE = 2**20
MACHINE = ("device", "dtype", "attention")
# Ends the names of what the cells would have taken one by one, in the counts of a sweep.
ALONE = "_alone"


def all_tables(summary: Summary, run: Mapping[str, Any]) -> list[Table]:
    """Every table of a report, in its order; those without rows are left out."""
    several = len(summary.settings) > 1
    tables = []
    for setting in summary.settings:
        suffix = f" ({setting})" if several else ""
        tables.append(relative_table(summary, setting, suffix, unfinished(summary, run)))
        tables += [score_table(summary, setting, task, suffix) for task in summary.tasks]
        tables += part_tables(summary, setting, suffix)
        tables += [cell_table(summary, setting, task, suffix) for task in summary.tasks]
    return [
        table
        for table in (*tables, skipped_table(summary, run), saved_table(run), provenance_table(summary, run))
        if table.rows
    ]


def unfinished(summary: Summary, run: Mapping[str, Any]) -> str:
    """How far the latest run is, if not at its end; else nothing."""
    planned, there = run.get("planned cells") or 0, len(summary.records)
    return f"unfinished: {there:,} of {planned:,} cells" if there < planned else ""


def relative_table(summary: Summary, setting: str, suffix: str = "", state: str = "") -> Table:
    """Score divided by the full cache's, averaged over the tasks: presses down, ratios across."""
    averages = {(a.press, a.ratio): a for a in summary.averages if a.setting == setting}
    tasks = max((average.tasks for average in averages.values()), default=0)

    def show(average: Average) -> str:
        fewer = f" ({average.tasks} tasks)" if average.tasks < tasks else ""
        return f"{average.relative:.3f}{plus_minus(average.error)}{fewer}"

    note = (
        f"Score divided by the full cache's on the same contexts, averaged over {_counted(tasks, 'task', 'tasks')}, "
        "± standard error, by kept fraction asked for. Left out are tasks of fidelity and privacy, and those on which "
        "the full cache was not measured or scores less than two standard errors above 0"
    )
    failed = failed_tasks(summary.cells)
    names = [title_of(summary, task) for task in summary.tasks if (setting, task) in failed]
    note += f", which are here: {', '.join(names)}." if names else "."
    note += f" The run is {state}." if state else ""
    table = matrix("Relative average" + suffix, "", summary, averages, show, note)
    held = [held_to(summary, setting, row[0]) for row in table.rows]
    rows = [(*row, figure(ratio, "g")) for row, ratio in zip(table.rows, held, strict=True)]
    return replace(table, columns=(*table.columns, f"holds {SHARE:.0%} down to"), rows=rows)


def score_table(summary: Summary, setting: str, task: str, suffix: str = "") -> Table:
    """Scores of a task: presses down, ratios across."""
    cells = {(c.press, c.ratio): c for c in summary.cells if (c.setting, c.task) == (setting, task)}
    full = [cell for cell in cells.values() if cell.press == FULL]
    samples = max((cell.samples for cell in cells.values()), default=0)

    def show(cell: Cell) -> str:
        fewer = f" (n {cell.samples})" if cell.samples < samples else ""
        return f"{cell.score:.3f}{plus_minus(cell.error)}{fewer}"

    measure = summary.measures.get(task, "score")
    note = (
        f"{measure[0].upper()}{measure[1:]}: mean over {samples} contexts ± standard error, by kept fraction asked for."
    )
    if full:
        note += f" Full cache: {show(full[0])}."
    return matrix("Scores" + suffix, title_of(summary, task), summary, cells, show, note)


def cell_table(summary: Summary, setting: str, task: str, suffix: str = "") -> Table:
    """All figures of a task, one row a press and ratio."""
    columns = (
        *("press", "ratio", "n", "kept", "score", "minus full [95 %]", "of full"),
        *("cache, MiB", "x full", "prefill, s", "compression, s", "answers, s", "ms a token"),
    )
    order = {press: i for i, press in enumerate(summary.presses)}
    cells = [cell for cell in summary.cells if (cell.setting, cell.task) == (setting, task)]
    rows = [_cell_row(cell) for cell in sorted(cells, key=lambda c: (order[c.press], c.ratio))]
    note = (
        "n: contexts. kept: fraction of the compressible pairs that was really kept. Bytes and seconds are means per "
        "context. The interval is a bootstrap over the paired differences."
    )
    return Table("All figures" + suffix, title_of(summary, task), columns, rows, note)


def _cell_row(cell: Cell) -> tuple[str, ...]:
    difference = MISSING
    if cell.difference is not None:
        difference = f"{cell.difference:+.3f}"
        if cell.interval is not None:
            difference += " [{:+.3f}, {:+.3f}]".format(*cell.interval)
    cost = cell.cost
    return (
        cell.press,
        f"{cell.ratio:g}",
        str(cell.samples),
        f"{cell.kept:.3f}",
        f"{cell.score:.3f}{plus_minus(cell.error)}",
        difference,
        figure(cell.relative, ".3f"),
        figure(None if cost.cache_bytes is None else cost.cache_bytes / MEBIBYTE, ".1f"),
        figure(cell.relative_cost.cache_bytes, ".2f"),
        *(figure(seconds, ".2f") for seconds in (cost.prefill, cost.compression, cost.answer)),
        figure(None if cost.token is None else cost.token * 1000, ".1f"),
    )


def skipped_table(summary: Summary, run: Mapping[str, Any]) -> Table:
    """What was not answered and why: contexts, and whole tasks whose data could not be had."""
    rows = [
        (title_of(summary, task), press, f"{ratio:g}", reason, str(count))
        for (_, task, press, ratio, reason), count in summary.skipped.items()
    ]
    had = {record["task"] for record in summary.records}
    rows += [
        (task, "all", "all", reason, "all") for task, reason in (run.get("left_out") or {}).items() if task not in had
    ]
    note = "Skipped contexts are in no mean above."
    return Table("Skipped", "", ("task", "press", "ratio", "reason", "contexts"), rows, note, labels=4)


def saved_table(run: Mapping[str, Any]) -> Table:
    """What sharing prefills and replays among ratios and levels saved, as the run counted it."""
    counts = run.get("saved") or {}
    rows = [(name, str(counts[name]), str(counts[f"{name}{ALONE}"])) for name in counts if f"{name}{ALONE}" in counts]
    return Table("Saved by the sweep", "", ("what", "done", "one by one"), rows)


def provenance_table(summary: Summary, run: Mapping[str, Any]) -> Table:
    """Where the figures come from; commits, versions and times also as the records themselves name them."""
    rows: list[tuple[str, ...]] = [
        (name, _plain(value)) for name, value in run.items() if value and name not in ("saved", "left_out")
    ]
    found = {name: _found(summary, name) for name in ("commit", "version", "time")}
    rows += [(f"{name}s of the records", ", ".join(found[name])) for name in ("commit", "version") if found[name]]
    if found["time"]:
        rows.append(("times of the records", " to ".join(dict.fromkeys((found["time"][0], found["time"][-1])))))
    rows.append(("records", str(len(summary.records))))
    if summary.replaced:
        rows.append(("records replaced by later ones", str(summary.replaced)))
    return Table("Provenance", "", ("what", "value"), rows, labels=2)


def provenance_facts(summary: Summary, run: Mapping[str, Any]) -> list[str]:
    """Device, amount, commit and date in a few words each."""
    commits, times = _found(summary, "commit"), _found(summary, "time")
    return [
        *(text for name in MACHINE for text in ([str(run[name])] if run.get(name) else _found(summary, name))),
        _counted(len(summary.tasks), "task", "tasks"),
        _counted(sum(press != FULL for press in summary.presses), "press", "presses"),
        unfinished(summary, run) or _counted(len(summary.records), "record", "records"),
        *(f"commit {commit[:10]}" for commit in commits[:1]),
        *(time[:10] for time in times[-1:]),
    ]


def _counted(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"


def _found(summary: Summary, name: str) -> list[str]:
    return sorted({str(record[name]) for record in summary.records if record.get(name)})


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items() if part is not None)
    if isinstance(value, (list, tuple)):
        return " ".join(map(_plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
