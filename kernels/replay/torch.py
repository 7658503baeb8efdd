"""Replay in plain torch, on any device."""

from __future__ import annotations

from functools import partial

import torch

from . import blocked
from .blocked import Columns, ColumnScores

# Larger blocks gain little, smaller ones lose parallel work
_BLOCK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 24}


class TorchColumnScores(ColumnScores):
    """Softmax and reduction in torch."""

    def __init__(self, columns: Columns) -> None:
        super().__init__(columns)
        self._buffer = torch.empty(0, dtype=columns.dtype, device=columns.device)

    @staticmethod
    def block_elements(device: torch.device) -> int:
        """Logits of a block of rows."""
        return _BLOCK_ELEMENTS.get(device.type, _BLOCK_ELEMENTS["cuda"])

    def visit(self, logits: torch.Tensor, first_row: int, lse: torch.Tensor | None) -> torch.Tensor:
        """Take a block of rows into account."""
        columns, scores = self._columns, self._scores[:, 0]
        rows, keys = logits.shape[1:]
        if columns.softcap is not None:
            logits.div_(columns.softcap).tanh_().mul_(columns.softcap)
        future = torch.ones(rows, rows, dtype=torch.bool, device=columns.device).triu_(1)
        logits[..., keys - rows :].masked_fill_(future, -torch.inf)
        if columns.first_visible is not None:
            oldest = columns.first_visible[first_row : first_row + rows].unsqueeze(-1)
            logits.masked_fill_(torch.arange(keys, dtype=torch.int64, device=columns.device) < oldest, -torch.inf)
        if self._buffer.numel() < logits.numel():
            self._buffer = torch.empty(logits.numel(), dtype=columns.dtype, device=columns.device)
        weights = torch.softmax(logits, dim=-1, out=self._buffer[: logits.numel()].view(logits.shape))
        if lse is not None:
            lse.copy_(logits.amax(dim=-1) - weights.amax(dim=-1).log())
        scored = (logits if columns.reduction == "logit" else weights)[..., columns.anchor : columns.first_own]
        if columns.row_weight is not None:
            factor = columns.row_weight[:, first_row : first_row + rows]
            scored = scored * factor.repeat_interleave(columns.members // len(factor), dim=0).unsqueeze(-1)
        if columns.reduction in ("max", "logit"):
            torch.maximum(scores, scored.amax(dim=1), out=scores)
        elif columns.reduction == "sum_of_squares":
            scores += torch.einsum("mrc,mrc->mc", scored, scored)
        elif columns.reduction == "sum":
            scores += scored.sum(dim=1)
        else:
            raise NotImplementedError(f"backend 'torch' has no reduction {columns.reduction!r}")
        return weights


replay_attention = partial(blocked.replay_attention, TorchColumnScores)
