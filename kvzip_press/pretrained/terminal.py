"""Lay out the report of `kvzip-press ask` for a terminal: a table of measures, then answers side by side."""

import math
import textwrap
from typing import Any

GAP = "  "
MAX_WIDTH = 120
MIN_WIDTH = 40


def human_bytes(count: int) -> str:
    """
    Write a number of bytes with a binary unit.

    Parameters
    ----------
    count : int
        Number of bytes.

    Returns
    -------
    str
        For instance ``"67.2 MiB"``.
    """
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def human_seconds(seconds: float | None) -> str:
    """
    Write a duration in seconds, or in milliseconds below one second.

    Parameters
    ----------
    seconds : float or None
        The duration; None or NaN where nothing was measured.

    Returns
    -------
    str
        For instance ``"3.84 s"``, ``"41.3 ms"`` or ``"-"``.
    """
    if seconds is None or math.isnan(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def side_by_side(left: str, right: str, width: int) -> list[str]:
    """
    Wrap two texts into two columns of equal width.

    Parameters
    ----------
    left, right : str
        The texts; line breaks are kept.
    width : int
        Total width in characters.

    Returns
    -------
    list of str
        Lines no longer than `width`.
    """
    column = (width - len(GAP)) // 2
    wrapped = []
    for text in (left, right):
        lines = [part for line in text.strip().splitlines() for part in textwrap.wrap(line, column) or [""]]
        wrapped.append(lines or ["(nothing)"])
    rows = max(len(lines) for lines in wrapped)
    padded = [lines + [""] * (rows - len(lines)) for lines in wrapped]
    return [f"{a:<{column}}{GAP}{b}".rstrip() for a, b in zip(*padded, strict=True)]


def format_report(report: dict[str, Any], width: int) -> str:
    """
    Lay out the measures and the answers of both caches.

    Parameters
    ----------
    report : dict
        What ``kvzip-press ask --json`` prints.
    width : int
        Width of the terminal.

    Returns
    -------
    str
        The text to print, without a final line break.
    """
    width = max(MIN_WIDTH, min(width, MAX_WIDTH))
    full, compressed = report["full"], report["compressed"]
    heading = f"{report['document']}: {report['tokens']:,} tokens in the context of {report['model']}"
    lines = [*textwrap.wrap(heading, width), "", *_measures(full, compressed)]
    titles = side_by_side("Full cache", f"Compressed, {compressed['kept_fraction']:.1%} kept", width)
    column = (width - len(GAP)) // 2
    rule = "-" * column + GAP + "-" * column
    for answer in report["answers"]:
        lines += ["", *textwrap.wrap(f"Question: {answer['question']}", width), "", *titles, rule]
        lines += side_by_side(answer["full"]["text"], answer["compressed"]["text"], width)
    return "\n".join(lines)


def _measures(full: dict[str, Any], compressed: dict[str, Any]) -> list[str]:
    rows = [
        ("", "full", "compressed"),
        ("cache", human_bytes(full["bytes"]), human_bytes(compressed["bytes"])),
        ("kept", f"{full['kept_fraction']:.1%}", f"{compressed['kept_fraction']:.1%}"),
        ("prefill", human_seconds(full["prefill_seconds"]), human_seconds(compressed["prefill_seconds"])),
        ("compression", "-", human_seconds(compressed["compress_seconds"])),
        (
            "decoding, per token",
            human_seconds(full["decode_seconds_per_token"]),
            human_seconds(compressed["decode_seconds_per_token"]),
        ),
    ]
    return [f"{name:<19}{a:>11}{b:>12}" for name, a, b in rows]
