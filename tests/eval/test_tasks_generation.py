"""What all generated tasks have in common: length, determinism, and samples that never change unnoticed."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from task_helpers import count_tokens, fingerprint, load

from kvzip_press.eval.metrics.registry import METRICS
from kvzip_press.eval.tasks.base import GENERATED, Request
from kvzip_press.eval.tasks.generation import draw_distinct, grow, needed_tokens
from kvzip_press.eval.tasks.registry import TASKS

DOCUMENTS = ("ruler_qa_1", "ruler_qa_2")
# The sizes of a task differ only in their default length.
NAMES = [
    name
    for name, task in TASKS.items()
    if GENERATED in task.sources and name not in DOCUMENTS and task.family in ("ruler", "scbench", "privacy")
]
# Of the second sample of 4,200 tokens. A change of these means that task.version must be raised.
GOLDEN = """
ruler_niah_single_1 9a581755b2342a07 ruler_niah_single_2 678c7c22d21fa192 ruler_niah_single_3 966801b95c7ea886
ruler_niah_multikey_1 a7a601178c924869 ruler_niah_multikey_2 26cdb81e82543f11 ruler_niah_multikey_3 d21e1cd1a9ba7044
ruler_niah_multivalue 9f8f854486d63b93 ruler_niah_multiquery 5867d37d42d7d8a1 niah 78f980be7e337134
ruler_vt 05da48db39f33a55 ruler_cwe 1d2a9133d61f7137 ruler_fwe 3d31de1ca133e79f
scbench_kv f7da8e46302b28ab scbench_prefix_suffix 5221d033197ea5b9 scbench_vt 8db4cc1e8656ff86
scbench_mf a7cfc5a674f185a9 privacy_refusal 4a51e7aaf123c28b privacy_leak ca79f0117febb489
""".split()


def fingerprints(corpus):
    return {name: fingerprint(load(name, corpus=corpus, limit=2, length=4200)[1]) for name in [*NAMES, "niah"]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1200, 4200])
def test_samples_fill_their_length(text_dir, name, length):
    samples = load(name, corpus=text_dir, length=length, limit=3)
    assert [sample.id for sample in samples] == ["0", "1", "2"]
    assert len({sample.context for sample in samples}) == 3
    for sample in samples:
        assert 0.9 * length <= needed_tokens(sample, count_tokens) <= length
        for question in sample.questions:
            assert METRICS[question.metric].check(question) is None
            joined = count_tokens(sample.context + question.text + question.answer_prefix)
            assert joined + question.max_new_tokens <= length


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_depends_on_nothing_but_its_index(text_dir, name):
    draw = partial(load, name, corpus=text_dir, length=4200)
    first = draw(limit=1)
    assert draw(limit=3)[:1] == first and draw(limit=1, seed=43) != first


def test_samples_are_what_they_were(text_dir):
    assert fingerprints(text_dir) == dict(zip(GOLDEN[::2], GOLDEN[1::2], strict=True))


def test_samples_are_the_same_in_another_process(text_dir):
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    code = (
        f"import sys, json; sys.path[:0] = {folders!r}\n"
        f"from test_tasks_generation import fingerprints\nprint(json.dumps(fingerprints({str(text_dir)!r})))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout.splitlines()[-1]) == fingerprints(text_dir)


@pytest.mark.parametrize("name", [*NAMES, "niah", *DOCUMENTS])
def test_lengths_need_a_tokenizer(name):
    with pytest.raises(ValueError, match=f"^{name}: lengths are measured in tokens: give the request a tokenizer"):
        TASKS[name].load(Request())


@pytest.mark.parametrize("name", [*NAMES, "niah"])
def test_a_length_in_which_nothing_fits_is_named(text_dir, name):
    with pytest.raises(ValueError, match=rf"^{name}: needs a length of at least \d+ tokens, got 20: raise"):
        load(name, corpus=text_dir, length=20)


def test_no_samples_may_be_asked_for():
    assert load("ruler_vt", limit=0) == []


@pytest.mark.parametrize("budget", [7, 8, 50, 999, 1000, 12345])
@pytest.mark.parametrize("slope", [1, 3, 26])
def test_growth_ends_within_half_a_percent_or_one_unit(budget, slope):
    made = []

    def make(size):
        made.append(size)
        return size

    size = grow("task", make, lambda size: 7 + slope * size, budget, smallest=0)
    assert 7 + slope * size <= budget
    assert 7 + slope * (size + 1) > budget or budget - (7 + slope * size) <= budget // 200
    assert len(made) <= 2 * budget.bit_length() + 4


def test_growth_with_lengths_that_jump():
    size = grow("task", lambda size: size, lambda size: 100 * (size // 40) + size, 1000, smallest=1)
    assert 100 * (size // 40) + size <= 1000 and size >= 279


def test_growth_has_a_greatest_size():
    assert grow("task", lambda size: size, lambda size: size, 1000, smallest=1, largest=30) == 30
    assert grow("task", lambda size: size, lambda size: size, 20, smallest=1, largest=30) == 20


def test_distinct_values():
    values = iter("abacbdae")
    assert draw_distinct(lambda: next(values), 4, {"b"}) == ["a", "c", "d", "e"]
