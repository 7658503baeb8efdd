"""SCBench (https://arxiv.org/abs/2412.10319) as arXiv 2505.23416 uses it: several queries on each context.

Published as Jang-Hyun/SCBench-preprocessed; tasks that need no corpus can be generated.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..base import GENERATED, HUB, Question, Request, Sample, Task
from ..generation import generate
from ..loading import Published, read_rows, wants_generated
from ..rows import Row, are_texts, is_text
from ..ruler.words import HOPS
from .generated import NUM_QUERIES, make_kv, make_mf, make_prefix_suffix, make_vt

HUB_PATH = "Jang-Hyun/SCBench-preprocessed"
COLUMNS = ("prompts", "ground_truth")
NUM_CONTEXTS = 100
# Tokens of generated contexts; the published ones have about as many.
SIZES = {"": 120_000, "_tiny": 8_000, "_short": 20_000, "_mid": 60_000}
# Name of a query's subtask, where a context has queries of two kinds.
SUBTASK_METRICS = {"repoqa": "repoqa", "kv": "include", "summary": "rouge-l", "passkey": "passkey"}


@dataclass(frozen=True)
class Kind:
    """A task at any size."""

    metric: str  # a name in `kvzip_press.eval.metrics.registry.METRICS`; empty where each query says its subtask
    max_new_tokens: int = 96  # longest answer
    columns: tuple[str, ...] = ()  # columns besides `prompts` and `ground_truth`
    # draws a context and its questions
    make: Callable[[random.Random, int], tuple[str, tuple[Question, ...]]] | None = None
    smallest: int = 1  # least size that can be drawn
    imitation: bool = False  # whether what is drawn only resembles the published task
    version: int = 1  # see `Task`
    sizes: tuple[str, ...] = tuple(SIZES)  # endings of `SIZES` that are published


ANSWERS = "a list of answers: each a text that is not empty, a number, or a list of these"
CODE = ("lang", "repo", "func_name")
KINDS = {
    "kv": Kind("include", make=make_kv, smallest=NUM_QUERIES),
    "prefix_suffix": Kind("include", make=make_prefix_suffix, imitation=True),
    "vt": Kind("vt", make=make_vt, smallest=HOPS + 1, sizes=("",)),
    "mf": Kind("mf", 32, make=make_mf, smallest=20, version=2),
    "many_shot": Kind("option"),
    "summary": Kind("rouge-l", 256),
    "qa_eng": Kind("qa", sizes=("",)),
    "choice_eng": Kind("choice", sizes=("",)),
    "repoqa": Kind("repoqa", 512, CODE),
    "repoqa_and_kv": Kind("", 512, (*CODE, "task")),
    "summary_with_needles": Kind("", 256, ("task",)),
}


class ScbenchTask(Task):
    """A task of SCBench, by its name in `KINDS`, at a size, by its ending in `SIZES`."""

    def __init__(self, subtask: str, size: str) -> None:
        self.name = f"scbench_{subtask}{size}"
        self.family = f"scbench{size}"
        self.kind = KINDS[subtask]
        self.size = size
        self.imitation = self.kind.imitation
        self.version = self.kind.version
        generated = (GENERATED,) if self.kind.make else ()
        self.sources = generated + ((HUB,) if size in self.kind.sizes else ())

    def load(self, request: Request) -> list[Sample]:
        """Return the samples: 100 generated, or all published ones."""
        if not wants_generated(self, request):
            return self._read(request)
        assert self.kind.make is not None
        length, smallest = SIZES[self.size], self.kind.smallest
        return generate(self, request, self.kind.make, length=length, number=NUM_CONTEXTS, smallest=smallest)

    def _read(self, request: Request) -> list[Sample]:
        columns, files = COLUMNS + self.kind.columns, (self.name, f"*/{self.name}")
        published = Published(HUB_PATH, "train", columns, files, data_files=f"{self.name}.parquet")
        rows = read_rows(self.name, request.source, published)
        return [self._sample(row) for row in islice(rows, request.limit)]

    def _sample(self, row: Row) -> Sample:
        context, *queries = row.texts("prompts", least=2)
        answers = [_as_text(truth) for truth in row.expect("ground_truth", ANSWERS, _are_answers)]
        if len(queries) != len(answers):
            raise ValueError(f"{self.name}: row {row.index} has {len(queries)} queries and {len(answers)} answers")
        metrics = self._metrics(row, len(queries))
        # An answer must be told from all functions asked for in its context.
        functions = {_nth(row, "func_name", i): answers[i] for i in range(len(answers)) if metrics[i] == "repoqa"}
        questions = []
        for i, (query, answer, metric) in enumerate(zip(queries, answers, metrics, strict=True)):
            details: dict[str, Any] = {"task": row.texts("task")[i]} if "task" in self.kind.columns else {}
            if metric == "repoqa":
                code = {"language": "lang", "repository": "repo", "function": "func_name"}
                details |= {name: _nth(row, column, i) for name, column in code.items()}
                details["functions"] = functions
            elif metric == "option":
                answer = option_line(query, answer)
            elif metric == "choice":
                details["options"] = choice_options(query)
            # Stripped as in the original code.
            questions.append(Question(query.strip(), (answer,), metric, self.kind.max_new_tokens, details=details))
        return Sample(str(row.index), context, tuple(questions))

    def _metrics(self, row: Row, number: int) -> list[str]:
        if self.kind.metric:
            return [self.kind.metric] * number

        def fits(value: Any) -> bool:
            return are_texts(value) and len(value) == number and {*map(_subtask, value)} <= {*SUBTASK_METRICS}

        names = row.expect("task", f"a list of {number} names out of {', '.join(SUBTASK_METRICS)}", fits)
        return [SUBTASK_METRICS[_subtask(name)] for name in names]


def _subtask(name: str) -> str:
    return name.removeprefix("scbench_")


def _are_answers(value: Any) -> bool:
    return isinstance(value, list) and all(
        bool(item) and all(map(_is_answer, item)) if isinstance(item, list) else _is_answer(item) for item in value
    )


def _is_answer(value: Any) -> bool:
    return is_text(value) or isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_text(truth: Any) -> str:
    return ", ".join(map(str, truth)) if isinstance(truth, list) else str(truth)


def _nth(row: Row, column: str, index: int) -> str:
    """Return what a column says of one query: its text, which then holds for all, or that of its list."""

    def choose(value: Any) -> Any:
        return value[index] if isinstance(value, list) and index < len(value) else value

    needed = f"a text, or a list with a text at place {index}"
    return str(choose(row.expect(column, needed, lambda value: is_text(choose(value)))))


def option_line(query: str, letter: str) -> str:
    """Return a query's line with an option, such as "(B) a blue one" for B; ValueError unless it is exactly one."""
    marked = letter if letter.startswith("(") else f"({letter})"
    lines = [line.strip() for line in query.split("\n") if marked in line]
    if len(lines) != 1:
        raise ValueError(f"{len(lines)} lines with {marked} in the query {query!r}: expected one")
    return lines[0]


def choice_options(query: str) -> dict[str, str]:
    """Return the options of a query, written one a line as "A. text", by letter."""
    return {letter: text.strip() for letter, text in re.findall(r"^([A-Z])\.[ \t]*(\S.*)$", query, re.MULTILINE)}


TASKS: list[Task] = [
    ScbenchTask(subtask, size)
    for size in SIZES
    for subtask, kind in KINDS.items()
    if kind.make is not None or size in kind.sizes
]
