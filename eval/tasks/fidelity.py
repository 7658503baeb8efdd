"""Any text and any questions, without right answers: how close a compressed cache stays to the full one."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

from .base import GENERATED, HUB, Question, Request, Sample, Task
from .essays import draw_passage, load_texts, text_files
from .generation import token_counter
from .loading import Published, read_rows, wants_generated
from .rows import Row

# Measured by the runner along the full cache's own answers: no prediction can be judged alone.
METRIC = "fidelity"
QUESTIONS = (
    "What is this text about?",
    "What is the author's main argument?",
    "Give an example that the author uses.",
    "What does the author advise the reader to do?",
    "Who or what does the author mention?",
)
LENGTH = 1000
NUM_CONTEXTS = 12
NEW_TOKENS = 24


class Fidelity(Task):
    """
    Passages of the corpus with default questions, or your own texts with your own questions.

    The request's length bounds a passage alone: by default 500 to 1,000 tokens.

    A folder or file of .txt files as the source gives one context a file; parquet or jsonl rows have a column `context`
    and, where the default questions don't fit, one named `questions` with a list.
    """

    name = "fidelity"
    family = "fidelity"
    version = 2
    sources = (GENERATED, HUB)

    def load(self, request: Request) -> list[Sample]:
        """Return 12 passages by default, each decided by the sum of seed and index, or all own texts."""
        if wants_generated(self, request):
            return self._passages(request)
        if request.source == HUB:
            raise ValueError(f"{self.name}: no data are published: give a folder or file of texts, or generate it")
        path = Path(request.source)
        if path.suffix == ".txt" or (path.is_dir() and any(path.glob("*.txt"))):
            texts = [(file, file.read_text(encoding="utf-8")) for file in text_files(path)[: request.limit]]
            for file, text in texts:
                if not text.strip():
                    raise ValueError(f"{self.name}: {file} is empty: fill or remove it")
            return [Sample(file.stem, text, _questions(QUESTIONS)) for file, text in texts]
        rows = read_rows(self.name, request.source, Published("", "", ("context",)))
        return [
            Sample(str(row.index), row.text("context"), _questions(_own_questions(row) or QUESTIONS))
            for row in islice(rows, request.limit)
        ]

    def _passages(self, request: Request) -> list[Sample]:
        count_tokens, texts = token_counter(self, request), load_texts(request.corpus)
        length = request.length or LENGTH
        samples = []
        for index in range(request.number(NUM_CONTEXTS)):
            rng = random.Random(request.seed + index)
            least = rng.randint(length // 2, max(length // 2, length - 100))
            passage = draw_passage(texts, rng, count_tokens, least, length)
            samples.append(Sample(str(index), " ".join(passage), _questions(QUESTIONS)))
        return samples


def _own_questions(row: Row) -> list[str]:
    return [] if row.get("questions") is None else row.texts("questions", least=0)


def _questions(texts: tuple[str, ...] | list[str]) -> tuple[Question, ...]:
    return tuple(Question(text, (), METRIC, NEW_TOKENS) for text in texts)


TASKS: list[Task] = [Fidelity()]
