"""Each variant against its baseline in the same run, with the target and whether it is reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .case import Comparison
from .results import MIB, Measurement

_HEADER = ("case", "what", "against", "measure", "its", "baseline's", "ratio", "target", "reached")
_NUMBERS = range(4, 8)


@dataclass(frozen=True)
class Ratio:
    """
    A ratio of two measurements.

    Parameters
    ----------
    case : str
        Name of the case.
    comparison : Comparison
        What is compared.
    baseline : str
        The fastest of the comparison's baselines.
    own, others : float
        Both numbers: milliseconds, MiB or GB/s.
    value : float
        The ratio, as the comparison's quantity says.
    """

    case: str
    comparison: Comparison
    baseline: str
    own: float
    others: float
    value: float

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached, None if there is none."""
        target = self.comparison.target
        if target is None:
            return None
        return self.value >= target if self.comparison.at_least else self.value <= target


def case_ratios(case: str, comparisons: Iterable[Comparison], measured: Mapping[str, Measurement]) -> list[Ratio]:
    """All ratios of a case whose numbers were measured."""
    ratios = []
    for comparison in comparisons:
        present = [name for name in comparison.baselines if name in measured]
        if comparison.what not in measured or not present:
            continue
        baseline = min(present, key=lambda name: measured[name].p50)
        own, others = (_number(measured[name], comparison.quantity) for name in (comparison.what, baseline))
        if own is None or not others:
            continue
        value = others / own if comparison.quantity == "speed" else own / others
        ratios.append(Ratio(case, comparison, baseline, own, others, value))
    return ratios


def _number(measurement: Measurement, quantity: str) -> float | None:
    if quantity == "memory":
        return None if measurement.extra_memory is None else measurement.extra_memory / MIB
    if quantity == "bandwidth":
        rate = measurement.bytes_per_second
        return None if rate is None else rate / 1e9
    return measurement.p50


def format_ratios(ratios: Sequence[Ratio], verdicts: bool = True) -> str:
    """
    A table for the terminal.

    Parameters
    ----------
    ratios : Sequence[Ratio]
        One a line.
    verdicts : bool
        Whether the shapes are those that the targets are for; otherwise targets and verdicts are left out.
    """
    # A case is named once
    above = [None, *(ratio.case for ratio in ratios)]
    shown = ["" if ratio.case == name else ratio.case for ratio, name in zip(ratios, above, strict=False)]
    lines = [_HEADER, *((name, *_cells(ratio, verdicts)) for name, ratio in zip(shown, ratios, strict=True))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(ratio: Ratio, verdicts: bool) -> tuple[str, ...]:
    comparison = ratio.comparison
    unit = {"memory": "MiB", "bandwidth": "GB/s"}.get(comparison.quantity, "ms")
    target, reached = "-", "-"
    if verdicts and comparison.target is not None:
        target = f"{'>=' if comparison.at_least else '<='} {comparison.target:g}"
        reached = "yes" if ratio.reached else "NO"
    numbers = (f"{_short(ratio.own)} {unit}", f"{_short(ratio.others)} {unit}", f"{_short(ratio.value)} x", target)
    return (comparison.what, ratio.baseline, comparison.quantity, *numbers, reached)


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"
