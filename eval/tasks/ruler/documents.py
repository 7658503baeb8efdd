"""RULER's questions about documents, which are those of SQuAD and HotpotQA."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..base import HUB, Question, Request, Sample, Task
from ..generation import TooLongError, sampler
from ..loading import Published, read_rows
from ..rows import Row, Rows
from .templates import DOCUMENT, QA


@dataclass(frozen=True)
class Asked:
    """A question about documents."""

    text: str  # the question
    answers: tuple[str, ...]  # any of them is right
    documents: tuple[str, ...]  # those that must be there
    related: tuple[str, ...] = ()  # those that are added first


@dataclass(frozen=True)
class Documents:
    """Where a task's documents come from: published rows, or the one JSON file that RULER downloads."""

    title: str
    published: Published
    json_files: tuple[str, ...]


SQUAD = Documents(
    "SQuAD 2.0 (dev)",
    Published("rajpurkar/squad_v2", "validation", ("title", "context", "question", "answers"), ("*/validation*", "*")),
    ("squad.json", "dev-v2.0.json"),
)
HOTPOTQA = Documents(
    "HotpotQA (dev, distractor)",
    Published(
        "hotpotqa/hotpot_qa",
        "validation",
        ("question", "answer", "context"),
        ("distractor/validation*", "*/validation*", "*"),
        name="distractor",
    ),
    ("hotpotqa.json", "hotpot_dev_distractor_v1.json"),
)


def read_questions(task: Task, documents: Documents, corpus: str | None) -> list[Asked]:
    """
    Read all questions; ValueError if there is no corpus, or if it is damaged.

    It is ``"hub"``, or a file or folder in the hub's columns (parquet, jsonl) or as RULER downloads it (json).
    """
    if corpus is None:
        raise ValueError(
            f"{task.name}: generated from the documents of {documents.title}: give --corpus {HUB} "
            f"({documents.published.path}), or a folder with {' or '.join(documents.json_files)} or with the hub's "
            "files (parquet or jsonl); or read the finished task from the hub or a local folder"
        )
    path = Path(corpus)
    candidates = [path] if path.suffix == ".json" else [path / name for name in documents.json_files]
    file = next(filter(Path.is_file, candidates), None)
    if file is None:
        rows = read_rows(task.name, corpus, documents.published)
    else:
        rows = Rows(task.name, _json_rows(task.name, file, documents))
    return squad_questions(rows) if documents is SQUAD else hotpot_questions(rows)


def _json_rows(task_name: str, file: Path, documents: Documents) -> list[dict[str, Any]]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return _squad_rows(data) if documents is SQUAD else _hotpot_rows(data)
    # Text that is not JSON, or JSON of another shape.
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{task_name}: {file} is not the JSON of {documents.title} ({type(error).__name__}: {error}): "
            "download it again"
        ) from error


def _squad_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "title": article["title"],
            "context": paragraph["context"],
            "question": asked["question"],
            "answers": {"text": [answer["text"] for answer in asked["answers"]]},
        }
        for article in data["data"]
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
    ]


def _hotpot_rows(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**row, "context": {"title": [t for t, _ in row["context"]], "sentences": [s for _, s in row["context"]]}}
        for row in data
    ]


def squad_questions(rows: Rows) -> list[Asked]:
    """Questions that have an answer, with the other paragraphs of their article as related documents."""
    checked = [
        (row.text("title"), row.text("context"), row.text("question"), row.texts("answers.text", least=0))
        for row in rows
    ]
    articles: dict[str, dict[str, None]] = {}
    for title, context, _, _ in checked:
        articles.setdefault(title, {})[context] = None
    return [
        Asked(
            question,
            tuple(dict.fromkeys(answers)),
            (context,),
            tuple(text for text in articles[title] if text != context),
        )
        for title, context, question, answers in checked
        if answers
    ]


def hotpot_questions(rows: Rows) -> list[Asked]:
    """Questions with the ten paragraphs that come with each."""
    return [
        Asked(
            row.text("question"),
            (row.text("answer"),),
            tuple(f"{title}\n{''.join(sentences)}" for title, sentences in _paragraphs(row)),
        )
        for row in rows
    ]


def _paragraphs(row: Row) -> Iterable[tuple[str, list[str]]]:
    titles = row.texts("context.title")

    def fits(value: Any) -> bool:
        return isinstance(value, list) and len(value) == len(titles) and all(map(_are_sentences, value))

    sentences = row.expect("context.sentences", f"a list of {len(titles)} lists of texts, one for each title", fits)
    return zip(titles, sentences, strict=True)


def _are_sentences(value: Any) -> bool:
    # Of the published sentences, some are empty.
    return isinstance(value, list) and all(isinstance(sentence, str) for sentence in value)


def make_qa(rng: random.Random, size: int, asked: Asked, documents: list[str]) -> tuple[str, tuple[Question, ...]]:
    """Draw a context of `size` documents, first those that must be there, and its question."""
    chosen = list(asked.documents)
    missing = size - len(chosen)
    if missing <= len(asked.related):
        chosen += rng.sample(asked.related, missing)
    else:
        chosen += asked.related
        known = set(chosen)
        chosen += rng.sample([text for text in documents if text not in known], size - len(chosen))
    rng.shuffle(chosen)
    context = "\n\n".join(DOCUMENT.format(number=i, document=text) for i, text in enumerate(chosen, start=1))
    return QA.split(QA.fill(context=context, query=asked.text), list(asked.answers))


def generate_qa(task: Task, request: Request, documents: Documents, length: int, number: int) -> list[Sample]:
    """Ask the first questions whose documents fit, each among as many others as fit; ValueError if there are none."""
    draw = sampler(task, request, length)
    questions = read_questions(task, documents, request.corpus)
    texts = sorted({text for asked in questions for text in asked.documents + asked.related})
    samples: list[Sample] = []
    for index, asked in enumerate(questions):
        if len(samples) == request.number(number):
            break
        with suppress(TooLongError):
            make = partial(make_qa, asked=asked, documents=texts)
            samples.append(draw(index, make, len(asked.documents), len(texts)))
    if not samples and request.limit != 0:
        budget = request.length or length
        raise ValueError(f"{task.name}: no question with its documents fits into {budget} tokens: raise the length")
    return samples
