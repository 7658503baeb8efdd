"""Rows of published data, whose values are checked when they are taken."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True)
class Row:
    """A row of published data; a column may be a path into it, such as ``"answers.text"``."""

    task_name: str  # named in errors
    index: int  # its place in the data, from 0; named in errors
    values: Mapping[str, Any]  # by column

    def get(self, column: str) -> Any:
        """Return whatever is there, or None."""
        value: Any = self.values
        for part in column.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def expect(self, column: str, needed: str, fits: Callable[[Any], bool]) -> Any:
        """
        Return a value that fits; `needed` says in words what that is.

        Raises
        ------
        ValueError
            If it does not fit; task, row, column and what was found are named.
        """
        value = self.get(column)
        if fits(value):
            return value
        top = column.partition(".")[0]
        found = reprlib.repr(value) if value is not None or top == column else f"{top} = {reprlib.repr(self.get(top))}"
        raise ValueError(f"{self.task_name}: row {self.index}: column {column} must be {needed}, got {found}")

    def text(self, column: str, *, empty: bool = False) -> str:
        """Return a text, which may be empty only where that is allowed; ValueError if there is anything else."""
        needed = "a text" if empty else "a text that is not empty"
        return cast(str, self.expect(column, needed, lambda value: is_text(value) or empty and isinstance(value, str)))

    def texts(self, column: str, *, least: int = 1) -> list[str]:
        """Return a list of so many texts or more, none of them empty; ValueError if there is anything else."""
        needed = f"a list of {least} or more texts that are not empty"
        return cast(list[str], self.expect(column, needed, lambda value: are_texts(value) and len(value) >= least))

    def whole(self, column: str) -> int:
        """Return a whole number of at least 1; ValueError if there is anything else."""

        def fits(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= 1

        return cast(int, self.expect(column, "a whole number of at least 1", fits))


@dataclass(frozen=True)
class Rows:
    """Published data."""

    task_name: str  # named in errors
    data: Any  # what is published

    def column(self, name: str) -> list[Any]:
        """Return the values of one column, unchecked, without reading the others."""
        return list(self.data[name])

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Row:
        try:
            return Row(self.task_name, index, self.data[index])
        # Arrow keeps the bytes as they are in the file, and decodes them only now.
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.task_name}: row {index} is not UTF-8 text: {error}") from error

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


def is_text(value: Any) -> bool:
    """Whether a value is a text with more than white space."""
    return isinstance(value, str) and bool(value.strip())


def are_texts(value: Any) -> bool:
    """Whether a value is a list of such texts."""
    return isinstance(value, list) and all(map(is_text, value))
