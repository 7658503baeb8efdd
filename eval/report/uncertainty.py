"""How sure a mean over contexts is, and a difference or a ratio to the full cache on the same contexts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

# Numbers drawn at once
_BLOCK = 1 << 21


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and its standard error if there are at least two values."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.fmean(values), error


def ratio_of_means(values: Sequence[float], bases: Sequence[float]) -> tuple[float | None, float | None]:
    """Ratio of two means over the same contexts and its standard error by linearisation; None where undefined."""
    base = statistics.fmean(bases) if bases else 0.0
    if base == 0:
        return None, None
    ratio = statistics.fmean(values) / base
    _, error = mean_and_error([value - ratio * other for value, other in zip(values, bases, strict=True)])
    return ratio, None if error is None else error / base


def paired_difference(
    values: Sequence[float], bases: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """
    Mean of ``values - bases`` and the bounds of a percentile bootstrap interval of a level over the contexts.

    Both are scores in the same order of contexts: of a press, and of what it is compared with.

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
