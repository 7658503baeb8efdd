"""Rows of the CSV, written as soon as a case is measured."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .case import Case, CasePlan, dtype_name
from .timing import percentiles

MIB = 1 << 20
COLUMNS = (
    "suite",
    "case",
    "what",
    "backend",
    "dtype",
    "num_kv_heads",
    "group",
    "head_dim",
    "context",
    "kept",
    "rounds",
    "p20_ms",
    "p50_ms",
    "p80_ms",
    "bytes_read",
    "gb_per_s",
    "bandwidth_share",
    "peak_extra_mib",
    "note",
    "device",
    "threads",
    "torch",
    "triton",
    "numba",
    "python",
    "commit",
    "date",
)


@dataclass(frozen=True)
class Measurement:
    """
    What one variant took.

    Parameters
    ----------
    p20, p50, p80 : float
        Percentiles of the time of a call, in milliseconds.
    nbytes : int, optional
        Bytes a call must read.
    extra_memory : int, optional
        Peak bytes of a call above its input.
    """

    p20: float
    p50: float
    p80: float
    nbytes: int | None = None
    extra_memory: int | None = None

    @property
    def bytes_per_second(self) -> float | None:
        """At the median time."""
        return None if self.nbytes is None else self.nbytes / self.p50 * 1000


def measurements(
    case: Case, samples: Mapping[str, list[float]], extra_memory: Mapping[str, int | None]
) -> dict[str, Measurement]:
    """Each variant's, by its name."""
    return {
        variant.what: Measurement(
            *percentiles(samples[variant.what]), nbytes=variant.nbytes, extra_memory=extra_memory.get(variant.what)
        )
        for variant in case.variants
    }


def case_rows(plan: CasePlan, case: Case, measured: Mapping[str, Measurement]) -> list[dict[str, Any]]:
    """One row a variant; what was not measured is left out."""
    peak = None if case.bandwidth is None else measured[case.bandwidth].bytes_per_second
    rows = []
    for variant in case.variants:
        result = measured[variant.what]
        rate = result.bytes_per_second
        row: dict[str, Any] = {"what": variant.what, "backend": variant.backend, "rounds": plan.rounds}
        row |= {"p20_ms": _short(result.p20), "p50_ms": _short(result.p50), "p80_ms": _short(result.p80)}
        row |= {"kept": variant.kept, "bytes_read": variant.nbytes}
        if rate is not None:
            row["gb_per_s"] = _short(rate / 1e9)
            row["bandwidth_share"] = None if peak is None else _short(rate / peak)
        if result.extra_memory is not None:
            row["peak_extra_mib"] = _short(result.extra_memory / MIB)
        rows.append(_described(plan, row))
    return rows


def skipped_row(plan: CasePlan, reason: str) -> dict[str, Any]:
    """The row of a case that was not measured."""
    return _described(plan, {"note": f"skipped: {reason}"})


def _described(plan: CasePlan, row: dict[str, Any]) -> dict[str, Any]:
    shape = plan.shape
    described = {"suite": plan.suite, "case": plan.name, "dtype": dtype_name(plan.dtype), "context": plan.context}
    described |= {"num_kv_heads": shape.num_kv_heads, "group": shape.group, "head_dim": shape.head_dim}
    return described | row


def _short(number: float) -> str:
    return f"{number:.6g}"


class CsvFile:
    """
    A CSV that holds every row handed over, whatever happens afterwards; an earlier file of that name is replaced.

    Parameters
    ----------
    path : Path
        The file.
    constants : Mapping[str, str]
        Columns that are the same in every row.
    """

    def __init__(self, path: Path, constants: Mapping[str, str]) -> None:
        self.path = path
        self._constants = constants
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS).writeheader()

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, restval="").writerows({**self._constants, **row} for row in rows)
