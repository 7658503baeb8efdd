"""What the page plots: the axes of each plot, and for each setting its points, reference lines and table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .cells import FULL, Average, Cell
from .format import Table, percent, with_error
from .summary import Summary
from .tables import counted, matrix, relative_table, score_table

COSTS = {
    "cache_bytes": "Bytes of the cache",
    "compression": "Prefill and compression",
    "token": "Time of an answer's token",
}
# How far above its axis an error bar may reach
OVER = 0.05
Plot = dict[str, Any]
# Of a setting; None where it has nothing to show.
View = dict[str, Any] | None


def all_plots(summary: Summary) -> list[Plot]:
    """The relative average, a plot for each task, and one for each cost."""
    settings, kept, score = summary.settings, "kept fraction", "relative average"
    top = max([1.0, *(average.relative + (average.error or 0) - OVER for average in summary.averages)])
    views = [_average_view(summary, setting) for setting in settings]
    plots = [_plot("average", "Share of the full cache's score", kept, score, views, top=top)]
    for number, task in enumerate(summary.tasks):
        views = [_task_view(summary, setting, task) for setting in settings]
        measure = summary.measures.get(task, "score")
        plots.append(_plot("tasks", summary.title_of(task), kept, measure, views, top=1, task=number))
    for cost, title in COSTS.items():
        views = [_cost_view(summary, setting, cost) for setting in settings]
        right = max([1.2, *(point["x"] for view in views if view for point in view["points"])])
        plots.append(_plot("cost", title, "x full cache", score, views, top=top, right=right))
    return plots


def _plot(section: str, title: str, x_label: str, y_label: str, views: list[View], **more: float) -> Plot:
    return {"section": section, "title": title, "xLabel": x_label, "yLabel": y_label, "views": views, **more}


def _average_view(summary: Summary, setting: str) -> View:
    points = []
    for average in summary.averages_of(setting):
        tasks = f"{average.tasks} of {counted(len(summary.tasks), 'task', 'tasks')}"
        told = [_relative(average), f"really kept {percent(average.kept)}, {tasks}"]
        points.append(_point(summary, average, average.kept, average.relative, average.error, told))
    # The section says the table's note once for all its figures.
    table = replace(relative_table(summary, setting), note="")
    return _view(points, table, y=1, label="full cache") if points else None


def _cost_view(summary: Summary, setting: str, name: str) -> View:
    points, texts = [], {}
    for average in summary.averages_of(setting):
        cost = average.cost[name]
        if cost is not None:
            texts[average.press, average.ratio] = f"{cost:.2f} x"
            told = [f"{cost:.2f} x the full cache's", _relative(average)]
            points.append(_point(summary, average, cost, average.relative, average.error, told))
    return _view(points, matrix(summary, texts), x=1, y=1, label="full cache") if points else None


def _task_view(summary: Summary, setting: str, task: str) -> View:
    cells = summary.cells_of(setting, task)
    points, full = [], {}
    for cell in cells:
        told = [f"score {with_error(cell.score, cell.error)}, n {cell.samples}", f"really kept {percent(cell.kept)}"]
        if cell.difference:
            told.append("minus full {:.3f} [{:.3f}, {:.3f}]".format(*cell.difference))
        if cell.press == FULL:
            full = {"y": cell.score, "e": cell.error, "label": f"full cache {cell.score:.2f}"}
        else:
            points.append(_point(summary, cell, cell.kept, cell.score, cell.error, told))
    contexts = counted(max((cell.samples for cell in cells), default=0), "context", "contexts")
    return _view(points, score_table(summary, setting, task), about=contexts, **full) if cells else None


def _relative(average: Average) -> str:
    return f"relative average {with_error(average.relative, average.error)}"


def _point(
    summary: Summary, found: Cell | Average, x: float, y: float, error: float | None, told: Sequence[str]
) -> dict[str, Any]:
    press = summary.presses.index(found.press)
    told = [f"{found.press} at {found.ratio:g}", *told]
    return {"press": press, "ratio": found.ratio, "x": x, "y": y, "e": error, "told": told}


def _view(points: list[dict[str, Any]], table: Table, about: str = "", **reference: Any) -> View:
    return {"points": points, "table": vars(table), "about": about, "reference": reference or None}
