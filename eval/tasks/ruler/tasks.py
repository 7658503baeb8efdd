"""RULER's 13 tasks (https://arxiv.org/abs/2404.06654), generated at any length or read as published by kvpress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..base import GENERATED, HUB, Question, Request, Sample, Task
from ..generation import generate
from ..loading import Published, read_rows, wants_generated
from ..rows import Row
from .documents import HOTPOTQA, SQUAD, Documents, generate_qa
from .needles import Needles
from .words import FWE_SMALLEST, HOPS, make_cwe, make_fwe, make_vt

LENGTH = 4096
NUM_SAMPLES = 500
PUBLISHED = Published(
    "simonjegou/ruler",
    "test",
    ("context", "question", "answer_prefix", "answer", "task", "max_new_tokens"),
)
Generator = Callable[[Task, Request], list[Sample]]


class RulerTask(Task):
    """A task of RULER, by its name in the published data's column `task`, and what draws its samples for a request."""

    family = "ruler"
    sources = (GENERATED, HUB)

    def __init__(self, subtask: str, generator: Generator) -> None:
        self.name = f"ruler_{subtask}"
        self.subtask = subtask
        self.generator = generator

    def load(self, request: Request) -> list[Sample]:
        """Return the samples: 500 of 4096 tokens by default."""
        return self.generator(self, request) if wants_generated(self, request) else self._read(request)

    def _read(self, request: Request) -> list[Sample]:
        """Read published samples of the request's length."""
        length = str(request.length or LENGTH)
        rows = read_rows(self.name, request.source, replace(PUBLISHED, data_dir=length, files=(f"{length}/*", "*")))
        tasks = rows.column("task")
        chosen = [index for index, task in enumerate(tasks) if task == self.subtask]
        if not chosen:
            found = sorted(set(map(str, tasks)))
            raise ValueError(f"{self.name}: no task {self.subtask} in {request.source}, only {found}")
        return [
            Sample(str(number), row.text("context"), (self._question(row),))
            for number, row in enumerate(rows[index] for index in chosen[: request.limit])
        ]

    def _question(self, row: Row) -> Question:
        metric = "ruler_any" if self.subtask.startswith("qa") else "ruler_all"
        return Question(
            row.text("question"),
            tuple(row.texts("answer")),
            metric,
            row.whole("max_new_tokens"),
            row.text("answer_prefix", empty=True),
        )


def hidden(needles: Needles) -> Generator:
    """Needles in a haystack; the request's corpus takes the place of the essays."""
    return lambda task, request: generate(
        task,
        request,
        partial(needles.make, corpus=request.corpus),
        length=LENGTH,
        number=NUM_SAMPLES,
        smallest=needles.smallest,
    )


def drawn(make: Callable[..., tuple[str, tuple[Question, ...]]], smallest: int = 1) -> Generator:
    """Variables or words, drawn without any text."""
    return lambda task, request: generate(
        task,
        request,
        partial(make, length=request.length or LENGTH),
        length=LENGTH,
        number=NUM_SAMPLES,
        smallest=smallest,
    )


def asked_of(documents: Documents) -> Generator:
    """A question about one or two of many documents, which the request's corpus must hold."""
    return lambda task, request: generate_qa(task, request, documents, LENGTH, NUM_SAMPLES)


TASKS: list[Task] = [
    RulerTask("niah_single_1", hidden(Needles("noise"))),
    RulerTask("niah_single_2", hidden(Needles("essay"))),
    RulerTask("niah_single_3", hidden(Needles("essay", values="uuids"))),
    RulerTask("niah_multikey_1", hidden(Needles("essay", num_keys=4))),
    RulerTask("niah_multikey_2", hidden(Needles("needle"))),
    RulerTask("niah_multikey_3", hidden(Needles("needle", keys="uuids", values="uuids"))),
    RulerTask("niah_multivalue", hidden(Needles("essay", num_values=4))),
    RulerTask("niah_multiquery", hidden(Needles("essay", num_keys=4, num_queries=4))),
    RulerTask("vt", drawn(make_vt, smallest=HOPS + 1)),
    RulerTask("cwe", drawn(make_cwe)),
    RulerTask("fwe", drawn(make_fwe, smallest=FWE_SMALLEST)),
    RulerTask("qa_1", asked_of(SQUAD)),
    RulerTask("qa_2", asked_of(HOTPOTQA)),
]
