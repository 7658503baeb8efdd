"""What is measured: a case, its variants side by side, and which of their ratios have a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..backends import dtype_name

KEPT, _LEAST, _GREATEST = 0.3, 0.05, 0.6  # fractions of a context
LSE = "log-sum-exp"
# What is compared with: the specification in float64; on a GPU, since that takes long, the torch form in float32
TRUSTED = {"cpu": "reference", "cuda": "torch"}


@dataclass(frozen=True)
class Shape:
    """KV heads of a layer, query heads of each, and channels of a head."""

    num_kv_heads: int
    group: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_kv_heads} x {self.head_dim} (G {self.group})"


SHAPES = {"cpu": (Shape(3, 3, 64), Shape(8, 4, 128)), "cuda": (Shape(8, 4, 128),)}
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}


@dataclass(frozen=True)
class Case:
    """One layer's heads, type and length on a device; ``length`` is the context to decode from, or the scored chunk."""

    suite: str
    shape: Shape
    dtype: torch.dtype
    length: int
    device: torch.device
    backend: str  # as it was asked for

    @property
    def name(self) -> str:
        """As it is called in tables."""
        size = f"{self.length // 1024}K" if self.length % 1024 == 0 else str(self.length)
        size = size if self.suite == "decode" else f"chunk {self.length}"
        return f"{self.suite} {self.shape} {dtype_name(self.dtype)} {size}"


@dataclass(frozen=True)
class Variant:
    """One way to do what a case asks for, or a bound on it."""

    what: str  # unique in its case
    run: Callable[[], Any]
    backend: str = "torch"  # what runs
    kept: float | None = None  # fraction of the context
    nbytes: int | None = None  # that a call must read (a copy: read and write)
    calls: int = 1  # made in a row; their mean is a sample
    bound: bool = False  # whether the bandwidth of the others is given as a share of this one's
    expected: Callable[[], dict[str, torch.Tensor]] | None = None  # the right results by name, in the order of run's
    dtype: torch.dtype | None = None  # in which it multiplies (that of the case), which decides the tolerance
    peak_memory: Callable[[], int | None] | None = None  # measures a call's peak bytes above its input


@dataclass(frozen=True)
class Comparison:
    """
    A variant against the fastest of its baselines in the same case.

    Of ``"time"`` and ``"memory"`` it takes at most ``target`` times the baseline's. Of ``"speed"`` (the inverse of the
    time) and ``"bandwidth"`` (bytes a second) it reaches at least that much.
    """

    what: str
    baselines: tuple[str, ...]
    quantity: Literal["time", "memory", "speed", "bandwidth"]
    target: float | None = None


def head_lengths(num_kv_heads: int, context: int) -> list[int]:
    """Pairs that each head keeps: uneven, from 5 to about 60 % of the context, 30 % on average (one head: 30 %)."""
    steps, part = np.linspace(0, 1, num_kv_heads), (KEPT - _LEAST) / (_GREATEST - _LEAST)
    power = min(np.linspace(1, 2, 1001), key=lambda power: abs((steps**power).mean() - part))
    lengths: list[int] = np.rint(context * (_LEAST + (_GREATEST - _LEAST) * steps**power)).astype(int).tolist()
    lengths[-1] += round(KEPT * num_kv_heads * context) - sum(lengths)
    return lengths


def require_memory(case: Case, nbytes: int) -> None:
    """Raise ``torch.OutOfMemoryError`` if the device has less left; nothing happens where the system does not tell."""
    if case.device.type == "cuda":
        free = torch.cuda.mem_get_info(case.device)[0]
    else:
        memory = Path("/proc/meminfo")
        lines = memory.read_text().splitlines() if memory.exists() else []
        free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), nbytes)
    if nbytes > free:
        raise torch.OutOfMemoryError(f"needs about {nbytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


def randn(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Normally distributed numbers, the same in every run on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype, device=device)
