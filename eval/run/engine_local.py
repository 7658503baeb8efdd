"""The engine in this process: compresses each context in all the ways asked for, asks its questions, and judges."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ... import HeadScores
from ...cache.measure import plain_nbytes
from ...context import longest_context
from ..metrics.registry import Score, metric_of
from ..presses.registry import Variant, check_press, is_ours, make_press
from ..results.answers import PRESS_FAILED, excerpt, key_of, mean_score, question_record
from ..results.folder import sha256
from ..results.record import Record, provenance
from ..tasks.base import Question
from ..tasks.fidelity import METRIC as FIDELITY
from .answer import answer_logprobs, compare, greedy_answer
from .chat import Chat, OpenedContext
from .grid import Unit
from .identity import Identifier, RunIdentity
from .sweep import ContextSweep, Effort, PressFailure, SweptCache
from .warm_up import warm_up

# What a record takes over
RECORDED_OF_RUN = ("dtype", "attention", "device", "budget", "scorer", "version")
RECORDED_OF_UNIT = ("task", "family", "task_version", "source", "imitation", "length", "seed", "protocol", "prompt")


@dataclass
class _Tally:
    """What the rounds of one cell have given so far."""

    kept_pairs: int = 0
    total_pairs: int = 0
    nbytes: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    questions: list[Record] = field(default_factory=list)
    failure: str | None = None

    def measured(self) -> Record:
        """Return what a record says of it: nothing where it failed."""
        if self.failure is not None:
            names = ("kept", "kept_pairs", "total_pairs", "cache_bytes", "seconds", "score")
            return {**dict.fromkeys(names), "questions": [], "skipped": self.failure}
        return {
            "kept": self.kept_pairs / max(1, self.total_pairs),
            "kept_pairs": self.kept_pairs,
            "total_pairs": self.total_pairs,
            "cache_bytes": round(sum(self.nbytes) / len(self.nbytes)),
            "seconds": self.seconds,
            "questions": self.questions,
            "score": mean_score(self.questions),
            "skipped": None,
        }


@dataclass(frozen=True)
class _Round:
    """One context to compress, and the questions then asked of it."""

    opened: OpenedContext
    asked: list[Question]
    ids: list[torch.Tensor]

    @property
    def needed(self) -> int:
        """Tokens of the context, the longest question and its answer."""
        asked = zip(self.asked, self.ids, strict=True)
        return self.opened.num_tokens + max(ids.shape[1] + question.max_new_tokens for question, ids in asked)


class LocalEngine:
    """Measures units with a loaded model, its tokenizer, and head scores for presses of whole heads."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        identity: RunIdentity,
        head_scores: HeadScores | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.identity = identity
        self.identifier = Identifier(identity, head_scores)
        self.window = identity.window or longest_context(model)
        self.provenance = provenance(model, argparse.Namespace())
        self.effort = Effort()
        self.press_options: dict[str, Any] = {"head_scores": head_scores, "backend": identity.backend}
        self._warm: set[str] = set()

    def check(self, names: Sequence[str]) -> None:
        """Refuse presses that can't run before any work: ValueError with the press and the reason."""
        for name in names:
            try:
                check_press(make_press(name, 0.5, self.tokenizer, **self.press_options), self.model)
            except ValueError as error:
                raise ValueError(f"press {name}: {error}") from error

    def close(self) -> None:
        """Nothing to stop."""

    def run(self, units: Iterable[Unit]) -> Iterator[Record]:
        """Measure units, one after another."""
        for unit in units:
            yield from self.measure(unit)

    def measure(self, unit: Unit) -> Iterator[Record]:
        """Yield a record for each of the unit's presses and ratios, as soon as it is finished."""
        rounds, reason = self._rounds(unit)
        tallies = {variant: _Tally(failure=reason) for variant in unit.variants}
        finished: set[Variant] = set()
        if reason is None:
            self._warm_up(unit)
        for number, turn in enumerate(rounds if reason is None else [], start=1):
            sweep = ContextSweep(
                self.model, turn.opened, self.effort, budget=self.identity.budget, **self.press_options
            )
            references = [self._reference(sweep, *asked) for asked in zip(turn.asked, turn.ids, strict=True)]
            # A press that failed on one question is not asked the others
            wanted = [variant for variant, tally in tallies.items() if tally.failure is None]
            for variant, swept in sweep.caches(wanted):
                self._add(tallies[variant], turn, swept, references)
                if number == len(rounds):
                    finished.add(variant)
                    yield self._record(unit, variant, rounds, tallies[variant])
        for variant, tally in tallies.items():
            if variant not in finished:
                yield self._record(unit, variant, rounds, tally)

    def _warm_up(self, unit: Unit) -> None:
        """Leave no compilation to the first cell of a press."""
        presses = {press for press, _ in unit.variants if is_ours(press)} - self._warm
        if presses:
            warm_up(self.model, Chat(self.tokenizer, unit.prompt, unit.instruction), presses, **self.press_options)
            self._warm |= presses

    def _rounds(self, unit: Unit) -> tuple[list[_Round], str | None]:
        """Return the contexts to compress with their questions, and why they can't be, if so."""
        chat = Chat(self.tokenizer, unit.prompt, unit.instruction)
        context, (first, *rest) = unit.sample.context, unit.sample.questions
        if unit.protocol == "aware":
            opened = [(chat.open(context, question), [question]) for question in (first, *rest)]
        elif unit.protocol == "reuse":
            if not rest:
                return [], "the protocol reuse needs contexts with two or more questions"
            opened = [(chat.open(context, first), rest)]
        else:
            opened = [(chat.open(context), [first, *rest])]
        already_read = unit.protocol == "aware"
        rounds = [
            _Round(before, asked, [before.question_ids(question, already_read=already_read) for question in asked])
            for before, asked in opened
        ]
        needed = max(turn.needed for turn in rounds)
        if self.window is not None and needed > self.window:
            return rounds, f"needs {needed} tokens, the model's window has {self.window}"
        return rounds, None

    def _reference(
        self, sweep: ContextSweep, question: Question, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the full cache's answer and its log-probabilities for a question that measures fidelity."""
        if question.metric != FIDELITY:
            return None
        cache, length = sweep.full(), sweep.context.num_tokens
        answer = greedy_answer(self.model, cache, ids, length, question.max_new_tokens)
        answer_ids = torch.tensor([answer], device=self.model.device)
        return answer_ids, answer_logprobs(self.model, cache, ids, answer_ids, length)

    def _add(self, tally: _Tally, turn: _Round, swept: SweptCache | PressFailure, references: list[Any]) -> None:
        if isinstance(swept, PressFailure):
            tally.failure = f"{PRESS_FAILED}: {swept}"
            return
        start = time.perf_counter()
        try:
            for asked in zip(turn.asked, turn.ids, references, strict=True):
                tally.questions.append(self._ask(turn.opened, swept, *asked))
        except PressFailure as failure:
            tally.failure = f"{PRESS_FAILED}: {failure}"
            return
        seconds = {**swept.seconds, "answer": time.perf_counter() - start}
        tally.seconds = {part: tally.seconds.get(part, 0.0) + value for part, value in seconds.items()}
        tally.kept_pairs += swept.kept_pairs
        tally.total_pairs += swept.total_pairs
        tally.nbytes.append(swept.nbytes)

    def _ask(
        self, opened: OpenedContext, swept: SweptCache, question: Question, ids: torch.Tensor, reference: Any
    ) -> Record:
        if reference is not None:
            answer_ids, logprobs = reference
            with swept.asking():
                other = answer_logprobs(self.model, swept.cache, ids, answer_ids, opened.num_tokens)
            text = self.tokenizer.decode(answer_ids[0], skip_special_tokens=True)
            measures = compare(logprobs, other, answer_ids)
            return question_record(question, text, Score(measures["agreement"], text), measures)
        longest, at_first = question.max_new_tokens, opened.chat.stops_at_first_token
        with swept.asking():
            answer = greedy_answer(self.model, swept.cache, ids, opened.num_tokens, longest, stop_at_first=at_first)
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        score = metric_of(question.metric, self.identity.scorer)(text, question)
        return question_record(question, text, score, {"answer_tokens": len(answer)})

    def _record(self, unit: Unit, variant: Variant, rounds: list[_Round], tally: _Tally) -> Record:
        identity = self.identifier.identity(unit, variant)
        context = unit.sample.context
        tokens = rounds[0].opened.num_tokens if rounds else None
        return {
            "key": key_of(identity),
            "model": self.identity.model["name"],
            **{name: getattr(self.identity, name) for name in RECORDED_OF_RUN},
            **{name: getattr(unit, name) for name in RECORDED_OF_UNIT},
            "sample": unit.sample.id,
            "press": variant[0],
            "ratio": variant[1],
            **tally.measured(),
            "full_bytes": None if tokens is None else plain_nbytes(self.model, tokens),
            "context_tokens": tokens,
            "context_sha256": sha256(context),
            "context_excerpt": excerpt(context),
            "commit": self.provenance["commit"],
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "identity": identity,
        }
