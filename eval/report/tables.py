"""The tables of a report, for its Markdown, its page and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from .cells import FULL, Cell, failed_tasks
from .format import MISSING, Table, figure, percent, with_error
from .summary import SHARE, Summary
from .uncertainty import mean_and_error

MACHINE = ("device", "dtype", "attention")
# Ends the names of what the cells would have taken one by one, in the counts of a sweep.
ALONE = "_alone"
# What a question's details may say beside its score: how far compressed answers drift from the full cache's.
DRIFT = {
    "kl": "KL(full, compressed), nats a token",
    "added_loss": "loss added on the full cache's answers, nats a token",
}
SCORE_COLUMNS = ("press", "ratio", "n", "kept", "score", "minus full [95 %]", "of full")
COST_COLUMNS = ("cache, MiB", "x full", "prefill, s", "compression, s", "answers, s", "ms a token")


def all_tables(summary: Summary, run: Mapping[str, Any]) -> list[Table]:
    """Every table of a report, in its order; those without rows are left out."""
    tables = []
    for setting in summary.settings:
        of_setting = [
            relative_table(summary, setting, unfinished(summary, run)),
            *(score_table(summary, setting, task) for task in summary.tasks),
            *(table for task in summary.tasks for table in question_tables(summary, setting, task)),
            *(cell_table(summary, setting, task) for task in summary.tasks),
        ]
        suffix = f" ({setting})" if len(summary.settings) > 1 else ""
        tables += [replace(table, section=table.section + suffix) for table in of_setting]
    tables += [skipped_table(summary, run), saved_table(run), provenance_table(summary, run)]
    return [table for table in tables if table.rows]


def unfinished(summary: Summary, run: Mapping[str, Any]) -> str:
    """How far the latest run is, if not at its end; else nothing."""
    planned, there = run.get("planned cells") or 0, len(summary.records)
    return f"unfinished: {there:,} of {planned:,} cells" if there < planned else ""


def counted(number: int, one: str, more: str) -> str:
    """A number and the noun that it counts."""
    return f"{number:,} {one if number == 1 else more}"


def matrix(summary: Summary, texts: Mapping[Any, str], section: str = "", title: str = "", note: str = "") -> Table:
    """Lay out texts by (press, ratio): presses down, without the full cache, and ratios across."""
    presses = [press for press in summary.presses if press != FULL and any(key[0] == press for key in texts)]
    ratios = [ratio for ratio in summary.ratios if any((press, ratio) in texts for press in presses)]
    rows = [(press, *(texts.get((press, ratio), MISSING) for ratio in ratios)) for press in presses]
    return Table(("press", *(f"{ratio:g}" for ratio in ratios)), rows, section, title, note)


def relative_table(summary: Summary, setting: str, state: str = "") -> Table:
    """Score divided by the full cache's, averaged over the tasks: presses down, ratios across."""
    averages = {(average.press, average.ratio): average for average in summary.averages_of(setting)}
    tasks = max((average.tasks for average in averages.values()), default=0)
    texts = {
        place: with_error(average.relative, average.error)
        + (f" ({average.tasks} tasks)" if average.tasks < tasks else "")
        for place, average in averages.items()
    }
    note = (
        f"Score divided by the full cache's on the same contexts, averaged over {counted(tasks, 'task', 'tasks')}, "
        "± standard error, by kept fraction asked for. Left out are tasks of fidelity and privacy, and those on which "
        "the full cache was not measured or scores less than two standard errors above 0"
    )
    failed = failed_tasks(summary.cells)
    names = [summary.title_of(task) for task in summary.tasks if (setting, task) in failed]
    note += f", which are here: {', '.join(names)}." if names else "."
    note += f" The run is {state}." if state else ""
    table = matrix(summary, texts, "Relative average", note=note)
    held = [summary.held_to(setting, row[0]) for row in table.rows]
    rows = [(*row, MISSING if to is None else percent(to)) for row, to in zip(table.rows, held, strict=True)]
    return replace(table, columns=(*table.columns, f"holds {percent(SHARE)} down to"), rows=rows)


def score_table(summary: Summary, setting: str, task: str) -> Table:
    """Scores of a task: presses down, ratios across."""
    cells = summary.cells_of(setting, task)
    samples = max((cell.samples for cell in cells), default=0)
    texts = {
        (cell.press, cell.ratio): with_error(cell.score, cell.error)
        + (f" (n {cell.samples})" if cell.samples < samples else "")
        for cell in cells
    }
    measure = summary.measures.get(task, "score")
    note = f"{measure[0].upper()}{measure[1:]}: mean over {counted(samples, 'context', 'contexts')}"
    return _means(summary, texts, "Scores", summary.title_of(task), note)


