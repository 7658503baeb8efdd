"""Which model is measured, and how it is used."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from transformers.utils import logging as transformers_logging

from ... import HeadScores, load_model
from ...kernels.backends import check_backend
from .engine_local import LocalEngine
from .identity import RunIdentity, model_name


@dataclass(frozen=True)
class ModelOptions:
    """A model and how it is used."""

    model: str | None = None  # folder or hub name; the packaged SmolLM2 by default
    # dtype, device: ``"auto"``: bfloat16 on a GPU if there is one, else float32 on the CPU
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "sdpa"  # transformers' implementation
    threads: int | None = None  # of the CPU
    # window, backend, budget, scorer: see :class:`kvzip_press.eval.run.identity.RunIdentity`
    window: int | None = None
    head_scores: str | None = None  # file of head scores
    backend: str = "auto"
    budget: str = "equal"
    scorer: str = "paper"

    def load(self) -> LocalEngine:
        """Load the model into an engine; ValueError if it, the backend, the device or the scores can't be had."""
        check_backend(self.backend)
        logging.getLogger("kvpress").setLevel(logging.ERROR)
        transformers_logging.disable_progress_bar()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        device, dtype = self.device, self.dtype
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        head_scores = None if self.head_scores is None else HeadScores.load(self.head_scores)
        model, tokenizer = load_model(
            self.model, dtype=getattr(torch, dtype), device=device, attn_implementation=self.attention
        )
        if head_scores is not None:
            head_scores.check_model(model)
        used = {name: getattr(self, name) for name in ("backend", "budget", "scorer", "window")}
        return LocalEngine(model, tokenizer, RunIdentity.of(model, model_name(self.model), **used), head_scores)
