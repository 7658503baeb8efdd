"""Selectors: which pairs stay, given their scores and how many may."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class HeadTable(Protocol):
    """Scores of whole heads, as :class:`kvzip_press.HeadScores` holds them: shape (num_layers, num_kv_heads)."""

    scores: torch.Tensor

    def check_model(self, model: Any) -> None:
        """Refuse, with a ValueError, a model that they don't fit."""


@dataclass(frozen=True)
class Allowance:
    """
    How much of a context may stay: a fraction of its pairs, or a number of tokens per head on average.

    Exactly one of the two is given.
    """

    ratio: float | None = None
    budget: int | None = None

    def count(self, units: int, tokens: int) -> int:
        """Return how many of ``units`` (pairs or heads) of a context of ``tokens`` tokens stay, exactly."""
        if self.budget is None:
            assert self.ratio is not None
            return round(self.ratio * units)
        if tokens <= self.budget:
            return units
        return round(units * self.budget / tokens)


def keep_top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """
    Boolean mask (n,) of exactly the ``count`` highest of the scores (n,); among equal ones the first are kept.

    Raises
    ------
    ValueError
        If a score is NaN.
    """
    if torch.isnan(scores).any():
        raise ValueError("scores contain NaN: the model's attention overflowed; load the model in bfloat16 or float32")
    n = len(scores)
    if count <= 0 or count >= n:
        return torch.full((n,), count > 0, dtype=torch.bool, device=scores.device)
    # The smaller side of the threshold. Not kthvalue, which torch counts among CUDA's nondeterministic operations
    if 2 * count <= n:
        threshold = scores.topk(count, sorted=False).values.min()
    else:
        threshold = scores.topk(n - count + 1, largest=False, sorted=False).values.max()
    keep = scores > threshold
    ties = (scores == threshold).nonzero().flatten()
    keep[ties[: count - int(keep.sum())]] = True
    return keep


def _by_position(scores: torch.Tensor) -> torch.Tensor:
    """Flatten (..., n) so that equal scores come in the order of their positions."""
    return scores.movedim(-1, 0).flatten()


def _from_position(flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return flat.view(shape[-1], *shape[:-1]).movedim(0, -1)


def select_pair(scores: torch.Tensor, allowance: Allowance) -> torch.Tensor:
    """One threshold over the whole model: layers and heads share the budget."""
    count = allowance.count(scores.numel(), scores.shape[-1])
    return _from_position(keep_top(_by_position(scores), count), scores.shape)


def select_pair_layer(scores: torch.Tensor, allowance: Allowance) -> torch.Tensor:
    """Give each layer the same budget, shared by its heads."""
    return torch.stack([select_pair(layer, allowance) for layer in scores])


def select_pair_uniform(scores: torch.Tensor, allowance: Allowance) -> torch.Tensor:
    """Give each head the same budget."""
    count = allowance.count(scores.shape[-1], scores.shape[-1])
    heads = scores.reshape(-1, scores.shape[-1])
    return torch.stack([keep_top(head, count) for head in heads]).view(scores.shape)


def select_heads(head_scores: torch.Tensor, allowance: Allowance, tokens: int) -> torch.Tensor:
    """
    Keep whole heads of a context of so many tokens.

    Scores and the boolean mask have shape (num_layers, num_kv_heads); ties go to the lower layer, then the lower head.
    """
    flat = head_scores.flatten()
    return keep_top(flat, allowance.count(flat.numel(), tokens)).view(head_scores.shape)


# Level -> selector of pairs: scores [num_layers, num_kv_heads, n] float32 and allowance -> mask of the same shape
SELECTORS: dict[str, Callable[[torch.Tensor, Allowance], torch.Tensor]] = {
    "pair": select_pair,
    "pair-layer": select_pair_layer,
    "pair-uniform": select_pair_uniform,
}

HEAD_LEVEL = "head"
# All levels by name: a selector of pairs that is registered later is one of them
LEVELS: ChainMap[str, Callable[..., torch.Tensor]] = ChainMap({HEAD_LEVEL: select_heads}, SELECTORS)
