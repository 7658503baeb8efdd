"""What is kept of answers, which records belong together, and how saved answers are judged anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..metrics.registry import Score, metric_of
from ..tasks.base import Question
from ..tasks.fidelity import METRIC as FIDELITY
from .folder import sha256
from .record import Record

EXCERPT = 400
PRESS_FAILED = "the press failed"
REQUIRED = ("model", "task", "sample", "press", "ratio", "protocol", "questions", "score")
OF_A_SAMPLE = ("sample", "context_sha256", "questions_sha256")


def key_of(identity: Record, **exchanged: Any) -> str:
    """Key of a record: the hash of all that decides its answers, with some of that exchanged if given."""
    return sha256({**identity, **exchanged})


def excerpt(context: str) -> str:
    """First and last characters of a context, or all of a short one."""
    return context if len(context) <= 2 * EXCERPT else f"{context[:EXCERPT]} [...] {context[-EXCERPT:]}"


def question_record(question: Question, prediction: str, score: Score, measured: Record) -> Record:
    """Return what is kept of a question and its answer."""
    return {
        "text": question.text,
        "answer_prefix": question.answer_prefix,
        "answers": list(question.answers),
        "max_new_tokens": question.max_new_tokens,
        "prediction": prediction,
        "filtered": score.filtered,
        "metric": question.metric,
        "score": score.value,
        "details": {**question.details, **measured},
    }


def mean_score(questions: list[Record]) -> float | None:
    """Score of a context: the mean over its questions, if any was asked."""
    return sum(question["score"] for question in questions) / len(questions) if questions else None


def check_whole(record: Record) -> None:
    """Refuse what is not a record of an evaluation: ValueError with the parts that it lacks."""
    missing = [name for name in REQUIRED if name not in record]
    if missing:
        raise ValueError(
            f"the record {record.get('key')!r} has no {', '.join(missing)}: delete its line from samples.jsonl"
        )


def failed(record: Record) -> bool:
    """Whether a press raised an error: another time it may not, so such a cell is measured again."""
    return str(record.get("skipped") or "").startswith(PRESS_FAILED)


def same_cells(records: Iterable[Record], among: Iterable[Record]) -> list[Record]:
    """Records that differ from some of the given ones in nothing but their sample: those of other shards."""
    wanted = {_cell(record) for record in records}
    return [record for record in among if _cell(record) in wanted]


def _cell(record: Record) -> str:
    identity = {name: value for name, value in record["identity"].items() if name not in OF_A_SAMPLE}
    return sha256({**identity, "max_new_tokens": sorted(set(identity["max_new_tokens"]))})


def rescored(record: Record, scorer: str) -> Record:
    """Judge the saved answers of a record anew; measurements that are no judgement stay."""
    check_whole(record)
    questions = [saved if saved["metric"] == FIDELITY else _judged(saved, scorer) for saved in record["questions"]]
    identity = {**record["identity"], "scorer": scorer}
    changes = {"key": key_of(identity), "identity": identity, "scorer": scorer}
    return {**record, **changes, "questions": questions, "score": mean_score(questions)}


def _judged(saved: Record, scorer: str) -> Record:
    more = (saved[name] for name in ("metric", "max_new_tokens", "answer_prefix", "details"))
    question = Question(saved["text"], tuple(saved["answers"]), *more)
    score = metric_of(saved["metric"], scorer)(saved["prediction"], question)
    return {**saved, "score": score.value, "filtered": score.filtered}
