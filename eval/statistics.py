"""Means over contexts, their errors, and differences to the full cache on the same contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvzip_press.eval.report import mean_and_error

__all__ = ["mean_and_error", "paired_difference", "relative_score"]

# Numbers drawn at once
_BLOCK = 1 << 21


def paired_difference(
    values: Sequence[float], bases: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """
    Mean difference of scores of the same contexts, with a percentile bootstrap interval over the contexts.

    Parameters
    ----------
    values, bases : Sequence of float
        Scores of a press and of what it is compared with, in the same order of contexts.
    level : float
        Of the interval.
    resamples : int
        Bootstrap samples.
    seed : int
        Of the resampling.

    Returns
    -------
    tuple of float
        Mean of ``values - bases``, and the bounds of its interval.

    Raises
    ------
    ValueError
        If there are no contexts, not as many on both sides, or the level is not in (0, 1).
    """
    if len(values) != len(bases) or not len(values):
        raise ValueError(f"paired scores of the same contexts are needed, got {len(values)} and {len(bases)}")
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")
    differences = np.asarray(values, dtype=float) - np.asarray(bases, dtype=float)
    rng = np.random.default_rng(seed)
    block = max(1, _BLOCK // len(differences))
    means = []
    for start in range(0, resamples, block):
        drawn = rng.integers(0, len(differences), (min(block, resamples - start), len(differences)))
        means.append(differences[drawn].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(differences.mean()), float(low), float(high)


def relative_score(scores: Mapping[str, float], full: Mapping[str, float]) -> tuple[float | None, int]:
    """
    Score divided by the full cache's, averaged over tasks (arXiv 2505.23416, section 5.2).

    Parameters
    ----------
    scores, full : Mapping of str to float
        Mean score of each task, of a press and of the full cache.

    Returns
    -------
    tuple
        The average, None if no task can be compared, and the number of tasks in it. Tasks that the full cache was not
        asked, or that it got nothing right of, can't.
    """
    ratios = [score / full[task] for task, score in scores.items() if full.get(task)]
    return (math.fsum(ratios) / len(ratios), len(ratios)) if ratios else (None, 0)
