"""What a task is: contexts with their questions, wherever they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

GENERATED = "generated"
HUB = "hub"


@dataclass(frozen=True)
class Question:
    """One question about a context."""

    text: str  # what is asked
    answers: tuple[str, ...]  # reference answers; the metric says how several count. Empty where a task has none.
    # a name in :data:`kvzip_press.eval.metrics.registry.METRICS`; or ``"fidelity"``, which is measured along the full
    # cache's own answers
    metric: str
    max_new_tokens: int  # longest answer
    answer_prefix: str = ""  # beginning of the answer, put into the model's mouth
    # what the metric needs beside the answers, and what a report may group by
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One context and all its questions."""

    id: str  # unique within the task, its length and its seed
    context: str  # what is compressed
    # asked of the same compressed cache, one after another, each forgotten after its answer
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Request:
    """Which samples of a task are wanted."""

    source: str = GENERATED  # ``"generated"``, ``"hub"``, or the path of a folder or file with parquet or jsonl data
    limit: int | None = None  # number of samples; all by default
    # tokens that a context, its longest question and answer may take together, for what is generated; which of the
    # published lengths of RULER is read; of no effect on other published data. The task's own by default.
    length: int | None = None
    seed: int = 42  # of generated samples
    tokenizer: PreTrainedTokenizerBase | None = None  # measures generated contexts
    # text file, or folder of text files, that serves as a haystack; the packaged essays by default. For the two tasks
    # of RULER on documents: where these are.
    corpus: str | None = None

    def number(self, default: int) -> int:
        """Return how many samples are wanted, where a task has so many by default."""
        return default if self.limit is None else self.limit


class Task(ABC):
    """A task, by one name."""

    name: str  # in the registry
    family: str  # benchmark it belongs to
    # raised whenever the samples of a seed, or how they are scored, change: results of other versions are not reused
    version: int = 1
    # of ``"generated"`` and ``"hub"``, what it offers; a local path always works where ``"hub"`` does
    sources: tuple[str, ...] = (GENERATED,)
    imitation: bool = False  # whether generated samples only resemble the published task; every result then says so
    # the paper's sentence in front of the context
    instruction: str = "Given the context, answer to the following question or request without explanation."

    @abstractmethod
    def load(self, request: Request) -> list[Sample]:
        """Return the samples; ValueError if the source is not offered, or its data lack columns, which are named."""
