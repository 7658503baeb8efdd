"""Plain text for a terminal: aligned tables, amounts with their units, and the report of `kvzip-press ask`."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

GAP = "  "
MAX_WIDTH = 120
MIN_WIDTH = 40


def format_table(rows: Sequence[Mapping[str, Any]], formats: Mapping[str, str]) -> str:
    """
    Align rows below their column names, which are given in order with the format specification of each.

    Columns without a specification stand to the left, others to the right; None and missing values are shown as "-".
    """
    cells = [
        ["-" if row.get(name) is None else format(row[name], spec) for name, spec in formats.items()] for row in rows
    ]
    lines = [list(formats), *cells]
    sides = [
        f"{'>' if spec else '<'}{max(map(len, column))}" for spec, *column in zip(formats.values(), *lines, strict=True)
    ]
    return "\n".join(GAP.join(map(format, line, sides)).rstrip() for line in lines)


def human_bytes(count: int) -> str:
    """Write a number of bytes with a binary unit, for instance ``"67.2 MiB"``."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def human_seconds(seconds: float | None) -> str:
    """Write a duration, for instance ``"3.84 s"`` or ``"41.3 ms"``; ``"-"`` for None or NaN: nothing was measured."""
    if seconds is None or math.isnan(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def side_by_side(left: str, right: str, width: int) -> list[str]:
    """Wrap two texts into two columns of equal width, which are ``width`` together; line breaks are kept."""
    column = (width - len(GAP)) // 2
    wrapped = []
    for text in (left, right):
        lines = [part for line in text.strip().splitlines() for part in textwrap.wrap(line, column) or [""]]
        wrapped.append(lines or ["(nothing)"])
    rows = max(len(lines) for lines in wrapped)
    padded = [lines + [""] * (rows - len(lines)) for lines in wrapped]
    return [f"{a:<{column}}{GAP}{b}".rstrip() for a, b in zip(*padded, strict=True)]


def format_report(report: Mapping[str, Any], width: int) -> str:
    """Lay out what ``kvzip-press ask --json`` prints for a terminal of a width, without a final line break."""
    width = max(MIN_WIDTH, min(width, MAX_WIDTH))
    full, compressed = report["full"], report["compressed"]
    heading = f"{report['document']}: {report['tokens']:,} tokens in the context of {report['model']}"
    lines = [*textwrap.wrap(heading, width), "", _measures(full, compressed)]
    titles = side_by_side("Full cache", f"Compressed, {compressed['kept_fraction']:.1%} kept", width)
    column = (width - len(GAP)) // 2
    rule = "-" * column + GAP + "-" * column
    for answer in report["answers"]:
        lines += ["", *textwrap.wrap(f"Question: {answer['question']}", width), "", *titles, rule]
        lines += side_by_side(answer["full"]["text"], answer["compressed"]["text"], width)
    return "\n".join(lines)


def _measures(full: Mapping[str, Any], compressed: Mapping[str, Any]) -> str:
    measures: dict[str, tuple[str, Callable[[Any], str]]] = {
        "cache": ("bytes", human_bytes),
        "kept": ("kept_fraction", "{:.1%}".format),
        "prefill": ("prefill_seconds", human_seconds),
        "compression": ("compress_seconds", lambda seconds: human_seconds(seconds or None)),
        "decoding, per token": ("decode_seconds_per_token", human_seconds),
    }
    rows = [
        {"": name, "full": show(full[key]), "compressed": show(compressed[key])}
        for name, (key, show) in measures.items()
    ]
    return format_table(rows, {"": "", "full": ">", "compressed": ">"})
