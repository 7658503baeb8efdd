"""RULER's 13 tasks (https://arxiv.org/abs/2404.06654), generated at any length or read as published by kvpress."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

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
    ("{length}/*", "*"),
    data_dir="{length}",
)
Maker = Callable[[random.Random, int, int], tuple[str, tuple[Question, ...]]]


class RulerTask(Task):
    """
    A task of RULER.

    Parameters
    ----------
    subtask : str
        Its name in the published data, in their column `task`.
    """

    family = "ruler"
    sources = (GENERATED, HUB)

    def __init__(self, subtask: str) -> None:
        self.name = f"ruler_{subtask}"
        self.subtask = subtask

    def load(self, request: Request) -> list[Sample]:
        """Return the samples: 500 of 4096 tokens by default."""
        return self.generate(request) if wants_generated(self, request) else self.read(request)

    def generate(self, request: Request) -> list[Sample]:
        """Draw samples."""
        raise NotImplementedError

    def read(self, request: Request) -> list[Sample]:
        """Read published samples of the request's length."""
        length = str(request.length or LENGTH)
        published = replace(
            PUBLISHED, data_dir=length, files=tuple(files.format(length=length) for files in PUBLISHED.files)
        )
        rows = read_rows(self.name, request.source, published)
        tasks = rows.column("task")
        chosen = [index for index, task in enumerate(tasks) if task == self.subtask]
        if not chosen:
            raise ValueError(
                f"{self.name}: no task {self.subtask} in {request.source}, only {sorted(set(map(str, tasks)))}"
            )
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


class NeedleTask(RulerTask):
    """Needles in a haystack; the request's corpus takes the place of the essays."""

    def __init__(self, subtask: str, needles: Needles) -> None:
        super().__init__(subtask)
        self.needles = needles

    def generate(self, request: Request) -> list[Sample]:
        """Draw samples."""
        return generate(
            self,
            request,
            lambda rng, size: self.needles.make(rng, size, request.corpus),
            length=LENGTH,
            number=NUM_SAMPLES,
            smallest=self.needles.smallest,
        )


class DrawnTask(RulerTask):
    """Variables or words, drawn without any text."""

    def __init__(self, subtask: str, make: Maker, smallest: int = 1) -> None:
        super().__init__(subtask)
        self.make = make
        self.smallest = smallest

    def generate(self, request: Request) -> list[Sample]:
        """Draw samples."""
        length = request.length or LENGTH
        return generate(
            self,
            request,
            lambda rng, size: self.make(rng, size, length),
            length=LENGTH,
            number=NUM_SAMPLES,
            smallest=self.smallest,
        )


class DocumentTask(RulerTask):
    """A question about one or two of many documents, which the request's corpus must hold."""

    def __init__(self, subtask: str, documents: Documents) -> None:
        super().__init__(subtask)
        self.documents = documents

    def generate(self, request: Request) -> list[Sample]:
        """Draw samples."""
        return generate_qa(self, request, self.documents, LENGTH, NUM_SAMPLES)


TASKS: list[Task] = [
    NeedleTask("niah_single_1", Needles("noise")),
    NeedleTask("niah_single_2", Needles("essay")),
    NeedleTask("niah_single_3", Needles("essay", values="uuids")),
    NeedleTask("niah_multikey_1", Needles("essay", num_keys=4)),
    NeedleTask("niah_multikey_2", Needles("needle")),
    NeedleTask("niah_multikey_3", Needles("needle", keys="uuids", values="uuids")),
    NeedleTask("niah_multivalue", Needles("essay", num_values=4)),
    NeedleTask("niah_multiquery", Needles("essay", num_keys=4, num_queries=4)),
    DrawnTask("vt", make_vt, smallest=HOPS + 1),
    DrawnTask("cwe", make_cwe),
    DrawnTask("fwe", make_fwe, smallest=FWE_SMALLEST),
    DocumentTask("qa_1", SQUAD),
    DocumentTask("qa_2", HOTPOTQA),
]
