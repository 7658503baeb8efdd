"""What is measured: a case with its variants side by side, and which of their ratios have a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..backends import decode_module, replay_module

KEPT = 0.3
_LEAST, _GREATEST = 0.05, 0.6
QUANTITIES = ("time", "speed", "memory", "bandwidth")


class SkippedError(Exception):
    """A case that can't be measured here, and why."""


@dataclass(frozen=True)
class Shape:
    """KV heads of a layer, query heads of each, and channels of a head."""

    num_kv_heads: int
    group: int
    head_dim: int

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group

    def __str__(self) -> str:
        return f"{self.num_kv_heads} x {self.head_dim} (G {self.group})"


@dataclass(frozen=True)
class Variant:
    """
    One way to do what a case asks for, or a bound on it.

    Parameters
    ----------
    what : str
        Name, unique in its case.
    run : callable
        What is timed.
    backend : str
        What runs: a kernel backend, or ``"torch"``, ``"transformers"``.
    kept : float, optional
        Kept fraction of the context.
    nbytes : int, optional
        Bytes that one call must read (of a copy: read and write).
    calls : int
        Calls a sample. More than one are made in a row, and their mean is the sample.
    expected : callable, optional
        The right results by name, float64 or float32; None where there is nothing to compare (a bound, or a result
        that another variant of the case compares).
    dtype : torch.dtype, optional
        In which it multiplies, which decides the tolerance; by default the type of the case.
    check : callable, optional
        Its results in the order of ``expected``, by default those of ``run``.
    extra_memory : callable, optional
        Measures the peak bytes of a call above its input, None where that is not possible.
    """

    what: str
    run: Callable[[], Any]
    backend: str = "torch"
    kept: float | None = None
    nbytes: int | None = None
    calls: int = 1
    expected: Callable[[], dict[str, torch.Tensor]] | None = None
    dtype: torch.dtype | None = None
    check: Callable[[], Any] | None = None
    extra_memory: Callable[[], int | None] | None = None


@dataclass(frozen=True)
class Comparison:
    """
    A variant against its baseline.

    Parameters
    ----------
    what : str
        The variant.
    baselines : tuple[str, ...]
        Variants of the same case, of which the fastest counts.
    quantity : str
        ``"time"`` or ``"memory"``: the variant's by the baseline's, at most ``target``. ``"speed"``: the baseline's
        time by the variant's, or ``"bandwidth"``: the variant's bytes a second by the baseline's, at least ``target``.
    target : float, optional
        None where the ratio is of interest only.
    """

    what: str
    baselines: tuple[str, ...]
    quantity: str
    target: float | None = None

    def __post_init__(self) -> None:
        if self.quantity not in QUANTITIES:
            raise ValueError(f"quantity must be one of {', '.join(QUANTITIES)}, got {self.quantity!r}")

    @property
    def at_least(self) -> bool:
        """Whether more is better."""
        return self.quantity in ("speed", "bandwidth")


@dataclass
class Case:
    """
    A case that is ready to run.

    Parameters
    ----------
    variants : list[Variant]
        Timed in turn.
    comparisons : list[Comparison]
        Their ratios.
    bandwidth : str, optional
        The variant whose bytes a second are what a share of the bandwidth refers to.
    warm_up : int
        Rounds that are not counted.
    host_clock : bool
        On a GPU: take the host's time from one idle device to the next, since the host's work counts.
    """

    variants: list[Variant]
    comparisons: list[Comparison]
    bandwidth: str | None = None
    warm_up: int = 1
    host_clock: bool = False


@dataclass(frozen=True)
class CasePlan:
    """
    A case to come: what describes it, and how to build it.

    Parameters
    ----------
    suite, name : str
        Names; the name is unique in the suite.
    shape : Shape
        Of a layer.
    dtype : torch.dtype
        Of the queries.
    context : int
        Tokens.
    rounds : int
        Samples of each variant.
    required_bytes : int
        Memory of the device that building and running it takes, roughly.
    build : callable
        Makes the case; raises :class:`SkippedError` if it can't be measured here.
    """

    suite: str
    name: str
    shape: Shape
    dtype: torch.dtype
    context: int
    rounds: int
    required_bytes: int
    build: Callable[[], Case]


def head_lengths(num_kv_heads: int, context: int, kept: float = KEPT) -> list[int]:
    """
    Kept pairs of each head: uneven, from 5 to 60 % of the context, ``kept`` of it on average.

    A single head keeps ``kept``.
    """
    if num_kv_heads == 1:
        return [round(kept * context)]
    steps = [head / (num_kv_heads - 1) for head in range(num_kv_heads)]

    def lengths(power: float) -> list[int]:
        return [round(context * (_LEAST + (_GREATEST - _LEAST) * step**power)) for step in steps]

    total, low, high = round(kept * num_kv_heads * context), 1e-3, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lengths(middle)) > total else (low, middle)
    found = lengths(high)
    found[-1] += total - sum(found)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Name without the module."""
    return str(dtype).removeprefix("torch.")


def thousands(context: int) -> str:
    """A context length as it is called: 8K for 8192."""
    return f"{context // 1024}K" if context % 1024 == 0 else str(context)


def decode_backend(backend: str, query: torch.Tensor, packed_dtype: torch.dtype, quantized: bool) -> str:
    """The backend that decodes such input, ``"auto"`` resolved."""
    module = decode_module(backend, query.device, query.dtype, packed_dtype, query.shape[-1], quantized)
    return _module_backend(module.__name__)


def replay_backend(backend: str, query: torch.Tensor) -> str:
    """The backend that replays such input, ``"auto"`` resolved."""
    return _module_backend(replay_module(backend, query.device, query.dtype, query.shape[-1]).__name__)


def _module_backend(name: str) -> str:
    return name.rpartition(".")[2].partition("_")[0]


def randn(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Normally distributed numbers, the same in every run on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype, device=device)
