"""A report as one HTML page that needs no network: data, style and script are inside it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ...files import write_atomically
from ..results.folder import read_records, read_run
from ..results.record import Record
from .cells import FULL
from .format import Table, markdown, percent
from .plots import all_plots
from .summary import SHARE, Summary, summarise
from .tables import all_tables, provenance_facts

SCRIPTS = ("plots.js", "samples.js", "page.js")
# Below this kept fraction a linear axis crowds the points, and the page starts with a logarithmic one.
LINEAR_DOWN_TO = 0.05


def write_report(results: Path | str, out: Path | str | None = None) -> list[Path]:
    """
    Write report.md and report.html about a results folder, into it or into a folder that is made if missing.

    Raises
    ------
    FileNotFoundError
        If the folder holds no records.
    ValueError
        If a record is damaged, or there are none yet.
    """
    records, run = read_records(results), read_run(results)
    if not records:
        raise ValueError(f"no records in {str(results)!r} yet: wait until the run has finished a sample")
    summary = summarise(records)
    tables = all_tables(summary, run)
    title = ", ".join(dict.fromkeys(str(record["model"]) for record in summary.records))
    folder = Path(results if out is None else out)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"report.md": markdown(title, tables), "report.html": page(title, summary, tables, run)}
    for name, text in texts.items():
        write_atomically(folder / name, text)
    return [folder / name for name in texts]


def page(title: str, summary: Summary, tables: Sequence[Table], run: Mapping[str, Any]) -> str:
    """The page as text: plots of the summary, its samples to browse, and the tables below them."""
    smallest = min((cell.kept for cell in summary.cells if cell.press != FULL and cell.kept > 0), default=1.0)
    report = {
        "facts": provenance_facts(summary, run),
        "settings": summary.settings,
        "tasks": [summary.title_of(task) for task in summary.tasks],
        "presses": summary.presses,
        "ratios": summary.ratios,
        "smallest": smallest,
        "log": smallest < LINEAR_DOWN_TO,
        "plots": all_plots(summary),
        "tables": [vars(table) for table in tables],
    }
    style = _asset("page.css")
    # In one strict function: nothing of the page is global, and an element's id can't stand in for a variable.
    script = '(() => {\n"use strict";\n' + "\n".join(map(_asset, SCRIPTS)) + "})();\n"
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        share=percent(SHARE),
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        style=style,
        script=script,
        report=_json(report),
        records=_json(_records(summary)),
    )


def _asset(name: str) -> str:
    return (resources.files("kvzip_press.eval.report") / "assets" / name).read_text(encoding="utf-8")


def _records(summary: Summary) -> dict[str, Any]:
    """Each context once, and the answers about it, with names as numbers."""
    numbers: dict[tuple[str, ...], int] = {}
    contexts: list[dict[str, Any]] = []
    answers = []
    for record in summary.records:
        if not record.get("skipped"):
            key = (record["task_label"], record["sample"], *(question["text"] for question in record["questions"]))
            number = numbers.setdefault(key, len(numbers))
            if number == len(contexts):
                contexts.append(_context(summary, record))
            answers.append(_answers(summary, record, number))
    return {"contexts": contexts, "records": answers}


def _context(summary: Summary, record: Record) -> dict[str, Any]:
    asked = ("text", "answer_prefix", "answers", "metric")
    return {
        "task": summary.tasks.index(record["task_label"]),
        "sample": str(record["sample"]),
        "tokens": record.get("context_tokens"),
        "excerpt": record.get("context_excerpt") or "",
        "questions": [{name: question.get(name) for name in asked} for question in record["questions"]],
    }


def _answers(summary: Summary, record: Record, context: int) -> dict[str, Any]:
    copied = ("ratio", "kept", "kept_pairs", "total_pairs", "cache_bytes", "full_bytes")
    return {
        "setting": summary.settings.index(record["setting"]),
        "context": context,
        "press": summary.presses.index(record["press"]),
        **{name: record.get(name) for name in copied},
        "seconds": {name: value and round(value, 4) for name, value in (record.get("seconds") or {}).items()},
        "answers": [_answer(question) for question in record["questions"]],
    }


def _answer(question: Mapping[str, Any]) -> tuple[str, str | None, float]:
    # What the metric saw is left out where it is the whole answer: most of a report's size is answers.
    prediction, filtered = question["prediction"], question["filtered"]
    return prediction, None if filtered == prediction else filtered, round(question["score"], 4)


def _json(data: Any) -> str:
    """JSON that can stand in an HTML element: no text in it can end the element or open a comment."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
