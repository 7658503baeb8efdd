"""A results folder as a run leaves it, made up: how the scores fall with the kept fraction is known beforehand."""

import hashlib
import json
import random
from pathlib import Path

from kvzip_press.eval.report.summary import summarise
from kvzip_press.eval.report.tables import all_tables
from kvzip_press.eval.report.web_page import page

TASKS = {"niah_multikey_1": "ruler", "scbench_kv": "scbench", "squad": "squad"}
# Kept fraction at which a press has lost half of the full cache's answers.
HALF = {"full": 0.0, "kvzip": 0.08, "kvpress-kvzip": 0.11, "expected-attention": 0.33, "snapkv": 0.46, "knorm": 0.7}
RATIOS = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HOSTILE = "</script><img src=x onerror=\"document.title='broken'\"><!--<script>"
ABILITY = {"niah_multikey_1": 0.97, "scbench_kv": 0.8, "squad": 0.88}
WORDS = "amber valley copper lantern winter harbour silent meadow paper engine cloud answer stone river".split()


def record(task: str, sample: str, press: str, ratio: float, scores: list[float], **changes) -> dict:
    """One record of the schema with plain contents; `changes` replaces any of them."""
    questions = [
        {
            "text": f"What is the number of key {i}?",
            "answer_prefix": "",
            "answers": ["4711"],
            "prediction": "It is 4711." if score else "It is 12.",
            "filtered": "it is 4711" if score else "it is 12",
            "metric": "include",
            "score": score,
            "details": {"answer_tokens": 8},
        }
        for i, score in enumerate(scores)
    ]
    evicts = float(press != "full")
    plain = (
        {"model": "SmolLM2-135M-Instruct", "dtype": "float32", "attention": "sdpa"}
        | {"task": task, "family": TASKS.get(task, task), "task_version": 1, "source": "generated", "imitation": False}
        | {"length": 4096, "seed": 42, "sample": sample, "press": press, "ratio": ratio}
        | {"protocol": "agnostic", "prompt": "paper", "context_tokens": 100}
        | {"kept": ratio, "kept_pairs": round(ratio * 1000), "total_pairs": 1000}
        | {"cache_bytes": round(ratio * 2**20), "full_bytes": 2**20}
        | {"seconds": {"prefill": 2.0, "score": evicts, "evict": evicts / 2, "answer": 4.0}}
        | {"context_sha256": hashlib.sha256(f"{task} {sample}".encode()).hexdigest()}
        | {"context_excerpt": "The beginning of the context ... and its end."}
        | {"questions": questions, "score": sum(scores) / len(scores) if scores else None, "skipped": None}
        | {"version": "0.3.0", "commit": COMMIT, "time": "2026-11-30T03:00:00+00:00"}
        | changes
    )
    identity = [str(plain[name]) for name in ("model", "task", "length", "sample", "press", "ratio", "protocol")]
    return {"key": hashlib.sha256("/".join(identity).encode()).hexdigest(), **plain}


def realistic(samples: int = 12, questions: int = 3, seed: int = 7) -> list[dict]:
    """Three tasks, six presses, ten ratios: paired by sample, with hostile text among the answers."""
    rng = random.Random(seed)
    records = []
    for task in TASKS:
        for i in range(samples):
            luck = [rng.random() for _ in range(questions)]
            records += _context(task, f"{i:03d}", luck, rng)
    return records


def _context(task: str, sample: str, luck: list[float], rng: random.Random) -> list[dict]:
    tokens = rng.randint(3000, 4000)
    words = " ".join(rng.choices(WORDS, k=120))
    answers = [str(rng.randint(1_000_000, 9_999_999)) for _ in luck]
    records = []
    for press, half in HALF.items():
        for ratio in [1.0] if press == "full" else RATIOS:
            threshold = ABILITY[task] * ratio**3 / (ratio**3 + half**3)
            scores = [float(draw + rng.gauss(0, 0.04) < threshold) for draw in luck]
            made = record(task, sample, press, ratio, scores)
            for j, (question, answer) in enumerate(zip(made["questions"], answers, strict=True)):
                question["text"] = f"What is the special magic number for {WORDS[j]}-{WORDS[-j - 1]}?"
                question["answers"] = [answer]
                given = answer if question["score"] else str(rng.randint(1_000_000, 9_999_999))
                tail = f" {HOSTILE}" if j == 0 and sample == "000" else " as mentioned in the provided text."
                question["prediction"] = f"The special magic number is {given}{tail}"
                question["filtered"] = question["prediction"].lower()
            full_bytes, kept_pairs = tokens * 46_080, round(ratio * tokens * 90)
            share = ratio if press in ("full", "kvzip") else 1.98 - ratio * 0.9
            made |= {"kept_pairs": kept_pairs, "total_pairs": tokens * 90, "kept": kept_pairs / (tokens * 90)}
            made |= {"cache_bytes": round(full_bytes * share), "full_bytes": full_bytes, "context_tokens": tokens}
            made["seconds"] = _seconds(press, ratio, tokens, rng)
            made["context_excerpt"] = f"One of the special magic numbers for amber-river is: {answers[0]}. {words}"
            records.append(made)
    return records


def _seconds(press: str, ratio: float, tokens: int, rng: random.Random) -> dict[str, float]:
    prefill = tokens * 0.0017
    score = {"full": 0, "kvzip": 0.9, "kvpress-kvzip": 4.8}.get(press, 0.06) * prefill
    answer = 3 * (1.6 + 2.4 * ratio if press == "kvzip" else 5.6 if press == "kvpress-kvzip" else 4)
    evict = 0.0 if press == "full" else 0.05
    noise = rng.uniform(0.97, 1.03)
    return {"prefill": prefill * noise, "score": score * noise, "evict": evict, "answer": answer * noise}


def made_page(records: list[dict], title: str = "model") -> str:
    """The page about records, of a run without notes."""
    summary = summarise(records)
    return page(title, summary, all_tables(summary, {}), {})


def write_results(folder: Path, records: list[dict], **run) -> Path:
    """Write `samples.jsonl` and `run.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(made, ensure_ascii=False) + "\n" for made in records)
    (folder / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
    provenance = (
        {"time": "2026-11-30T03:00:00+00:00", "commit": COMMIT, "python": "3.11.7", "machine": "x86_64", "threads": 2}
        | {"versions": {"kvzip-press": "0.3.0", "kvpress": "0.5.5", "transformers": "5.2.0", "torch": "2.13.0"}}
        | {"model": "SmolLM2-135M-Instruct", "device": "cpu", "dtype": "float32", "attention": "sdpa"}
        | {"arguments": {"tasks": list(TASKS), "limit": 12}}
        | run
    )
    (folder / "run.json").write_text(json.dumps(provenance), encoding="utf-8")
    return folder
