"""Samples of time: variants in turn, so that the noise of the machine hits all of them alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from .case import Variant

_FLUSH_BYTES = 256 << 20
# Writes before each sample. Together they also take longer than the host needs to launch what is timed
_FLUSHES = 4


class Timer(Protocol):
    """Takes samples of time."""

    def sample(self, run: Callable[[], Any], calls: int = 1) -> float:
        """Milliseconds of one of ``calls`` calls in a row."""
        ...


class HostTimer:
    """
    The host's clock.

    Parameters
    ----------
    synchronize : callable, optional
        Waits until the device is idle.
    """

    def __init__(self, synchronize: Callable[[], Any] | None = None) -> None:
        self._synchronize = synchronize or (lambda: None)

    def sample(self, run: Callable[[], Any], calls: int = 1) -> float:
        """Milliseconds of one of ``calls`` calls in a row."""
        self._synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        self._synchronize()
        return 1000 * (time.perf_counter() - start) / calls


class CudaTimer:
    """
    The device's clock, with a second-level cache that holds nothing of the input before a single call.

    Calls in a row follow one another as the host launches them, with whatever the cache holds: where they take longer
    than a single one, launching takes longer than running.

    Parameters
    ----------
    make_event : callable
        Makes an event with ``record``, ``synchronize`` and ``elapsed_time``.
    flush : callable
        Writes a buffer larger than the cache.
    """

    def __init__(self, make_event: Callable[[], Any], flush: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._flush = flush

    @classmethod
    def on(cls, device: torch.device) -> CudaTimer:
        """Timer of a CUDA device."""
        buffer = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
        return cls(lambda: torch.cuda.Event(enable_timing=True), buffer.zero_)

    def sample(self, run: Callable[[], Any], calls: int = 1) -> float:
        """Milliseconds of one of ``calls`` calls in a row."""
        begin, end = self._make_event(), self._make_event()
        if calls == 1:
            for _ in range(_FLUSHES):
                self._flush()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        elapsed: float = begin.elapsed_time(end)
        return elapsed / calls


def interleave(
    variants: Sequence[Variant], timer: Timer, rounds: int, warm_up: int, stage: Callable[[str], Any]
) -> dict[str, list[float]]:
    """
    Run each variant once a round, in an order that is drawn anew for each round.

    Parameters
    ----------
    variants : Sequence[Variant]
        What to run.
    timer : Timer
        Takes the samples.
    rounds, warm_up : int
        Counted rounds, and those before them that are not.
    stage : callable
        Told what is done.

    Returns
    -------
    dict[str, list[float]]
        Milliseconds of each round, by the name of the variant.
    """
    samples: dict[str, list[float]] = {variant.what: [] for variant in variants}
    order = random.Random(0)
    for number in range(-warm_up, rounds):
        for variant in order.sample(variants, len(variants)):
            stage(f"round {max(number + 1, 0)}/{rounds}, {variant.what}")
            milliseconds = timer.sample(variant.run, variant.calls)
            if number >= 0:
                samples[variant.what].append(milliseconds)
    return samples


def percentiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile."""
    low, middle, high = np.percentile(samples, (20, 50, 80)).tolist()
    return low, middle, high
