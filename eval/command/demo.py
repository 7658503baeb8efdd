"""
The grid of `kvzip-eval demo`: small enough for a laptop, with enough in it to see a curve and its baselines.

With the packaged SmolLM2 on two CPU cores it takes about half an hour. Any other model measures the same grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..presses.registry import FULL
from ..run.grid import Grid, find_tasks

OURS = ("kvzip",)
BASELINES = ("snapkv", "adakv-snapkv", "adakv-expected-attention", "observed-attention")
OUR_RATIOS = tuple(tenths / 10 for tenths in range(1, 11))
BASELINE_RATIOS = (0.3, 0.5)


@dataclass(frozen=True)
class Part:
    """A task or family, tokens of a context, contexts of each task, and the fractions that ours and others keep."""

    task: str
    length: int
    limit: int
    our_ratios: tuple[float, ...] = OUR_RATIOS
    baseline_ratios: tuple[float, ...] = BASELINE_RATIOS


PARTS = (
    Part("ruler", 1000, 2),
    Part("niah", 500, 11),
    # As long as a model of 135M parameters still finds some of the values
    Part("scbench_kv", 700, 2),
    # The window of the packaged model: it finds none of the values there, but shows what time and memory it takes
    Part("scbench_kv", 7000, 1, (0.3,), (0.3,)),
)


def demo_grids() -> list[Grid]:
    """Of each part ours and the full cache, by one prefill and one replay, then the baselines."""
    return [
        Grid(find_tasks([part.task]), presses, ratios, lengths=(part.length,), limit=part.limit)
        for part in PARTS
        for presses, ratios in (((FULL, *OURS), part.our_ratios), (BASELINES, part.baseline_ratios))
    ]
