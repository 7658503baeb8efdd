"""Rows of published data: from the hub, or from parquet and jsonl files on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import GENERATED, HUB, Request, Task
from .rows import Rows

# By suffix, the reader of `datasets`; in a folder with both, the first wins.
READERS = {".parquet": "parquet", ".jsonl": "json"}


@dataclass(frozen=True)
class Published:
    """Where data are published, and what they must hold."""

    # path, split: as in `datasets.load_dataset`
    path: str
    split: str
    columns: tuple[str, ...]  # needed columns
    # where the data are in a folder on this machine: patterns without suffix, tried in this order
    files: tuple[str, ...] = ("*",)
    # name, data_dir, data_files: as in `datasets.load_dataset`
    name: str | None = None
    data_dir: str | None = None
    data_files: str | None = None


def wants_generated(task: Task, request: Request) -> bool:
    """Whether samples are to be generated rather than read; ValueError if the task does not offer the source."""
    if request.source == GENERATED:
        if GENERATED not in task.sources:
            raise ValueError(f"{task.name}: can't be generated: give --source {HUB}, or a local folder or file")
        return True
    if HUB not in task.sources:
        raise ValueError(f"{task.name}: can only be generated: leave --source {request.source} out")
    return False


def read_rows(task_name: str, source: str, published: Published) -> Rows:
    """
    Read at least one row of published data with the needed columns, from the hub or the path of a folder or file.

    Raises
    ------
    FileNotFoundError
        If there are no such files.
    ValueError
        If there are no rows, if they can't be read, or if columns are missing; they are named.
    """
    if source == HUB:
        options = {"name": published.name, "data_dir": published.data_dir, "data_files": published.data_files}
        given = {option: value for option, value in options.items() if value is not None}
        rows = _load(task_name, published.path, published.path, split=published.split, **given)
    else:
        files = find_files(task_name, Path(source), published.files)
        place = str(files[0]) if len(files) == 1 else source
        paths = [str(file) for file in files]
        rows = _load(task_name, place, READERS[files[0].suffix], data_files=paths, split="train")
    if missing := [column for column in published.columns if column not in rows.column_names]:
        raise ValueError(
            f"{task_name}: the data of {source} lack the columns {', '.join(missing)}; "
            f"they have {', '.join(rows.column_names)}"
        )
    return Rows(task_name, rows)


def _load(task_name: str, place: str, path: str, **options: Any) -> Any:
    import datasets

    try:
        with _silence():
            rows = datasets.load_dataset(path, **options)
    # An empty file ends in StopIteration, a damaged one in several kinds of ValueError.
    except (datasets.exceptions.DatasetGenerationError, StopIteration, ValueError) as error:
        reason = str(error.__cause__ or error).split("\n")[0]
        raise ValueError(
            f"{task_name}: {place} has no rows or can't be read{reason and f' ({reason})'}: correct or replace it"
        ) from error
    if not len(rows):
        raise ValueError(f"{task_name}: {place} has no rows: correct or replace it")
    return rows


@contextmanager
def _silence() -> Iterator[None]:
    """Keep `datasets` from showing its progress, and from logging errors that are raised as well."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    disabled, verbosity = are_progress_bars_disabled(), logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    if not disabled:
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if not disabled:
            enable_progress_bars()


def find_files(task_name: str, path: Path, patterns: Iterable[str]) -> list[Path]:
    """Files with data below a folder, all of one kind and sorted, or the file itself."""
    if path.is_file():
        if path.suffix not in READERS:
            raise ValueError(f"{task_name}: {path} must be one of {', '.join(READERS)}")
        return [path]
    for pattern in patterns:
        for suffix in READERS:
            if files := sorted(path.glob(pattern + suffix)):
                return files
    wanted = " or ".join(pattern + suffix for pattern in patterns for suffix in READERS)
    raise FileNotFoundError(f"{task_name}: no data in {path}, which should hold {wanted}")
