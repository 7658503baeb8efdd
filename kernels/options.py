"""What a replay is asked for: one record that every layer hands on and every backend takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

REDUCTIONS = ("max", "sum_of_squares", "sum", "logit")


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """
    Which columns of the context a replay sees and scores, and how.

    Parameters
    ----------
    anchor : int
        Number of leading context columns in the softmax of the score (chat prefix and sinks), at most ``start``.
    start, end : int
        Scored columns of the context: the chunk.
    local : bool
        Attend to the anchor, the chunk and the own keys alone; otherwise to the whole context.
    softmax_scale : float
        Factor of the logits.
    softcap : float, optional
        ``softcap * tanh(logits / softcap)`` replaces the logits; positive.
    window : int, optional
        Sliding window: a token sees the last ``window`` tokens, itself included; at least 1.
    reduction : str
        ``"max"``, ``"sum_of_squares"`` or ``"sum"`` of the softmax weights, or ``"logit"``: maximum of the scaled
        logits.
    row_weight : torch.Tensor, optional
        Factor of each replayed token's weights before the reduction, shape (batch_size, q_len); with ``"max"`` not
        negative.
    column_weight : torch.Tensor, optional
        Non-negative factor of each pair, shape (batch_size, num_kv_heads, group, end - start).
    """

    anchor: int
    start: int
    end: int
    local: bool
    softmax_scale: float
    softcap: float | None = None
    window: int | None = None
    reduction: str = "max"
    row_weight: torch.Tensor | None = None
    column_weight: torch.Tensor | None = None
