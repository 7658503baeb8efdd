"""What `kvzip-eval` prints of an evaluation: the report's tables of scores, as aligned text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..report.format import Table
from ..report.summary import summarise
from ..report.tables import SCORE_COLUMNS, cell_table, matrix, question_tables, skipped_table
from ..results.record import Record
from ..run.sweep import Effort


def score_tables(records: Iterable[Record]) -> str:
    """Scores of each task, of its parts, and relative to the full cache over all tasks, for each setting."""
    summary = summarise(records)
    parts = []
    for setting in summary.settings:
        cells = [cell_table(summary, setting, task) for task in summary.tasks]
        # The costs of a cell would not fit on a line.
        rows = [(table.title, *row[: len(SCORE_COLUMNS)]) for table in cells for row in table.rows]
        averages = summary.averages_of(setting)
        means = {(average.press, average.ratio): f"{average.relative:.3f}" for average in averages}
        tasks = max((average.tasks for average in averages), default=0)
        title = f"Score divided by the full cache's, mean over {tasks} tasks, by kept fraction"
        tables = [
            Table(("task", *SCORE_COLUMNS), rows, title=setting, labels=2),
            *(table for task in summary.tasks for table in question_tables(summary, setting, task)),
            matrix(summary, means, title=title),
        ]
        parts += [f"{table.title}\n\n{table.text()}" for table in tables if table.rows]
    skipped = skipped_table(summary, {})
    return "\n\n".join([*parts, f"{skipped.section}\n\n{skipped.text()}"] if skipped.rows else parts)


def saved_line(saved: Mapping[str, int]) -> str:
    """What sharing prefills and replays saved, from the counts of a results folder."""
    return str(Effort(**{name: saved.get(name, 0) for name in Effort.__annotations__}))
