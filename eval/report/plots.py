"""What the page plots: the axes of each plot, and for each setting its points, reference lines and table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .cells import FULL, Average, Cell
from .format import Table, percent, with_error
from .summary import Summary
from .tables import counted, matrix, relative_table, score_table

KEPT, RELATIVE = "kept fraction", "relative average"
COSTS = {
    "cache_bytes": "Bytes of the cache",
    "compression": "Prefill and compression",
    "token": "Time of an answer's token",
}
# How far above its axis an error bar may reach
OVER = 0.05
Plot = dict[str, Any]
# What a plot shows of a setting; None where it has nothing to show.
View = dict[str, Any] | None


def all_plots(summary: Summary) -> list[Plot]:
    """The relative average, a plot for each task, and one for each cost."""
    top = max([1.0, *(average.relative + (average.error or 0) - OVER for average in summary.averages)])
    views = [_average_view(summary, setting) for setting in summary.settings]
    plots = [_plot("average", "Share of the full cache's score", KEPT, RELATIVE, top, views)]
    for number, task in enumerate(summary.tasks):
        views = [_task_view(summary, setting, task) for setting in summary.settings]
        measure = summary.measures.get(task, "score")
        plots.append(_plot("tasks", summary.title_of(task), KEPT, measure, 1, views) | {"task": number})
    for cost, title in COSTS.items():
        views = [_average_view(summary, setting, cost) for setting in summary.settings]
        plots.append(_plot("cost", title, "x full cache", RELATIVE, top, views))
    return plots


def _plot(section: str, title: str, x_label: str, y_label: str, top: float, views: list[View]) -> Plot:
    named = {"section": section, "title": title, "xLabel": x_label, "yLabel": y_label}
    return named | {"top": top, "kept": x_label == KEPT, "views": views}


def _average_view(summary: Summary, setting: str, cost: str = "") -> View:
    """Averages by what was really kept, or by a cost as a multiple of the full cache's."""
    points, costs = [], {}
    for average in summary.averages_of(setting):
        x = average.cost[cost] if cost else average.kept
        if x is None:
            continue
        score = f"{RELATIVE} {with_error(average.relative, average.error)}"
        kept = f"really kept {percent(x)}, {average.tasks} of {counted(len(summary.tasks), 'task', 'tasks')}"
        told = [f"{x:.2f} x the full cache's", score] if cost else [score, kept]
        points.append(_point(summary, average, x, average.relative, average.error, told))
        costs[average.press, average.ratio] = f"{x:.2f} x"
    # The note of the relative averages stands above all of them.
    table = matrix(summary, costs) if cost else replace(relative_table(summary, setting), note="")
    return _view(points, table, {"x": 1 if cost else None, "y": 1, "label": "full cache"}) if points else None


def _task_view(summary: Summary, setting: str, task: str) -> View:
    cells, points, full = summary.cells_of(setting, task), [], None
    for cell in cells:
        told = [f"score {with_error(cell.score, cell.error)}, n {cell.samples}", f"really kept {percent(cell.kept)}"]
        if cell.difference:
            told.append("minus full {:.3f} [{:.3f}, {:.3f}]".format(*cell.difference))
        if cell.press == FULL:
            full = {"y": cell.score, "e": cell.error, "label": f"full cache {cell.score:.2f}"}
        else:
            points.append(_point(summary, cell, cell.kept, cell.score, cell.error, told))
    contexts = counted(max((cell.samples for cell in cells), default=0), "context", "contexts")
    return _view(points, score_table(summary, setting, task), full, contexts) if cells else None


def _view(points: list[dict[str, Any]], table: Table, reference: dict[str, Any] | None, about: str = "") -> View:
    return {"points": points, "table": vars(table), "reference": reference, "about": about}


def _point(
    summary: Summary, found: Cell | Average, x: float, y: float, error: float | None, told: Sequence[str]
) -> dict[str, Any]:
    press = summary.presses.index(found.press)
    told = [f"{found.press} at {found.ratio:g}", *told]
    return {"press": press, "ratio": found.ratio, "x": x, "y": y, "e": error, "told": told}
