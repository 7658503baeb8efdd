"""
A results folder on the disk.

`samples.jsonl` holds a record, one line of JSON, for each sample under each press and ratio, and survives whatever ends
the run; `run.json` says where the latest of them come from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from ...files import write_atomically
from .record import Record

SAMPLES = "samples.jsonl"
RUN = "run.json"


def sha256(value: Any) -> str:
    """Hash of a text, or of anything that JSON can hold, independent of the order of names."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def read_records(folder: Path | str) -> list[Record]:
    """
    Records of a results folder in the order they were written, the last of each key only.

    FileNotFoundError if there are none, ValueError if a line is damaged. A torn last line, of a run that was killed
    while it wrote, is left out.
    """
    file = Path(folder) / SAMPLES
    if not file.is_file():
        raise FileNotFoundError(f"no {SAMPLES} in {str(folder)!r}: name the folder given to `kvzip-eval run -o`")
    # What follows the last line break was not written to its end
    *lines, _ = file.read_bytes().split(b"\n")
    records = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records[record["key"]] = record
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}, line {number} is not a record: delete that line") from error
    return list(records.values())


class SampleLog:
    """
    The `records` of a folder, by key in the order they were written, to which finished ones are appended.

    The folder is made if missing. A record is on the disk when `add` returns. Several processes may append to a folder.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / SAMPLES
        found = read_records(self.folder) if self.file.exists() else []
        self.records: dict[str, Record] = {record["key"]: record for record in found}

    def add(self, record: Record) -> None:
        """Append a record, replacing an earlier one of the same key."""
        with _lock(self.folder), self.file.open("a+b") as file:
            _drop_torn_line(file)
            file.write(_line(record).encode(errors="replace"))
            file.flush()
            os.fsync(file.fileno())
        self.records[record["key"]] = record

    def replace_all(self, records: Iterable[Record]) -> None:
        """Write these records in place of all others, at once or not at all."""
        kept = {record["key"]: record for record in records}
        with _lock(self.folder):
            write_atomically(self.file, "".join(map(_line, kept.values())))
        self.records = kept


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _drop_torn_line(file: BinaryIO) -> None:
    """Cut off what a killed process left of its last line."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def _lock(folder: Path) -> FileLock:
    return FileLock(folder / ".lock")


def read_run(folder: Path | str) -> Record:
    """Return what `note_run` wrote, empty if there is none; ValueError if the file is damaged."""
    file, run = Path(folder) / RUN, None
    if not file.is_file():
        return {}
    with suppress(ValueError):
        run = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(run, dict):
        raise ValueError(f"{file} is damaged: delete it, the records are elsewhere")
    return run


def note_run(
    folder: Path | str,
    provenance: Record,
    saved: dict[str, int] | None = None,
    left_out: dict[str, str] | None = None,
) -> None:
    """
    Write where the latest records come from: versions, model, machine, arguments.

    To those of earlier runs into the folder are added the sweep's counts, and tasks left out, with the reason.
    """
    path = Path(folder)
    with _lock(path):
        before = read_run(path)
        counts: Counter[str] = Counter(before.get("saved"))
        counts.update(saved)
        missing = {**(before.get("left_out") or {}), **(left_out or {})}
        write_atomically(path / RUN, json.dumps({**provenance, "saved": counts, "left_out": missing}, indent=1) + "\n")
