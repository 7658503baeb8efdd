"""Measures the cells of one sample with a model in this process."""

from __future__ import annotations

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
from ..presses.registry import check_press, is_ours, make_press
from ..results.folder import sha256
from ..results.record import Record
from ..results.records import PRESS_FAILED, excerpt, mean_score, question_record
from ..tasks.base import Question
from ..tasks.fidelity import METRIC as FIDELITY
from .answer import answer_logprobs, compare, greedy_answer
from .chat import Chat, OpenedContext
from .identity import Identifier, RunIdentity, Unit, key_of
from .sweep import ContextSweep, Effort, PressFailure, SweptCache, Variant
from .warm_up import warm_up


@dataclass
class _Tally:
    """What the rounds of one cell have given so far."""

    kept_pairs: int = 0
    total_pairs: int = 0
    nbytes: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    questions: list[Record] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True)
class _Round:
    """One context to compress, and the questions then asked of it."""

    opened: OpenedContext
    asked: list[Question]
    ids: list[torch.Tensor]

    @property
    def needed(self) -> int:
        """Tokens of the context, the longest question and its answer."""
        return self.opened.num_tokens + max(
            ids.shape[1] + question.max_new_tokens for question, ids in zip(self.asked, self.ids, strict=True)
        )


class LocalEngine:
    """
    Measures units with a loaded model.

    Parameters
    ----------
    model, tokenizer
        The model, and its tokenizer.
    identity : RunIdentity
        What all records have in common.
    head_scores : HeadScores, optional
        For presses of whole heads.
    commit : str, optional
        Of this package, for the records.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        identity: RunIdentity,
        *,
        head_scores: HeadScores | None = None,
        commit: str | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.identity = identity
        self.head_scores = head_scores
        self.window = identity.window or longest_context(model)
        self.commit = commit
        self.effort = Effort()
        self._identifier = Identifier(identity, tokenizer, head_scores)
        self._warm: set[str] = set()

    def check(self, names: Sequence[str]) -> None:
        """
        Refuse presses that can't run, before any work.

        Raises
        ------
        ValueError
            With the press and the reason.
        """
        for name in names:
            try:
                press = make_press(
                    name, 0.5, self.tokenizer, head_scores=self.head_scores, backend=self.identity.backend
                )
                check_press(press, self.model)
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
        if reason is not None:
            for variant in unit.variants:
                yield self._record(unit, variant, rounds, _Tally(failure=reason))
            return
        self._warm_up(unit)
        tallies = {variant: _Tally() for variant in unit.variants}
        for number, turn in enumerate(rounds):
            sweep = ContextSweep(
                self.model,
                turn.opened,
                self.effort,
                budget=self.identity.budget,
                head_scores=self.head_scores,
                backend=self.identity.backend,
            )
            references = self._references(turn, sweep)
            # A press that failed on one question is not asked the others
            wanted = [variant for variant, tally in tallies.items() if tally.failure is None]
            for variant, swept in sweep.caches(wanted):
                self._add(tallies[variant], turn, swept, references)
                if number == len(rounds) - 1:
                    yield self._record(unit, variant, rounds, tallies[variant])
        for variant, tally in tallies.items():
            if tally.failure is not None and variant not in wanted:
                yield self._record(unit, variant, rounds, tally)

    def _warm_up(self, unit: Unit) -> None:
        """Leave no compilation to the first cell of a press."""
        presses = {press for press, _ in unit.variants if is_ours(press)} - self._warm
        if presses:
            chat = Chat(self.tokenizer, unit.prompt, unit.instruction)
            warm_up(self.model, chat, presses, head_scores=self.head_scores, backend=self.identity.backend)
            self._warm |= presses

    def _rounds(self, unit: Unit) -> tuple[list[_Round], str | None]:
        """Return the contexts to compress with their questions, and why they can't be, if so."""
        chat = Chat(self.tokenizer, unit.prompt, unit.instruction)
        context, questions = unit.sample.context, list(unit.sample.questions)
        rounds = []
        if unit.protocol == "agnostic":
            opened = chat.open(context)
            rounds.append(_Round(opened, questions, [opened.question_ids(question) for question in questions]))
        elif unit.protocol == "aware":
            for question in questions:
                opened = chat.open(context, question)
                rounds.append(_Round(opened, [question], [opened.question_ids(question, already_read=True)]))
        else:
            opened = chat.open(context, questions[0])
            rest = questions[1:]
            if not rest:
                return [], "the protocol reuse needs contexts with two or more questions"
            rounds.append(_Round(opened, rest, [opened.question_ids(question) for question in rest]))
        needed = max(turn.needed for turn in rounds)
        if self.window is not None and needed > self.window:
            return rounds, f"needs {needed} tokens, the model's window has {self.window}"
        return rounds, None

    def _references(self, turn: _Round, sweep: ContextSweep) -> list[Any]:
        """Return for each question that measures fidelity the full cache's answer and its log-probabilities."""
        found = []
        for question, ids in zip(turn.asked, turn.ids, strict=True):
            reference = None
            if question.metric == FIDELITY:
                cache, length = sweep.full(), turn.opened.num_tokens
                answer = greedy_answer(self.model, cache, ids, length, question.max_new_tokens)
                answer_ids = torch.tensor([answer], device=self.model.device)
                reference = answer_ids, answer_logprobs(self.model, cache, ids, answer_ids, length)
            found.append(reference)
        return found

    def _add(self, tally: _Tally, turn: _Round, swept: SweptCache | PressFailure, references: list[Any]) -> None:
        if isinstance(swept, PressFailure):
            tally.failure = f"{PRESS_FAILED}: {swept}"
            return
        start = time.perf_counter()
        try:
            for question, ids, reference in zip(turn.asked, turn.ids, references, strict=True):
                tally.questions.append(self._ask(turn.opened, question, ids, swept, reference))
        except PressFailure as failure:
            tally.failure = f"{PRESS_FAILED}: {failure}"
            return
        seconds = {**swept.seconds, "answer": time.perf_counter() - start}
        tally.seconds = {part: tally.seconds.get(part, 0.0) + value for part, value in seconds.items()}
        tally.kept_pairs += swept.kept_pairs
        tally.total_pairs += swept.total_pairs
        tally.nbytes.append(swept.nbytes)

    def _ask(
        self, opened: OpenedContext, question: Question, ids: torch.Tensor, swept: SweptCache, reference: Any
    ) -> Record:
        if reference is not None:
            answer_ids, logprobs = reference
            with swept.asking():
                other = answer_logprobs(self.model, swept.cache, ids, answer_ids, opened.num_tokens)
            text = self.tokenizer.decode(answer_ids[0], skip_special_tokens=True)
            measures = compare(logprobs, other, answer_ids)
            return question_record(question, text, Score(measures["agreement"], text), measures)
        with swept.asking():
            answer = greedy_answer(
                self.model,
                swept.cache,
                ids,
                opened.num_tokens,
                question.max_new_tokens,
                stop_at_first=opened.chat.stops_at_first_token,
            )
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        score = metric_of(question.metric, self.identity.scorer)(text, question)
        return question_record(question, text, score, {"answer_tokens": len(answer)})

    def _record(self, unit: Unit, variant: Variant, rounds: list[_Round], tally: _Tally) -> Record:
        identity = self._identifier.identity(unit, variant)
        answered = tally.failure is None
        context = unit.sample.context
        tokens = rounds[0].opened.num_tokens if rounds else None
        return {
            "key": key_of(identity),
            "model": self.identity.model["name"],
            "dtype": self.identity.dtype,
            "attention": self.identity.attention,
            "device": self.identity.device,
            "task": unit.task,
            "family": unit.family,
            "task_version": unit.task_version,
            "source": unit.source,
            "imitation": unit.imitation,
            "length": unit.length,
            "seed": unit.seed,
            "sample": unit.sample.id,
            "press": variant[0],
            "ratio": variant[1],
            "protocol": unit.protocol,
            "prompt": unit.prompt,
            "budget": self.identity.budget,
            "scorer": self.identity.scorer,
            "kept": tally.kept_pairs / max(1, tally.total_pairs) if answered else None,
            "kept_pairs": tally.kept_pairs if answered else None,
            "total_pairs": tally.total_pairs if answered else None,
            "cache_bytes": round(sum(tally.nbytes) / len(tally.nbytes)) if answered else None,
            "full_bytes": None if tokens is None else plain_nbytes(self.model, tokens),
            "context_tokens": tokens,
            "seconds": tally.seconds if answered else None,
            "context_sha256": sha256(context),
            "context_excerpt": excerpt(context),
            "questions": tally.questions if answered else [],
            "score": mean_score(tally.questions) if answered else None,
            "skipped": tally.failure,
            "version": self.identity.version,
            "commit": self.commit,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "identity": identity,
        }
