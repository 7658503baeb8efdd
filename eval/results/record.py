"""Records of a measurement: resumable log, statistics over contexts, table and provenance."""

import argparse
import json
import platform
import statistics
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ...kernels.provenance import installed_version, package_commit

Record = dict[str, Any]


class RecordLog:
    """Records by key, in memory and, if there is a file, one JSON line each, so that a run can be resumed.

    Parameters
    ----------
    path : Path, optional
        File to read earlier records from and to append new ones to.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._records: dict[str, Record] = {}
        if path is not None and path.exists():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                self._read(line, number)

    def _read(self, line: str, number: int) -> None:
        try:
            entry = json.loads(line)
            self._records[_canonical(entry["key"])] = entry["record"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path}, line {number} is not a record: delete that line") from error

    def get(self, key: Record) -> Record | None:
        """The record of a key, or None if it is still to be measured."""
        return self._records.get(_canonical(key))

    def add(self, key: Record, record: Record) -> Record:
        """Store a record, in the file too if there is one, and return it."""
        self._records[_canonical(key)] = record
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "record": record}) + "\n")
        return record


def _canonical(key: Record) -> str:
    return json.dumps(key, sort_keys=True)


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """Mean, and its standard error if there are at least two values."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.fmean(values), error


def format_table(rows: list[Record], formats: dict[str, str]) -> str:
    """Align rows below their column names.

    Parameters
    ----------
    rows : list of dict
        One dictionary a row; None and missing values are shown as "-".
    formats : dict
        Column names in order, with the format specification of each.

    Returns
    -------
    str
        The table, numbers to the right and text to the left.
    """
    cells = [
        ["-" if row.get(name) is None else format(row[name], spec) for name, spec in formats.items()] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(list(formats), *cells, strict=True)]
    left = [spec == "" for spec in formats.values()]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in [list(formats), *cells]
    )


def provenance(model: Any, arguments: argparse.Namespace) -> Record:
    """Everything that decides a result and is not in the records: versions, commit, model, options, machine."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": package_commit(),
        "versions": {name: installed_version(name) for name in ("kvzip-press", "kvpress", "transformers", "torch")},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
        "threads": torch.get_num_threads(),
        "model": model.config.name_or_path,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "arguments": {name: _plain(value) for name, value in vars(arguments).items()},
    }


def write_report(path: Path | None, **parts: Any) -> None:
    """Write the parts of a report to a JSON file, if one is wanted."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(parts, indent=1) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
