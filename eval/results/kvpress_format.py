"""Folders as kvpress's evaluation writes them and its leaderboard takes them, and data sets as it reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml  # type: ignore[import-untyped]

from ..presses.registry import is_ours
from ..tasks.base import Sample
from ..tasks.ruler.tasks import LENGTH, NUM_SAMPLES
from ..tasks.ruler.tasks import TASKS as RULER
from .record import Record

DATASET = "ruler"
PREFIX = "ruler_"
COLUMNS = "question answer_prefix answer task max_new_tokens predicted_answer compression_ratio".split()
# What the records of a folder have in common, beside what its name says
ALIKE = ("source", "seed", "prompt", "budget", "dtype", "attention", "ratio")
# Names in kvpress's registry; parameters that differ from those there are in the name
NAMES = {
    "full": "no_press",
    "adakv-expected-attention": "expected_attention",
    "adakv-snapkv": "adakv_snapkv_window32",
    "expected-attention": "expected_attention_alone",
    "kvpress-kvgrad": "kvgrad",
    "kvpress-kvzip": "kvzip",
    "kvpress-kvzip-layerwise": "kvzip_layerwise",
    "kvpress-kvzip-plus": "kvzip_plus",
    "pyramidkv": "pyramidkv_window32",
    "snapkv": "snapkv_window32",
}


def registry_name(press: str) -> str:
    """Name of a press in kvpress's registry; presses of kvzip-press are `kvzip_press` and `kvzip_press_...`."""
    if is_ours(press):
        press = press.replace("kvzip", "kvzip-press", 1)
    return NAMES.get(press, press.replace("-", "_"))


def write_folders(records: Iterable[Record], output: Path) -> list[Path]:
    """
    Write a folder for each model, length, press and ratio that was measured on RULER, over one of the same name.

    Beside kvpress's three files there is `kvzip_eval.json`, which says what those can't: where the data come from, how
    the budget was counted, what was skipped. Records of other tasks and of the protocol `reuse` are left out;
    ValueError if there are no others, or one folder would have to hold what is not alike.
    """
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if record["family"] == DATASET and record["protocol"] != "reuse":
            groups.setdefault(_components(record), []).append(record)
    if not groups:
        raise ValueError("kvpress's format holds RULER alone, and there are no records of it: run --tasks ruler")
    for name, group in groups.items():
        if any(record[part] != group[0][part] for record in group for part in ALIKE):
            raise ValueError(
                f"{'__'.join(name)} would hold records of different sources, seeds, prompts, budgets or ratios: "
                "measure each into a results folder of its own"
            )
    return [_write_folder(output, name, group) for name, group in groups.items()]


def _components(record: Record) -> tuple[str, ...]:
    named = (DATASET, str(record["length"] or LENGTH), record["model"].replace("/", "--"))
    amount = (registry_name(record["press"]), f"{_removed(record):.2f}")
    return named + amount + (("query_aware",) if record["protocol"] == "aware" else ())


def _removed(record: Record) -> float:
    return round(1 - record["ratio"], 6)


def _write_folder(output: Path, name: tuple[str, ...], records: list[Record]) -> Path:
    rows = pd.DataFrame(
        [
            {
                "question": question["text"],
                "answer_prefix": question["answer_prefix"],
                # As pandas prints what it read from parquet
                "answer": np.array(question["answers"], dtype=object),
                "task": record["task"].removeprefix(PREFIX),
                "max_new_tokens": question["max_new_tokens"],
                "predicted_answer": question["prediction"],
                "compression_ratio": _removed(record),
                "score": question["score"],
            }
            for record in records
            for question in record["questions"]
        ],
        columns=(*COLUMNS, "score"),
    )
    fraction = len(rows) / (len(RULER) * NUM_SAMPLES)
    part = () if fraction >= 1 else (f"fraction{fraction:.3f}",)
    folder = output / "__".join(name[:5] + part + name[5:])
    folder.mkdir(parents=True, exist_ok=True)
    rows.to_csv(folder / "predictions.csv", index=False, columns=COLUMNS)
    metrics = {
        task: {"string_match": round(float(of_task.sum()) / len(of_task) * 100, 2)}
        for task, of_task in rows.groupby("task")["score"]
    }
    config = yaml.dump(_config(records[0], fraction, output), default_flow_style=False, indent=2, sort_keys=False)
    texts = {
        "metrics.json": json.dumps(metrics, indent=4),
        "config.yaml": config,
        "kvzip_eval.json": json.dumps(_more(records), indent=1) + "\n",
    }
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    return folder


def _config(record: Record, fraction: float, output: Path) -> dict[str, Any]:
    """Return the fields of kvpress's `EvaluationConfig`, in its order."""
    return {
        "dataset": DATASET,
        "data_dir": record["length"] or LENGTH,
        "model": record["model"],
        "device": record["device"],
        "press_name": registry_name(record["press"]),
        "compression_ratio": _removed(record),
        "key_channel_compression_ratio": None,
        "fraction": min(1.0, fraction),
        "max_new_tokens": None,
        "max_context_length": None,
        "query_aware": record["protocol"] == "aware",
        **dict.fromkeys(["needle_depth", "compression_interval", "target_size", "hidden_states_buffer_size"]),
        "output_dir": str(output),
        "log_level": "INFO",
        "model_kwargs": {"attn_implementation": record["attention"], "dtype": record["dtype"]},
        "trust_remote_code": False,
        "press_init_command": init_command(record["identity"]["parameters"], _removed(record)),
        "seed": record["seed"],
        "fp8": False,
    }


def init_command(parameters: Mapping[str, Any], removed: float) -> str:
    """Write a press as its `repr` would be, from its described parameters."""
    if not parameters:
        return "None"
    inner = {
        name: init_command(value, removed) if isinstance(value, Mapping) else repr(value)
        for name, value in parameters.items()
        if name != "class"
    }
    amount = {} if "press" in inner else {"compression_ratio": repr(removed)}
    return f"{parameters['class']}({', '.join(f'{name}={value}' for name, value in {**amount, **inner}.items())})"


def _more(records: list[Record]) -> dict[str, Any]:
    answered = [record for record in records if not record["skipped"]]
    alike = ("source", "imitation", "prompt", "budget", "scorer", "version", "commit", "press", "ratio")
    return {
        **{part: records[0][part] for part in alike},
        "kept": sum(record["kept"] for record in answered) / len(answered) if answered else None,
        "contexts": len(answered),
        "skipped": len(records) - len(answered),
    }


def write_dataset(samples: Mapping[str, Iterable[Sample]], folder: Path, length: int) -> Path:
    """
    Write samples of RULER, given by task, as `load_dataset(folder, data_dir=str(length), split="test")` reads them.

    Their length in tokens names the data directory; folders are made if missing.
    """
    rows = [
        {
            "context": sample.context,
            "question": question.text,
            "answer_prefix": question.answer_prefix,
            "answer": list(question.answers),
            "task": task.removeprefix(PREFIX),
            "max_new_tokens": question.max_new_tokens,
        }
        for task, of_task in samples.items()
        for sample in of_task
        for question in sample.questions
    ]
    if not rows:
        raise ValueError("there are no samples to write")
    file = folder / str(length) / "test-00000-of-00001.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(file, index=False)
    return file
