"""A table of texts, written in Markdown or aligned for a terminal, and how figures are written in its cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...terminal import format_table

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns."""

    columns: tuple[str, ...]  # their names; the first `labels` of them hold words, the others figures
    rows: Sequence[tuple[str, ...]]  # a text for each column
    # section, title, note: heading of several tables, of this one, and what is said above the rows
    section: str = ""
    title: str = ""
    note: str = ""
    labels: int = 1

    def text(self) -> str:
        """Rows below their columns, words to the left and figures to the right."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return format_table(rows, {name: "" if i < self.labels else ">" for i, name in enumerate(self.columns)})

    def markdown(self) -> str:
        """Title, note and rows."""
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


def with_error(value: float, error: float | None) -> str:
    """A mean and its standard error, if there is one."""
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def figure(value: float | None, spec: str, unit: float = 1) -> str:
    """A number in a unit, or a dash for one that is not known."""
    return MISSING if value is None else format(value / unit, spec)


def percent(fraction: float) -> str:
    """A fraction in per cent, to a tenth at most."""
    return f"{round(100 * fraction, 1):g} %"


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
