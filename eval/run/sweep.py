"""
One context under many presses and ratios, at the price of few.

A press of kvzip-press scores the full cache: one prefill serves all of them, one replay all ratios, levels and storage
formats of a scorer. The full cache is kept and evicted into copies, one at a time. kvpress's presses compress during
the prefill, so each of their ratios takes a prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any

import kvpress
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from ... import HeadScores, KVzipPress
from ...cache.measure import cache_nbytes
from ...compressor import PrefilledContext
from ...decoding import device_time
from ...models import ModelLayout, language_model, reachable_columns
from ...prompts import PROMPTS, ReplayPrompts
from ...selection import HEAD_LEVEL
from ..choices import BUDGETS
from ..presses.budget import N_SINK, fit_budget, kept_pairs, masked_indices, set_masked_indices
from ..presses.registry import PRESSES, Variant, make_press
from .chat import OpenedContext


@dataclass
class Effort:
    """Prefills and replays done, and those that the same cells would have taken one by one."""

    prefills: int = 0
    replays: int = 0
    prefills_alone: int = 0
    replays_alone: int = 0

    def add(self, other: Effort) -> None:
        """Count those of another part of the run too."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def __str__(self) -> str:
        return (
            f"{self.prefills} prefills and {self.replays} replays; "
            f"one by one it would have been {self.prefills_alone} and {self.replays_alone}"
        )


class PressFailure(Exception):
    """A press of kvpress can't compress this context, or not be asked of it."""


@dataclass(frozen=True)
class SweptCache:
    """The cache of one context under one press at one ratio."""

    cache: Cache  # valid until the next one is asked for
    # kept_pairs, total_pairs: pairs behind the protected first tokens that attention can see, and all of them, in the
    # layers subject to eviction. Presses that evict protected tokens have those subtracted.
    kept_pairs: int
    total_pairs: int
    nbytes: int  # of the storages held
    # `prefill`, `score` and `evict`: what this cell would have taken alone. Presses that compress within the prefill
    # have all of it there.
    seconds: dict[str, float]
    theirs: bool = False  # made by a press of kvpress

    def asking(self) -> AbstractContextManager[None]:
        """Turn errors of a kvpress press that show when its cache is used into :class:`PressFailure`."""
        return _failing() if self.theirs else nullcontext()


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise PressFailure(f"{type(error).__name__}: {error}") from error


