"""What `kvzip-eval` prints of an evaluation: the report's tables of scores, as aligned text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..report.summary import summarise
from ..report.tables import SCORE_COLUMNS, all_tables
from ..results.record import Record
from ..run.sweep import Effort

# In the report; the scores of a task are also in its cells.
ELSEWHERE = ("Scores", "Provenance")


def score_tables(records: Iterable[Record]) -> str:
    """
    Every cell, scores of subtasks and drift, relative averages, and what was skipped.

    Parameters
    ----------
    records : iterable of dict
        Records of a results folder.
    """
    parts = []
    tables = [table for table in all_tables(summarise(records), {}) if not table.section.startswith(ELSEWHERE)]
    # What is read first comes last, above the prompt.
    for table in sorted(tables, key=lambda table: not table.section.startswith("All figures")):
        heading = f"{table.section}: {table.title}" if table.title else f"{table.section}. {table.note}"
        # The costs of a cell would not fit on a line.
        figures = len(SCORE_COLUMNS) if table.section.startswith("All figures") else None
        shown = replace(table, columns=table.columns[:figures], rows=[row[:figures] for row in table.rows])
        parts.append(f"{textwrap.fill(heading, 100)}\n\n{shown.text()}")
    return "\n\n".join(parts)


def saved_line(saved: Mapping[str, int]) -> str:
    """What sharing prefills and replays saved, from the counts of a results folder."""
    return str(Effort(**{name: saved.get(name, 0) for name in Effort.__annotations__}))
