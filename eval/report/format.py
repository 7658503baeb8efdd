"""Tables of text, in Markdown, and how figures are written in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .cells import FULL
from .summary import Summary

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """
    Text in rows and columns.

    Parameters
    ----------
    section, title : str
        Heading of several tables, and of this one.
    columns : tuple[str, ...]
        Their names; the first `labels` of them hold text, the others figures.
    """

    section: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    labels: int = 1

    def markdown(self) -> str:
        """The table below its title and note."""
        rule = ["---" if i < self.labels else "---:" for i in range(len(self.columns))]
        lines = [self.columns, rule, *self.rows]
        body = "\n".join("| " + " | ".join(map(_escape, line)) + " |" for line in lines)
        return "\n\n".join(part for part in (self.title and f"### {self.title}", _escape(self.note), body) if part)


def markdown(title: str, tables: Sequence[Table]) -> str:
    """A document of all tables, a heading where the section changes; a note that several share is said once."""
    parts = [f"# {_escape(title)}"]
    section = note = ""
    for table in tables:
        if table.section != section:
            section, note = table.section, ""
            parts.append(f"## {_escape(section)}")
        parts.append((table if table.note != note else replace(table, note="")).markdown())
        note = table.note
    return "\n\n".join(parts) + "\n"


def matrix(
    section: str, title: str, summary: Summary, values: Mapping[Any, Any], show: Callable[[Any], str], note: str
) -> Table:
    """
    Lay out values by press and ratio.

    Parameters
    ----------
    section, title, note : str
        See :class:`Table`.
    summary : Summary
        Gives the order of presses and ratios.
    values : Mapping
        By (press, ratio); the full cache's are no row.
    show : callable
        Text of a value.
    """
    presses = [press for press in summary.presses if press != FULL and any(key[0] == press for key in values)]
    ratios = [ratio for ratio in summary.ratios if any(key == (press, ratio) for press in presses for key in values)]
    rows = [
        (press, *(show(values[press, ratio]) if (press, ratio) in values else MISSING for ratio in ratios))
        for press in presses
    ]
    return Table(section, title, ("press", *(f"{ratio:g}" for ratio in ratios)), rows, note)


def plus_minus(error: float | None) -> str:
    """A standard error behind its mean, if there is one."""
    return "" if error is None else f" ± {error:.3f}"


def figure(value: float | None, spec: str) -> str:
    """A number, or a dash for one that is not known."""
    return MISSING if value is None else format(value, spec)


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
