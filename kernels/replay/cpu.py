"""Replay on the CPU: the products by torch, and between them one visit of the logits for softmax and scores."""

from __future__ import annotations

from functools import partial

from . import blocked
from .cpu_softmax import CpuColumnScores

replay_attention = partial(blocked.replay_attention, CpuColumnScores)
