"""Results before times: every variant's output against the reference on the very input that is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .case import Case

LSE = "log-sum-exp"
# Largest distance of a row from the right one, by that row's length. What is usual in the type: 16-bit forms round
# logits, weights or output to 8 or 11 bits.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class WrongOutputError(Exception):
    """A variant's output is not the reference's."""


def row_error(result: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """
    Largest distance of a row of ``result`` from that of ``expected``, by the length of the latter.

    Parameters
    ----------
    result, expected : torch.Tensor
        Same number of elements; the shape of ``expected`` counts, with rows along its last dimension. Elements that
        are equal, infinities included, are at no distance.
    floor : float
        Rows count as no shorter than this.
    """
    expected = expected.double()
    result = result.detach().reshape(expected.shape).to(expected)
    difference = torch.where(result == expected, 0.0, result - expected)
    lengths = torch.where(expected.isinf(), 0.0, expected).norm(dim=-1).clamp_min(floor)
    distances = difference.norm(dim=-1)
    errors = torch.where(distances == 0, 0.0, distances / lengths)
    return float(errors.max()) if errors.numel() else 0.0


def verify_results(name: str, results: Any, expected: Mapping[str, torch.Tensor], dtype: torch.dtype) -> float:
    """
    Compare results with the right ones.

    Parameters
    ----------
    name : str
        Named by the error.
    results : torch.Tensor or tuple of torch.Tensor
        In the order of ``expected``; what is missing at the end is not compared.
    expected : Mapping[str, torch.Tensor]
        The right ones by name.
    dtype : torch.dtype
        Decides the tolerance.

    Returns
    -------
    float
        The largest error.

    Raises
    ------
    WrongOutputError
        If a result is further off than the tolerance, NaN, or of another size.
    """
    tolerance = TOLERANCES[dtype]
    worst = 0.0
    results = (results,) if isinstance(results, torch.Tensor) else results
    for (part, right), result in zip(expected.items(), results, strict=False):
        if result.numel() != right.numel():
            raise WrongOutputError(
                f"{name}: {part} has shape {tuple(result.shape)}, the reference {tuple(right.shape)}; nothing was timed"
            )
        # A log-sum-exp near 0 is no more exact than one near 1
        error = row_error(result, right, floor=1.0 if part == LSE else 0.0)
        if not error <= tolerance:
            raise WrongOutputError(
                f"{name}: in {part} a row is off the reference by {error:.2g} of its length, above {tolerance:g}; "
                "nothing was timed"
            )
        worst = max(worst, error)
    return worst


def verify(name: str, case: Case, dtype: torch.dtype, stage: Callable[[str], Any]) -> None:
    """
    Compare every variant of a case that has something to compare with.

    Raises
    ------
    WrongOutputError
        If one is wrong; the message names it.
    """
    for variant in case.variants:
        if variant.expected is not None:
            stage(f"checking {variant.what}")
            results = (variant.check or variant.run)()
            described = f"{name}, {variant.what} ({variant.backend})"
            verify_results(described, results, variant.expected(), variant.dtype or dtype)
