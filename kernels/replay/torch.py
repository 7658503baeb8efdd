"""Replay in plain torch, on any device."""

from __future__ import annotations

from functools import partial

import torch

from . import blocked as blocked_replay
from .blocked import Columns

# Larger blocks gain little, smaller ones lose parallel work
_BLOCK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 24}


class TorchColumnScores:
    """See :class:`kvzip_press.kernels.replay.blocked.ColumnScores`."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        fill = -torch.inf if columns.reduction == "logit" else 0.0
        shape = (columns.members, columns.first_own - columns.anchor)
        self._scores = torch.full(shape, fill, dtype=columns.dtype, device=columns.device)
        self._buffer = torch.empty(0, dtype=columns.dtype, device=columns.device)

    @staticmethod
    def block_elements(device: torch.device) -> int:
        """Logits of a block of rows."""
        return _BLOCK_ELEMENTS.get(device.type, _BLOCK_ELEMENTS["cuda"])

    def visit(self, logits: torch.Tensor, first_row: int, lse: torch.Tensor | None) -> torch.Tensor:
        """Take a block of rows into account."""
        columns = self._columns
        rows, keys = logits.shape[1:]
        if columns.softcap is not None:
            logits.div_(columns.softcap).tanh_().mul_(columns.softcap)
        future = torch.ones(rows, rows, dtype=torch.bool, device=columns.device).triu_(1)
        logits[..., keys - rows :].masked_fill_(future, -torch.inf)
        if columns.first_visible is not None:
            oldest = columns.first_visible[first_row : first_row + rows].unsqueeze(-1)
            logits.masked_fill_(torch.arange(keys, device=columns.device) < oldest, -torch.inf)
        if self._buffer.numel() < logits.numel():
            self._buffer = torch.empty_like(logits).view(-1)
        weights = torch.softmax(logits, dim=-1, out=self._buffer[: logits.numel()].view(logits.shape))
        if lse is not None:
            lse.copy_(logits.amax(dim=-1) - weights.amax(dim=-1).log())
        scored = (logits if columns.reduction == "logit" else weights)[..., columns.anchor : columns.first_own]
        if columns.row_weight is not None:
            factor = columns.row_weight[:, first_row : first_row + rows]
            scored = scored * factor.repeat_interleave(columns.members // len(factor), dim=0).unsqueeze(-1)
        if columns.reduction in ("max", "logit"):
            torch.maximum(self._scores, scored.amax(dim=1), out=self._scores)
        elif columns.reduction == "sum_of_squares":
            self._scores += torch.einsum("mrc,mrc->mc", scored, scored)
        else:
            self._scores += scored.sum(dim=1)
        return weights

    def result(self) -> torch.Tensor:
        """Scores of each query head, shape (members, columns)."""
        return self._scores


replay_attention = partial(blocked_replay.replay_attention, TorchColumnScores)
replay_scores = partial(blocked_replay.replay_scores, TorchColumnScores)
