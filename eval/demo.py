"""
The grid of `kvzip-eval demo`: small enough for a laptop, with enough in it to see a curve and its baselines.

With the packaged SmolLM2 on two CPU cores it takes about half an hour. Any other model measures the same grid.
"""

from __future__ import annotations

from kvzip_press.eval.presses import FULL
from kvzip_press.eval.runner import Grid
from kvzip_press.eval.session import find_tasks
from kvzip_press.eval.tasks.base import Task

OURS = ("kvzip",)
BASELINES = ("snapkv", "adakv-snapkv", "expected-attention", "observed-attention")
OUR_RATIOS = tuple(tenths / 10 for tenths in range(1, 11))
BASELINE_RATIOS = (0.3, 0.5)
# Task or family, length in tokens, contexts of each task
PARTS = (("ruler", 1000, 2), ("niah", 500, 11), ("scbench_kv", 700, 2))


def demo_grids() -> list[tuple[list[tuple[Task, bool]], Grid]]:
    """Tasks and their grids: of each ours and the full cache by one prefill and one replay, then the baselines."""
    return [
        (find_tasks([name]), Grid(presses, ratios, lengths=(length,), limit=limit))
        for name, length, limit in PARTS
        for presses, ratios in (((FULL, *OURS), OUR_RATIOS), (BASELINES, BASELINE_RATIOS))
    ]
