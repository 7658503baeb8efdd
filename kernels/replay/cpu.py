"""Replay on the CPU: the products by torch, and between them one visit of the logits for softmax and scores."""

from __future__ import annotations

from functools import partial

from . import blocked as blocked_replay
from .cpu_softmax import CpuColumnScores

replay_attention = partial(blocked_replay.replay_attention, CpuColumnScores)
replay_scores = partial(blocked_replay.replay_scores, CpuColumnScores)
