"""What CONTRIBUTING says of adding things is done, word for word, on a copy of the code, and what was added is used."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
THINGS = ["A scorer", "A selector", "A kernel backend", "A press to compare with", "A metric", "A task"]
STEP = re.compile(
    r"^A line in `(?P<registry>\w+)` of `(?P<of>[^`]+)`:\s`(?P<line>[^`]+)`"
    r"|^A (?P<kind>new file|function in) `(?P<file>[^`]+)`(?:(?!```).)*```python\n(?P<code>.*?)```",
    re.DOTALL | re.MULTILINE,
)
USE = """
import torch
from attention_oracle import bounds, randn
from harness import make_press, prefill
from task_helpers import build_word_tokenizer
from tiny_models import build_model, build_tokenizer, random_ids

import kvzip_press
from kvzip_press.eval.metrics.registry import METRICS
from kvzip_press.eval.presses import registry as presses
from kvzip_press.eval.tasks.base import Question, Request
from kvzip_press.eval.tasks.registry import get_tasks
from kvzip_press.kernels.api import decode_attention

assert kvzip_press.__file__.startswith({copy!r}), kvzip_press.__file__

model = build_model("llama")
cache = prefill(model, random_ids(40), make_press(scorer="sum", level="last", ratio=0.25, n_sink=0))
dense = prefill(model, random_ids(40))
for layer, full in zip(cache.layers, dense.layers):
    assert torch.equal(layer.packed_keys, full.keys[0, :, -10:].flatten(0, 1)), "not the last pairs of each head"
assert presses.make_press("kvzip-sum", 0.5, build_tokenizer()).scorer == "sum"
assert presses.make_press("random-1", 0.5, None).seed == 1

query, key, value = randn(1, 2, 1, 8), randn(5, 8, seed=1), randn(5, 8, seed=2)
results = [
    decode_attention(query, key, value, bounds([2, 3]), softmax_scale=0.3, backend=name)[0]
    for name in ("plain", "reference")
]
assert torch.equal(*results)

asked = Question("Who?", (), "brevity", 8)
assert [METRICS["brevity"](answer, asked).value for answer in ("Ann", "It is Ann", "")] == [1, 0, 0]

request = Request(limit=3, length=400, tokenizer=build_word_tokenizer())
(task,) = get_tasks(["colours"])
samples = task.load(request)
assert samples == task.load(request) and len({{sample.context for sample in samples}}) == 3
for sample in samples:
    for question in sample.questions:
        (colour,) = question.answers
        assert sample.context.count(colour) == 1
        assert METRICS[question.metric](f"It is {{colour}}.", question).value == 1
        assert METRICS[question.metric]("I don't know.", question).value == 0
"""


def follow(step: re.Match, copy: Path) -> None:
    """Write a new file, a function at the end of a file or in front of its registry, or a registry's first line."""
    file = copy / (step["of"] or step["file"])
    if step["kind"] == "new file":
        assert not file.exists()
        file.write_text(step["code"], encoding="utf-8")
        return
    text = file.read_text(encoding="utf-8")
    if step["registry"]:
        place = re.search(rf"^{step['registry']}\b.*[{{[(]$", text, re.MULTILINE).end()
        added = f"\n    {step['line']}"
    else:
        registry = re.search(r"^(?:#.*\n)*[A-Z]+\b.* = \{$", text, re.MULTILINE)
        place, added = (registry.start(), f"{step['code']}\n\n") if registry else (len(text), f"\n\n{step['code']}")
    file.write_text(text[:place] + added + text[place:], encoding="utf-8")


def test_everything_that_can_be_added_is_added_as_the_guide_says(tmp_path):
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## Adding things\n")[1].split("\n## ")[0]
    recipes = {title: body for title, _, body in (part.partition("\n") for part in guide.split("\n### ")[1:])}
    assert list(recipes) == THINGS
    for folder in ("kvzip_press", "kernels", "eval"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for title, body in recipes.items():
        steps = list(STEP.finditer(body))
        assert len(steps) == body.count("```python") + body.count("A line in ") and steps[-1]["registry"], title
        for step in steps:
            follow(step, tmp_path)
    paths = os.pathsep.join(map(str, [tmp_path, ROOT / "tests"]))
    run = subprocess.run(
        [sys.executable, "-c", USE.format(copy=str(tmp_path))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
