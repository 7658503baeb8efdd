"""Decode time by context length, a line a variant, with the bound that reading the kept bytes once sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .decode import COPY, FULL_FLASH, FULL_GQA, FULL_GROUPED, FULL_KERNEL, INT4, INT8, KEPT_FLASH, KEPT_KERNEL, READ

# Full caches in greys, compressed ones in colours; (colour, marker)
_STYLES = {
    FULL_GROUPED: ("#7f7f7f", "o"),
    FULL_GQA: ("#a5a5a5", "^"),
    FULL_FLASH: ("#c7c7c7", "v"),
    FULL_KERNEL: ("#404040", "s"),
    KEPT_KERNEL: ("#d95f02", "o"),
    KEPT_FLASH: ("#e7a977", "v"),
    INT8: ("#1b7837", "s"),
    INT4: ("#2166ac", "D"),
}
_BOUND = "bound: reading 30 % once"
_PANEL = (4.6, 3.8)  # inches
_LEGEND = 0.5


def plot_decode(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """
    Write a plot with a panel for each shape and type.

    Parameters
    ----------
    rows : Iterable[Mapping[str, Any]]
        Rows of the CSV; those of other suites, and of cases that were skipped, are left out.
    path : Path
        The image; its ending names the format.

    Raises
    ------
    ValueError
        If there is nothing to plot.
    """
    panels = _panels(rows)
    if not panels:
        raise ValueError("no decode case was measured: there is nothing to plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = sorted({shape for shape, _ in panels})
    dtypes = sorted({dtype for _, dtype in panels}, reverse=True)
    size = (_PANEL[0] * len(dtypes), _PANEL[1] * len(shapes) + _LEGEND)
    figure, axes = pyplot.subplots(len(shapes), len(dtypes), figsize=size, squeeze=False, sharex=True, sharey="row")
    for (shape, dtype), lines in panels.items():
        axis = axes[shapes.index(shape)][dtypes.index(dtype)]
        _draw(axis, lines)
        heads, group, head_dim = shape
        axis.set_title(f"{heads} KV heads x {head_dim}, {group} query heads each, {dtype}", fontsize=10)
    for column in axes[-1]:
        column.set_xlabel("context length (tokens)")
    for line in axes:
        line[0].set_ylabel("one token, one layer (ms)")
    entries = {
        name: handle for axis in axes.flat for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), loc="lower center", ncols=4, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, _LEGEND / size[1], 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


Panels = dict[tuple[tuple[int, int, int], str], dict[str, dict[int, float]]]


def _panels(rows: Iterable[Mapping[str, Any]]) -> Panels:
    """Milliseconds by shape and type, variant and context length."""
    panels: Panels = {}
    for row in rows:
        if row["suite"] != "decode" or not row.get("p50_ms"):
            continue
        shape = (int(row["num_kv_heads"]), int(row["group"]), int(row["head_dim"]))
        lines = panels.setdefault((shape, row["dtype"]), {})
        context = int(row["context"])
        if row["what"] in _STYLES:
            lines.setdefault(row["what"], {})[context] = float(row["p50_ms"])
        if row["what"] == READ:
            lines.setdefault(_BOUND, {})[context] = float(row["p50_ms"])
        elif row["what"] == KEPT_KERNEL and row.get("bandwidth_share"):
            # What the copy's bytes a second leave for the kept bytes
            lines.setdefault(COPY, {})[context] = float(row["p50_ms"]) * float(row["bandwidth_share"])
    for lines in panels.values():
        copied = lines.pop(COPY, {})
        lines.setdefault(_BOUND, copied)
    return panels


def _draw(axis: Any, lines: Mapping[str, Mapping[int, float]]) -> None:
    from matplotlib.ticker import LogLocator

    for name, (colour, marker) in _STYLES.items():
        if name in lines:
            contexts = sorted(lines[name])
            times = [lines[name][context] for context in contexts]
            axis.plot(contexts, times, label=name, color=colour, marker=marker, markersize=4, linewidth=1.5)
    contexts = sorted(lines.get(_BOUND, {}))
    times = [lines[_BOUND][context] for context in contexts]
    axis.plot(contexts, times, label=_BOUND, color="black", linestyle="--", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xticks(contexts, [f"{context // 1024}K" if context % 1024 == 0 else str(context) for context in contexts])
    axis.minorticks_off()
    axis.tick_params(labelleft=True, labelsize=9)
    axis.grid(alpha=0.25)
