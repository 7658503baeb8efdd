"""What comes of the samples: rows of the CSV, each variant against its baseline in the same run, a plot."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..backends import dtype_name
from ..provenance import device_name, installed_version, package_commit
from .case import Case, Comparison, Variant
from .decode import COPY, KEPT_KERNEL, READ, ROW

COLUMNS = (
    *("suite", "case", "what", "backend", "dtype", "num_kv_heads", "group", "head_dim", "context", "kept", "rounds"),
    *("p20_ms", "p50_ms", "p80_ms", "bytes_read", "gb_per_s", "bandwidth_share", "peak_extra_mib", "note"),
    *("device", "threads", "torch", "triton", "numba", "python", "commit", "date"),
)
HEADER = ("case", "what", "against", "measure", "its", "baseline's", "ratio", "target", "reached")
_TIME = ("p50_ms", "ms")
_QUANTITIES = {"time": _TIME, "speed": _TIME, "memory": ("peak_extra_mib", "MiB"), "bandwidth": ("gb_per_s", "GB/s")}
BOUND = "bound: reading 30 % once"


def environment(device: torch.device) -> dict[str, Any]:
    """Columns that are the same in every row of a run."""
    versions = {"torch": torch.__version__, **{name: installed_version(name) for name in ("triton", "numba")}}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    machine = {"device": device_name(device), "threads": torch.get_num_threads(), "python": platform.python_version()}
    return {**machine, **versions, "commit": package_commit() or "unknown", "date": date}


def case_row(case: Case, **more: Any) -> dict[str, Any]:
    """What describes a case (``context`` is its length: of a scoring case that of the chunk), and ``more``."""
    row = {"suite": case.suite, "case": case.name, "dtype": dtype_name(case.dtype), "context": case.length}
    return {**row, **vars(case.shape), **more}


def variant_rows(
    case: Case, variants: Sequence[Variant], samples: Mapping[str, Sequence[float]], peaks: Mapping[str, int | None]
) -> list[dict[str, Any]]:
    """One row a variant from its samples in milliseconds and its peak bytes; what was not measured is None."""
    rows = []
    for each in variants:
        p20, p50, p80 = np.percentile(samples[each.what], (20, 50, 80)).round(6).tolist()
        row = case_row(case, what=each.what, backend=each.backend, kept=each.kept, rounds=len(samples[each.what]))
        rate, peak = each.nbytes and each.nbytes / p50 / 1e6, peaks.get(each.what)
        row |= {"p20_ms": p20, "p50_ms": p50, "p80_ms": p80, "bytes_read": each.nbytes, "gb_per_s": rate}
        rows.append({**row, "peak_extra_mib": None if peak is None else round(peak / 2**20, 3)})
    bound = next((row["gb_per_s"] for row, each in zip(rows, variants, strict=True) if each.bound), None)
    return [{**row, "bandwidth_share": row["gb_per_s"] and bound and row["gb_per_s"] / bound} for row in rows]


def compare(
    comparisons: Sequence[Comparison], rows: Sequence[Mapping[str, Any]], verdicts: bool = True
) -> Iterator[tuple[str, ...]]:
    """Lines under :data:`HEADER`: a case's ratios of what was measured, with or without targets and verdicts."""
    by_what = {row.get("what"): row for row in rows}
    for each in comparisons:
        (column, unit), more_is_better = _QUANTITIES[each.quantity], each.quantity in ("speed", "bandwidth")
        own, present = by_what.get(each.what), [by_what[name] for name in each.baselines if name in by_what]
        fastest = min(present, key=lambda row: row["p50_ms"], default=None)
        if own is None or fastest is None or own[column] is None or not fastest[column]:
            continue
        ratio = fastest[column] / own[column] if each.quantity == "speed" else own[column] / fastest[column]
        target, reached = "-", "-"
        if verdicts and each.target is not None:
            target = f"{'>=' if more_is_better else '<='} {each.target:g}"
            reached = "yes" if (ratio >= each.target if more_is_better else ratio <= each.target) else "NO"
        numbers = (f"{_short(row[column])} {unit}" for row in (own, fastest))
        yield own["case"], each.what, fastest["what"], each.quantity, *numbers, f"{_short(ratio)} x", target, reached


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Columns side by side."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


Panels = dict[str, dict[str, dict[int, float]]]


def decode_panels(rows: Iterable[Mapping[str, Any]]) -> Panels:
    """Milliseconds of decoding by layer, variant and context length, with the bound that the kept bytes set."""
    panels: Panels = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["suite"] == "decode" and "what" in row and not row["what"].endswith((READ, COPY, ROW)):
            lines = panels["{num_kv_heads} x {head_dim} (G {group}) {dtype}".format_map(row)]
            lines[row["what"]][row["context"]] = row["p50_ms"]
            if row["what"] == KEPT_KERNEL:
                lines[BOUND][row["context"]] = row["p50_ms"] * row["bandwidth_share"]
    return panels


def plot_decode(panels: Panels, path: Path) -> None:
    """Write a plot with a panel for each layer; the ending of ``path`` names the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels), 4.4), layout="constrained")
    (axes,) = figure.subplots(1, len(panels), squeeze=False)
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for what, times in lines.items():
            style = {"color": "black", "linestyle": "--"} if what == BOUND else {"marker": "o"}
            axis.plot(list(times), list(times.values()), label=what, **style)
        axis.set(title=title, xlabel="context length (tokens)", ylabel="one token, one layer (ms)", yscale="log")
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(lines[BOUND]), [str(context) for context in lines[BOUND]])
        axis.grid(alpha=0.25)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
