"""One case: its results against the reference, then memory, then times of the variants in turn."""

from __future__ import annotations

import gc
import random
import timeit
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from ..memory import return_free_memory
from .case import LSE, Case, Variant
from .results import case_row, variant_rows

# Largest distance of a row from the right one, by that row's length. What is usual in the type: 16-bit forms round
# logits, weights or output to 8 or 11 bits.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class WrongOutputError(Exception):
    """A variant's output is not the reference's: nothing of its case is timed."""


def measure(case: Case, suite: Any, rounds: int, with_memory: bool) -> list[dict[str, Any]]:
    """Build, verify and time a case of a suite (a module): its rows of the CSV, or one that says why there are none."""
    on_gpu = case.device.type == "cuda"
    try:
        variants: list[Variant] = suite.variants(case)
        for each in variants:
            if each.expected is not None:
                named = f"{case.name}, {each.what} ({each.backend})"
                verify(named, each.run(), each.expected(), each.dtype or case.dtype)
        peaks = {each.what: each.peak_memory() for each in variants if each.peak_memory and with_memory}
        return variant_rows(case, variants, interleave(variants, rounds, on_gpu), peaks)
    except torch.OutOfMemoryError as error:
        return [case_row(case, note=f"skipped: {' '.join(str(error).split())}")]
    finally:
        gc.collect()
        torch.cuda.empty_cache() if on_gpu else return_free_memory()


def verify(name: str, results: Any, expected: Mapping[str, torch.Tensor], dtype: torch.dtype) -> float:
    """Compare results with the right ones, named and in that order: the largest error, or ``WrongOutputError``."""
    errors = []
    results = (results,) if isinstance(results, torch.Tensor) else results
    for (part, right), result in zip(expected.items(), results, strict=True):
        if result.numel() != right.numel():
            shapes = f"shape {tuple(result.shape)}, the reference {tuple(right.shape)}"
            raise WrongOutputError(f"{name}: {part} has {shapes}; nothing was timed")
        # A log-sum-exp near 0 is no more exact than one near 1
        errors.append(row_error(result, right, floor=1.0 if part == LSE else 0.0))
        if not errors[-1] <= _TOLERANCES[dtype]:
            off = f"{errors[-1]:.2g} of its length, above {_TOLERANCES[dtype]:g}"
            raise WrongOutputError(f"{name}: in {part} a row is off the reference by {off}; nothing was timed")
    return max(errors)


def row_error(result: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Largest distance of a row of ``result`` from that of ``expected``, by the latter's length, at least ``floor``."""
    expected = expected.double()
    result = result.detach().reshape(expected.shape).to(expected)
    # Equal infinities are at no distance
    distances = torch.where(result == expected, 0.0, result - expected).norm(dim=-1)
    lengths = torch.where(expected.isinf(), 0.0, expected).norm(dim=-1).clamp_min(floor)
    errors = torch.where(distances == 0, 0.0, distances / lengths)
    return float(errors.max()) if errors.numel() else 0.0


def interleave(variants: Sequence[Variant], rounds: int, on_gpu: bool) -> dict[str, list[float]]:
    """Milliseconds of a call of each variant, by its name: one sample a round, in an order drawn anew each round."""
    samples: dict[str, list[float]] = {variant.what: [] for variant in variants}
    order = random.Random(0)
    for number in tqdm(range(rounds + 1), desc="rounds", leave=False):
        for variant in order.sample(variants, len(variants)):
            milliseconds = sample(variant, on_gpu)
            if number > 0:  # the first round warms up
                samples[variant.what].append(milliseconds)
    return samples


def sample(variant: Variant, on_gpu: bool) -> float:
    """Milliseconds of a call by the host's clock; on a GPU by its own, where ``do_bench`` flushes its cache before."""

    def run() -> None:
        for _ in range(variant.calls):
            variant.run()

    if not on_gpu:
        return 1000 * timeit.timeit(run, number=1) / variant.calls
    from triton.testing import do_bench

    median: float = do_bench(run, warmup=1, rep=5, return_mode="median")
    return median / variant.calls
