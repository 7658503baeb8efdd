"""SCBench (https://arxiv.org/abs/2412.10319) as arXiv 2505.23416 uses it: several queries on each context.

Published as Jang-Hyun/SCBench-preprocessed; tasks that need no corpus can be generated.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvzip_press.eval.tasks.base import GENERATED, HUB, Question, Request, Sample, Task
from kvzip_press.eval.tasks.generation import generate
from kvzip_press.eval.tasks.loading import Published, check_columns, read_rows, wants_generated
from kvzip_press.eval.tasks.ruler_words import HOPS
from kvzip_press.eval.tasks.scbench_generated import NUM_QUERIES, make_kv, make_mf, make_prefix_suffix, make_vt

HUB_PATH = "Jang-Hyun/SCBench-preprocessed"
COLUMNS = ("prompts", "ground_truth")
NUM_CONTEXTS = 100
# Tokens of generated contexts; the published ones have about as many.
SIZES = {"": 120_000, "_tiny": 8_000, "_short": 20_000, "_mid": 60_000}
# Name of a query's subtask, where a context has queries of two kinds.
SUBTASK_METRICS = {"repoqa": "repoqa", "kv": "include", "summary": "rouge-l", "passkey": "passkey"}


@dataclass(frozen=True)
class Kind:
    """
    A task at any size.

    Parameters
    ----------
    metric : str
        A name in `kvzip_press.eval.metrics.METRICS`; empty where each query says its subtask.
    max_new_tokens : int
        Longest answer.
    columns : tuple[str, ...]
        Columns besides `prompts` and `ground_truth`.
    make : callable, optional
        Draws a context and its questions.
    smallest : int
        Least size that can be drawn.
    imitation : bool
        Whether what is drawn only resembles the published task.
    sizes : tuple[str, ...]
        Endings of `SIZES` that are published.
    """

    metric: str
    max_new_tokens: int = 96
    columns: tuple[str, ...] = ()
    make: Callable[[random.Random, int], tuple[str, tuple[Question, ...]]] | None = None
    smallest: int = 1
    imitation: bool = False
    sizes: tuple[str, ...] = tuple(SIZES)


CODE = ("lang", "repo", "func_name")
KINDS = {
    "kv": Kind("include", make=make_kv, smallest=NUM_QUERIES),
    "prefix_suffix": Kind("include", make=make_prefix_suffix, imitation=True),
    "vt": Kind("vt", make=make_vt, smallest=HOPS + 1, sizes=("",)),
    "mf": Kind("mf", 32, make=make_mf, smallest=20),
    "many_shot": Kind("option"),
    "summary": Kind("rouge-l", 256),
    "qa_eng": Kind("qa", sizes=("",)),
    "choice_eng": Kind("choice", sizes=("",)),
    "repoqa": Kind("repoqa", 512, CODE),
    "repoqa_and_kv": Kind("", 512, (*CODE, "task")),
    "summary_with_needles": Kind("", 256, ("task",)),
}


class ScbenchTask(Task):
    """
    A task of SCBench at a size.

    Parameters
    ----------
    subtask : str
        A name in `KINDS`.
    size : str
        An ending in `SIZES`.
    """

    def __init__(self, subtask: str, size: str) -> None:
        self.name = f"scbench_{subtask}{size}"
        self.family = f"scbench{size}"
        self.kind = KINDS[subtask]
        self.size = size
        self.imitation = self.kind.imitation
        generated = (GENERATED,) if self.kind.make else ()
        self.sources = generated + ((HUB,) if size in self.kind.sizes else ())

    def load(self, request: Request) -> list[Sample]:
        """Return the samples: 100 generated, or all published ones."""
        if not wants_generated(self, request):
            return self._read(request)
        assert self.kind.make is not None
        return generate(
            self,
            request,
            self.kind.make,
            length=SIZES[self.size],
            number=NUM_CONTEXTS,
            smallest=self.kind.smallest,
        )

    def _read(self, request: Request) -> list[Sample]:
        published = Published(
            HUB_PATH, "train", COLUMNS, (self.name, f"*/{self.name}"), data_files=f"{self.name}.parquet"
        )
        rows = read_rows(self.name, request.source, published)
        check_columns(self.name, request.source, rows.column_names, self.kind.columns)
        chosen = rows.select(range(len(rows))[: request.limit])
        return [self._sample(index, row) for index, row in enumerate(chosen)]

    def _sample(self, index: int, row: dict[str, Any]) -> Sample:
        context, *queries = row["prompts"]
        answers = [_as_text(truth) for truth in row["ground_truth"]]
        if len(queries) != len(answers):
            raise ValueError(f"{self.name}: row {index} has {len(queries)} queries and {len(answers)} answers")
        metrics = self._metrics(row, len(queries))
        # An answer must be told from all functions asked for in its context.
        functions = {_nth(row["func_name"], i): answers[i] for i in range(len(answers)) if metrics[i] == "repoqa"}
        questions = []
        for i, (query, answer, metric) in enumerate(zip(queries, answers, metrics, strict=True)):
            details: dict[str, Any] = {"task": row["task"][i]} if "task" in self.kind.columns else {}
            if metric == "repoqa":
                code = {"language": "lang", "repository": "repo", "function": "func_name"}
                details |= {name: _nth(row[column], i) for name, column in code.items()}
                details["functions"] = functions
            elif metric == "option":
                answer = option_line(query, answer)
            elif metric == "choice":
                details["options"] = choice_options(query)
            # Stripped as in the original code.
            questions.append(Question(query.strip(), (answer,), metric, self.kind.max_new_tokens, details=details))
        return Sample(str(index), context, tuple(questions))

    def _metrics(self, row: dict[str, Any], number: int) -> list[str]:
        if self.kind.metric:
            return [self.kind.metric] * number
        tasks = [task.removeprefix("scbench_") for task in row["task"]]
        unknown = sorted(set(tasks) - set(SUBTASK_METRICS))
        if unknown:
            raise ValueError(
                f"{self.name}: unknown values {unknown} in column task: expected {sorted(SUBTASK_METRICS)}"
            )
        return [SUBTASK_METRICS[task] for task in tasks]


def _as_text(truth: Any) -> str:
    return ", ".join(map(str, truth)) if isinstance(truth, list) else str(truth)


def _nth(value: Any, index: int) -> str:
    return str(value[index] if isinstance(value, list) else value)


def option_line(query: str, letter: str) -> str:
    """Return the line of a query that holds an option, such as "(B) a blue one" for the letter B.

    Raises
    ------
    ValueError
        If there isn't exactly one such line.
    """
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