class ContextSweep:
    """
    Compresses one context in many ways, and counts up the effort; head scores and backend as in `make_press`.

    With the budget ``"equal"`` kvpress's presses keep as many pairs as kvzip-press's; with ``"plain"`` what they make
    of the fraction.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        context: OpenedContext,
        effort: Effort,
        *,
        budget: str = "equal",
        head_scores: HeadScores | None = None,
        backend: str = "auto",
    ) -> None:
        if budget not in BUDGETS:
            raise ValueError(f"budget must be one of {', '.join(BUDGETS)}, got {budget!r}")
        self.model = model
        self.context = context
        self.effort = effort
        self.budget = budget
        self._options: dict[str, Any] = {"head_scores": head_scores, "backend": backend}
        self._layout = ModelLayout.of(model)
        self._protected = min(max(context.prefix_length, N_SINK), context.num_tokens)
        self._full: Cache | None = None
        self._prefill_seconds = 0.0

    def full(self) -> Cache:
        """The full cache, prefilled when first asked for."""
        if self._full is None:
            start = self._now()
            self._full = DynamicCache(config=self._layout.decoder.config)
            self._prefill(self._layout.decoder, self._full)
            self._prefill_seconds = self._now() - start
        return self._full

    def caches(self, variants: Sequence[Variant]) -> Iterator[tuple[Variant, SweptCache | PressFailure]]:
        """
        Yield each variant with its cache, or with the reason why a press of kvpress could not make it.

        The full cache and kvzip-press's presses come first. The copy of a compressed cache is dropped when the next is
        asked for, the full cache after the last press of kvzip-press.
        """
        ours: dict[tuple, dict[Variant, KVzipPress | None]] = {}
        theirs = {}
        for variant in variants:
            press = make_press(*variant, self.context.chat.tokenizer, **self._options)
            if press is None or isinstance(press, KVzipPress):
                ours.setdefault(_scoring(press), {})[variant] = press
            else:
                theirs[variant] = press
        for scoring, group in ours.items():
            yield from self._our_caches(scoring, group)
        if self._full is not None:
            self._full.layers.clear()
            self._full = None
        for variant, press in theirs.items():
            yield from self._their_cache(variant, press)

    def _our_caches(
        self, scoring: tuple, group: dict[Variant, KVzipPress | None]
    ) -> Iterator[tuple[Variant, SweptCache]]:
        """Score once for presses that have their scoring in common, and evict into a copy for each."""
        full = self.full()
        ids = self.context.ids.to(self.model.device)
        scores, score_seconds = None, 0.0
        for variant, press in group.items():
            self.effort.prefills_alone += 1
            seconds = {"prefill": self._prefill_seconds, "score": 0.0, "evict": 0.0}
            if press is None:
                yield variant, self._swept(full, seconds, None)
                continue
            compressor = self._with_prefix(press).compressor(self.model)
            # The same tensors in layers that can be replaced one by one
            copied = DynamicCache()
            copied.layers = [copy(layer) for layer in full.layers]
            prefilled = PrefilledContext(copied, ids, None, [0], [ids.shape[1]])
            if scoring:
                self.effort.replays_alone += 1
                if scores is None:
                    self.effort.replays += 1
                    start = self._now()
                    scores = compressor.score(prefilled)
                    score_seconds = self._now() - start
                seconds["score"] = score_seconds
            start = self._now()
            heads = None if press.head_scores is None else press.head_scores.scores
            compressor.evict(prefilled, press.allowance(), level=press.level, scores=scores, head_scores=heads)
            seconds["evict"] = self._now() - start
            yield variant, self._swept(copied, seconds, press)
            # Whoever still holds it must not keep its memory
            copied.layers.clear()

    def _their_cache(
        self, variant: Variant, press: kvpress.BasePress
    ) -> Iterator[tuple[Variant, SweptCache | PressFailure]]:
        """Prefill under a press of kvpress."""
        config = self._layout.decoder.config
        self.effort.prefills_alone += 1
        if self.budget == "equal":
            heads = config.num_key_value_heads
            fit_budget(press, variant[1], self.context.num_tokens, self._protected, config.num_hidden_layers, heads)
        # kvpress's pipeline gives its presses a cache without a configuration
        cache: Cache = DynamicCache()
        with eager_attention(self.model) if PRESSES[variant[0]].eager else nullcontext():
            start = self._now()
            try:
                with _failing():
                    self._prefill(self.model.model, cache, press)
                seconds = {"prefill": self._now() - start, "score": 0.0, "evict": 0.0}
                yield variant, self._swept(cache, seconds, press)
            except PressFailure as failure:
                yield variant, failure
            finally:
                cache.layers.clear()
                set_masked_indices(self.model, [None] * config.num_hidden_layers)

    @torch.no_grad()
    def _prefill(self, decoder: Any, cache: Cache, press: kvpress.BasePress | None = None) -> None:
        self.effort.prefills += 1
        with nullcontext() if press is None else press(self.model):
            # By keywords: the hooks of kvpress's presses read those
            decoder(input_ids=self.context.ids.to(self.model.device), past_key_values=cache)

    def _with_prefix(self, press: KVzipPress) -> KVzipPress:
        """Tell the press how long the prefix is: an instruction is no part of the chat template it looks for."""
        prompts = _prompts(press)
        if self.context.chat.style == "kvpress" or prompts.prefix_length is not None:
            return press
        return replace(press, prompts=replace(prompts, prefix_length=self.context.prefix_length))

    def _swept(self, cache: Cache, seconds: dict[str, float], press: kvpress.BasePress | None) -> SweptCache:
        heads = self._layout.num_kv_heads
        tokens = self.context.num_tokens
        held = [reachable_columns(tokens, self._layout.windows[index]) for index in self._layout.evicted]
        total = heads * sum(held)
        protected = heads * sum(max(0, self._protected - (tokens - n)) for n in held)
        seen = total if press is None else kept_pairs(self.model, cache, self._layout.evicted)
        nbytes = cache_nbytes(cache, masked_indices(self.model))
        theirs = not isinstance(press, KVzipPress | None)
        return SweptCache(cache, seen - protected, total - protected, nbytes, seconds, theirs)

    def _now(self) -> float:
        return device_time(self.model.device)


def _scoring(press: KVzipPress | None) -> tuple:
    """What presses have in common that share their scores; empty for those that need none."""
    if press is None or press.level == HEAD_LEVEL or press.ratio == 1:
        return ()
    return (press.scorer, press.replay, press.chunk_size, press.repeat, _prompts(press), press.n_sink, press.backend)


def _prompts(press: KVzipPress) -> ReplayPrompts:
    return PROMPTS[press.prompts] if isinstance(press.prompts, str) else press.prompts


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute its attention weights, for presses that look at them."""
    before = language_model(model).config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
