"""Plain text tables of an evaluation, for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ...terminal import format_table
from ..presses.registry import FULL
from ..report.parts import part_tables
from ..report.summary import summarise, title_of
from ..results.record import Record
from ..run.sweep import Effort

COLUMNS = {
    "task": "",
    "press": "",
    "ratio": ".3g",
    "kept": ".3f",
    "contexts": "d",
    "score": ".3f",
    "error": ".3f",
    "minus full": "+.3f",
    "95 % interval": "",
    "of full": ".3f",
}


def score_tables(records: Iterable[Record]) -> str:
    """
    Scores of each task, of its parts, and relative to the full cache over all tasks, for each setting.

    Parameters
    ----------
    records : iterable of dict
        Records of a results folder.
    """
    summary = summarise(records)
    parts = []
    for setting in summary.settings:
        rows = []
        for cell in summary.cells:
            if cell.setting == setting:
                interval = None if cell.interval is None else "{:+.3f} to {:+.3f}".format(*cell.interval)
                rows.append(
                    {
                        "task": title_of(summary, cell.task),
                        "press": cell.press,
                        "ratio": cell.ratio,
                        "kept": cell.kept,
                        "contexts": cell.samples,
                        "score": cell.score,
                        "error": cell.error,
                        "minus full": cell.difference,
                        "95 % interval": interval,
                        "of full": None if cell.press == FULL else cell.relative,
                    }
                )
        if rows:
            parts.append(f"{setting}\n\n{format_table(rows, COLUMNS)}")
        for table in part_tables(summary, setting):
            cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
            parts.append(f"{table.title}\n\n{format_table(cells, dict.fromkeys(table.columns, ''))}")
        averages = [average for average in summary.averages if average.setting == setting]
        if averages:
            parts.append(_relative_table(averages, summary.presses, summary.ratios))
    if summary.skipped:
        parts.append(_skipped_table(summary.skipped))
    return "\n\n".join(parts)


def _relative_table(averages: list, presses: list[str], ratios: list[float]) -> str:
    found = {(average.press, average.ratio): average for average in averages}
    columns = {"press": "", **{f"{ratio:g}": ".3f" for ratio in ratios}}
    rows = [
        {"press": press} | {f"{ratio:g}": found[press, ratio].relative for ratio in ratios if (press, ratio) in found}
        for press in presses
        if any((press, ratio) in found for ratio in ratios)
    ]
    tasks = max(average.tasks for average in averages)
    return (
        f"Score divided by the full cache's, mean over {tasks} tasks, by kept fraction\n\n{format_table(rows, columns)}"
    )


def _skipped_table(skipped: Counter) -> str:
    counts: Counter = Counter()
    for (_, task, press, ratio, reason), number in skipped.items():
        counts[task, f"{press} {ratio:g}", reason] += number
    rows = [
        {"task": task, "press": press, "contexts": number, "reason": reason}
        for (task, press, reason), number in counts.items()
    ]
    return "Skipped\n\n" + format_table(rows, {"task": "", "press": "", "contexts": "d", "reason": ""})


def saved_line(saved: Mapping[str, int]) -> str:
    """What sharing prefills and replays saved, from the counts of a results folder."""
    return str(Effort(**{name: saved.get(name, 0) for name in Effort.__annotations__}))