def question_tables(summary: Summary, setting: str, task: str) -> list[Table]:
    """A table for each subtask of a task that mixes several, and for each measure of drift that was taken."""
    contexts: dict[tuple[str, str], dict[tuple[str, float], list[float]]] = {}
    for record in summary.records:
        values: dict[tuple[str, str], list[float]] = {}
        if (record["setting"], record["task_label"]) == (setting, task) and not record.get("skipped"):
            for question in record["questions"]:
                details = question.get("details") or {}
                if "task" in details:
                    values.setdefault(("Subtasks", str(details["task"])), []).append(question["score"])
                for name, title in DRIFT.items():
                    if details.get(name) is not None:
                        values.setdefault(("Fidelity", title), []).append(details[name])
        for part, found in values.items():
            contexts.setdefault(part, {}).setdefault((record["press"], record["ratio"]), []).append(fmean(found))
    tables = []
    for (section, title), places in sorted(contexts.items(), key=lambda part: part[0][0], reverse=True):
        texts = {place: with_error(*mean_and_error(means)) for place, means in places.items()}
        tables.append(_means(summary, texts, section, f"{summary.title_of(task)}: {title}", "Mean over contexts"))
    return tables


def _means(summary: Summary, texts: Mapping[tuple[str, float], str], section: str, title: str, what: str) -> Table:
    full = "".join(f" Full cache: {text}." for (press, _), text in texts.items() if press == FULL)
    return matrix(summary, texts, section, title, f"{what} ± standard error, by kept fraction asked for.{full}")


def cell_table(summary: Summary, setting: str, task: str) -> Table:
    """All figures of a task, one row a press and ratio."""
    rows = [_cell_row(cell) for cell in summary.cells_of(setting, task)]
    note = (
        "n: contexts. kept: fraction of the compressible pairs that was really kept. Bytes and seconds are means per "
        "context. The interval is a bootstrap over the paired differences."
    )
    return Table(SCORE_COLUMNS + COST_COLUMNS, rows, "All figures", summary.title_of(task), note)


def _cell_row(cell: Cell) -> tuple[str, ...]:
    return (
        cell.press,
        f"{cell.ratio:g}",
        str(cell.samples),
        f"{cell.kept:.3f}",
        with_error(cell.score, cell.error),
        "{:+.3f} [{:+.3f}, {:+.3f}]".format(*cell.difference) if cell.difference else MISSING,
        figure(cell.relative, ".3f"),
        figure(cell.cost["cache_bytes"], ".1f", unit=2**20),
        figure(cell.relative_cost["cache_bytes"], ".2f"),
        *(figure(cell.cost[name], ".2f") for name in ("prefill", "compression", "answer")),
        figure(cell.cost["token"], ".1f", unit=1e-3),
    )


def skipped_table(summary: Summary, run: Mapping[str, Any]) -> Table:
    """What was not answered and why: contexts, and whole tasks whose data could not be had."""
    rows = [
        (summary.title_of(task), press, f"{ratio:g}", reason, str(count))
        for (_, task, press, ratio, reason), count in summary.skipped.items()
    ]
    had = {record["task"] for record in summary.records}
    left_out = run.get("left_out") or {}
    rows += [(task, "all", "all", reason, "all") for task, reason in left_out.items() if task not in had]
    note = "Skipped contexts are in no mean above."
    return Table(("task", "press", "ratio", "reason", "contexts"), rows, "Skipped", note=note, labels=4)


def saved_table(run: Mapping[str, Any]) -> Table:
    """What sharing prefills and replays among ratios and levels saved, as the run counted it."""
    counts = run.get("saved") or {}
    rows = [(name, str(counts[name]), str(counts[name + ALONE])) for name in counts if name + ALONE in counts]
    return Table(("what", "done", "one by one"), rows, "Saved by the sweep")


def provenance_table(summary: Summary, run: Mapping[str, Any]) -> Table:
    """Where the figures come from; commits, versions and times also as the records themselves name them."""
    rows = [(name, _plain(value)) for name, value in run.items() if value and name not in ("saved", "left_out")]
    for name in ("commit", "version"):
        if found := _found(summary, name):
            rows.append((f"{name}s of the records", ", ".join(found)))
    if times := _found(summary, "time"):
        rows.append(("times of the records", " to ".join(dict.fromkeys((times[0], times[-1])))))
    rows.append(("records", str(len(summary.records))))
    if summary.replaced:
        rows.append(("records replaced by later ones", str(summary.replaced)))
    return Table(("what", "value"), rows, "Provenance", labels=2)


def provenance_facts(summary: Summary, run: Mapping[str, Any]) -> list[str]:
    """Device, amount, commit and date in a few words each."""
    return [
        *(text for name in MACHINE for text in ([str(run[name])] if run.get(name) else _found(summary, name))),
        counted(len(summary.tasks), "task", "tasks"),
        counted(sum(press != FULL for press in summary.presses), "press", "presses"),
        unfinished(summary, run) or counted(len(summary.records), "record", "records"),
        *(f"commit {commit[:10]}" for commit in _found(summary, "commit")[:1]),
        *(time[:10] for time in _found(summary, "time")[-1:]),
    ]


def _found(summary: Summary, name: str) -> list[str]:
    return sorted({str(record[name]) for record in summary.records if record.get(name)})


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items() if part is not None)
    if isinstance(value, (list, tuple)):
        return " ".join(map(_plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
