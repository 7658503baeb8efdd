"""SQuAD: several questions about each paragraph."""

from __future__ import annotations

from .base import HUB, Question, Request, Sample, Task
from .loading import Published, read_rows, wants_generated

PUBLISHED = Published(
    "rajpurkar/squad", "train", ("context", "question", "answers"), ("plain_text/train*", "train*", "*")
)
NUM_CONTEXTS = 100


class Squad(Task):
    """The first 100 contexts, each with all its questions; the first answer counts."""

    name = "squad"
    family = "squad"
    sources = (HUB,)

    def load(self, request: Request) -> list[Sample]:
        """Return the first contexts in the order of the data."""
        wants_generated(self, request)
        grouped: dict[str, list[Question]] = {}
        for row in read_rows(self.name, request.source, PUBLISHED):
            context = row.text("context")
            if context not in grouped and len(grouped) == request.number(NUM_CONTEXTS):
                break
            question = Question(row.text("question"), tuple(row.texts("answers.text")[:1]), "include", 256)
            grouped.setdefault(context, []).append(question)
        return [Sample(str(i), context, tuple(asked)) for i, (context, asked) in enumerate(grouped.items())]


TASKS: list[Task] = [Squad()]
