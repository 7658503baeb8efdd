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
        negative (not checked: a GPU would have to be waited for).
    column_weight : torch.Tensor, optional
        Non-negative factor of each pair, shape (batch_size, num_kv_heads, group, end - start).

    Raises
    ------
    ValueError
        If columns, soft-cap or window are out of range, or there is no such reduction.
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

    def __post_init__(self) -> None:
        if not 0 <= self.anchor <= self.start <= self.end:
            raise ValueError(f"need 0 <= anchor <= start <= end, got {self.anchor}, {self.start}, {self.end}")
        check_softcap(self.softcap)
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, or None for no window; got {self.window}")
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {self.reduction!r}")


def check_softcap(softcap: float | None) -> None:
    """Raise ``ValueError`` unless ``softcap`` is None or positive."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no soft-cap; got {softcap}")
