import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import kvpress
import pytest
import torch
from eval_harness import EvaluationRun, ToyTask, words

from kvzip_press import HeadScores, KVzipPress, load_model
from kvzip_press.eval.presses.registry import make_press
from kvzip_press.eval.results.answers import key_of
from kvzip_press.eval.results.folder import read_records
from kvzip_press.eval.run import engine_local
from kvzip_press.eval.run.grid import Grid, find_tasks, load_samples, make_units
from kvzip_press.eval.run.identity import Identifier, RunIdentity, model_identity
from kvzip_press.eval.run.sweep import Effort
from kvzip_press.eval.run.warm_up import warm_up
from kvzip_press.eval.tasks.base import Question, Request, Sample
from kvzip_press.kernels.provenance import package_commit

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(toy, tmp_path):
    return EvaluationRun(toy, tmp_path / "results")


class OneQuestion(ToyTask):
    """Contexts with one question each."""

    def load(self, request):
        return [Sample(s.id, s.context, s.questions[:1]) for s in super().load(request)]


def by_cell(records):
    return {(r["task"], r["sample"], r["press"], r["ratio"], r["protocol"]): r for r in records}


def answers(record):
    return [question["prediction"] for question in record["questions"]]


def test_records_hold_what_the_report_reads(run, toy):
    outcome = run()
    assert (outcome.measured, outcome.found, len(outcome.records)) == (9, 0, 9)
    record = by_cell(read_records(run.folder))["toy", "1", "kvzip", 0.3, "agnostic"]
    sample = ToyTask().load(Request())[1]
    names = "model dtype attention task family task_version source imitation length seed prompt scorer skipped version"
    expected = ["toy-model", "float32", "sdpa", "toy", "toys", 1, "generated", False, None, 42, "paper", "paper", None]
    assert [record[name] for name in names.split()] == [*expected, "0.1.0"]
    assert (record["commit"], record["context_excerpt"]) == (package_commit(), sample.context)
    assert record["kept_pairs"] == round(0.3 * record["total_pairs"])
    assert record["kept"] == record["kept_pairs"] / record["total_pairs"]
    assert record["total_pairs"] == 3 * 2 * len(toy[1].encode(sample.context, add_special_tokens=False))
    assert 0 < record["cache_bytes"] < record["full_bytes"] == 2 * 3 * 2 * 16 * 4 * record["context_tokens"]
    assert list(record["seconds"]) == ["prefill", "score", "evict", "answer"]
    assert len(record["key"]) == len(record["context_sha256"]) == 64
    assert record["identity"]["parameters"]["level"] == "pair"
    first = record["questions"][0]
    assert {"text", "answer_prefix", "answers", "prediction", "filtered", "metric", "score", "details"} <= first.keys()
    assert record["score"] == sum(question["score"] for question in record["questions"]) / 2
    for line in (run.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.peer
@pytest.mark.parametrize("name", ["full", "kvzip", "snapkv", "adakv-snapkv", "kvpress-kvzip", "knorm"])
def test_answers_are_those_of_kvpress_pipeline(toy, tmp_path, name):
    """Query-agnostic, all questions of a context asked of one compressed cache."""
    model, tokenizer = toy
    run = EvaluationRun(toy, tmp_path, budget="plain")
    cells = by_cell(run(presses=(name,), ratios=(0.4, 0.7), prompt="kvpress").records)
    assert [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers] == [None] * 3
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    for sample in ToyTask().load(Request()):
        asked = ["\n\n" + question.text for question in sample.questions]
        for ratio in (1.0,) if name == "full" else (0.4, 0.7):
            press = make_press(name, ratio, tokenizer)
            theirs = pipe(sample.context, questions=asked, answer_prefix="It is", press=press, max_new_tokens=4)
            assert answers(cells["toy", sample.id, name, ratio, "agnostic"]) == theirs["answers"]


def test_questions_do_not_see_one_another(run):
    class Reversed(ToyTask):
        def load(self, request):
            return [Sample(s.id, s.context, s.questions[::-1]) for s in super().load(request)]

    forward = by_cell(run(ToyTask("forward")).records)
    backward = by_cell(run(Reversed("backward")).records)
    for cell, record in forward.items():
        assert answers(record) == answers(backward[("backward", *cell[1:])])[::-1]


def test_a_press_that_knows_the_question_compresses_it_with_the_context(toy, tmp_path):
    """As kvpress's evaluation does for `query_aware`: a compression for each question."""
    model, tokenizer = toy
    run = EvaluationRun(toy, tmp_path, budget="plain")
    outcome = run(presses=("kvzip", "full"), ratios=(0.4,), prompt="kvpress", protocols=("aware",))
    assert run.engine.effort == Effort(prefills=6, replays=6, prefills_alone=12, replays_alone=6)
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    for sample in ToyTask().load(Request()):
        for name, press in (("kvzip", KVzipPress(ratio=0.4, tokenizer=tokenizer)), ("full", None)):
            record = by_cell(outcome.records)["toy", sample.id, name, 0.4 if press else 1.0, "aware"]
            theirs = [
                pipe(f"{sample.context}\n\n{q.text}", answer_prefix="It is", press=press, max_new_tokens=4)["answer"]
                for q in sample.questions
            ]
            assert answers(record) == theirs
            assert record["kept"] == pytest.approx(1 if press is None else 0.4, abs=0.01)


def test_a_cache_compressed_with_the_first_question_is_asked_the_others(toy, tmp_path):
    model, tokenizer = toy
    run = EvaluationRun(toy, tmp_path)
    outcome = run(ToyTask(), OneQuestion("one"), ratios=(0.4,), prompt="kvpress", protocols=("reuse",))
    cells = by_cell(outcome.records)
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    for sample in ToyTask().load(Request()):
        first, second = sample.questions
        press = KVzipPress(ratio=0.4, tokenizer=tokenizer)
        context = f"{sample.context}\n\n{first.text}"
        theirs = pipe(context, question=f"\n\n{second.text}", answer_prefix="It is", press=press, max_new_tokens=4)
        record = cells["toy", sample.id, "kvzip", 0.4, "reuse"]
        assert answers(record) == [theirs["answer"]]
        assert [question["text"] for question in record["questions"]] == [second.text]
        assert "two or more questions" in cells["one", sample.id, "kvzip", 0.4, "reuse"]["skipped"]


def test_finished_cells_are_not_measured_again(run):
    run(ratios=(0.3,), limit=2)
    assert len(run.log.records) == 4
    outcome = run(ratios=(0.3, 0.6))
    assert (outcome.measured, outcome.found) == (5, 4)
    # Two of the three contexts had only one ratio to go: one prefill each
    assert run.engine.effort.prefills == 3
    assert len((run.folder / "samples.jsonl").read_text().splitlines()) == 9
    assert run(ratios=(0.3, 0.6)).measured == 0


def test_everything_that_decides_an_answer_makes_it_another(toy, toy_dir, tmp_path):
    model, _ = toy
    base = {"backend": "auto", "budget": "equal", "scorer": "paper"}
    grid = {"presses": ("kvzip",), "ratios": (0.3,)}
    sample = Sample("0", "some words", (Question("Which?", ("x",), "include", 4),))

    def keys(model=model, name="m", task=None, sample=sample, head_scores=None, run_changes=None, **changes):
        run = RunIdentity.of(model, name, **{**base, **(run_changes or {})})
        length = changes.pop("length", None)
        units = make_units([(task or ToyTask(), length, sample)], Grid([], **{**grid, **changes}))
        identifier = Identifier(run, head_scores)
        return {key_of(identifier.identity(unit, variant)) for unit in units for variant in unit.variants}

    class Newer(ToyTask):
        version = 2

    class Other(ToyTask):
        instruction = "Read this."

    torch.manual_seed(1)
    tuned = load_model(str(toy_dir))[0]
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    low, high = (HeadScores(torch.full((3, 2), value)) for value in (0.1, 0.2))
    bfloat16, eager = {"dtype": torch.bfloat16}, {"attn_implementation": "eager"}
    question = sample.questions[0]
    one_other = {
        "name": ["n"],
        "model": [tuned, *(load_model(str(toy_dir), **how)[0] for how in (bfloat16, eager))],
        "run_changes": [{"backend": "torch"}, {"budget": "plain"}, {"window": 9}, {"scorer": "official"}],
        "presses": [("kvzip-l2",), ("kvzip-pair-layer",), ("kvzip-full-512",), ("snapkv",)],
        "ratios": [(0.4,)],
        "protocols": [("aware",)],
        "prompt": ["kvpress"],
        "task": [ToyTask("other"), Newer(), Other()],
        "source": ["hub"],
        "length": [100],
        "seed": [1],
        "sample": [
            Sample("1", sample.context, sample.questions),
            Sample("0", "other words", sample.questions),
            Sample("0", sample.context, (replace(question, text="What?"),)),
            Sample("0", sample.context, (replace(question, answer_prefix="It"),)),
        ],
        "max_new_tokens": [2],
    }
    variations = [{}, *({"presses": ("kvzip-head",), "head_scores": scores} for scores in (low, high))]
    variations += [{name: value} for name, values in one_other.items() for value in values]
    found = [keys(**variation) for variation in variations]
    assert all(len(of_one) == 1 for of_one in found)
    assert len(set.union(*found)) == len(variations)
    assert keys(sample=Sample("0", sample.context, (replace(question),))) == found[0]
    again = load_model(str(toy_dir))[0]
    assert keys(model=again) == found[0]
    again.set_attn_implementation("eager")
    assert model_identity(again, "m") == model_identity(model, "m")


def test_keys_are_those_of_folders_that_are_already_saved():
    """Otherwise they would be measured anew: raise a task's version, or the package's, where an answer changes."""
    run = RunIdentity({"name": "m"}, "float32", "sdpa", "cpu", "auto", "equal", "paper", version="0.1.0")
    sample = Sample("0", "some words", (Question("Which?", ("x",), "include", 4, details={"depth": 0.5}),))
    (unit,) = make_units([(ToyTask(), None, sample)], Grid([], ("full",), ()))
    identity = Identifier(run).identity(unit, ("full", 1.0))
    assert key_of(identity) == "3c3a6d1d2061bcd3dfcdf8930b400529bf8f7efaefe7dc5d274b92c037f320f1"
    official = "e82240b20f9304b87f86367b44ebd7ba4b983eaf3f093abdebaaf0dea10da854"
    assert key_of(identity, scorer="official") == official


def test_a_run_that_was_killed_goes_on_where_it_was(toy_dir, toy, tmp_path):
    ratios = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
    code = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from eval_harness import EvaluationRun
from kvzip_press.eval.results.folder import SampleLog
from kvzip_press import load_model
add = SampleLog.add
def told(self, record):
    add(self, record)
    print(len(self.records), flush=True)
SampleLog.add = told
EvaluationRun(load_model({str(toy_dir)!r}), Path({str(tmp_path)!r}))(ratios={ratios})
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    for line in process.stdout:
        if int(line) == 5:
            os.kill(process.pid, signal.SIGKILL)
            break
    process.stdout.close()
    process.wait()
    before = read_records(tmp_path)
    assert 5 <= len(before) < 24
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"key": "torn')

    outcome = EvaluationRun(toy, tmp_path)(ratios=ratios)
    assert (outcome.found, outcome.measured) == (len(before), 24 - len(before))
    assert read_records(tmp_path)[: len(before)] == before
    alone = EvaluationRun(toy, tmp_path / "alone")(ratios=ratios)
    assert [answers(record) for record in outcome.records] == [answers(record) for record in alone.records]


def test_shards_share_the_samples_among_them(toy, tmp_path):
    tasks = ToyTask("a"), ToyTask("b")
    whole = EvaluationRun(toy, tmp_path / "whole")(*tasks)
    parts = [EvaluationRun(toy, tmp_path / "parts")(*tasks, shard=(part, 4)) for part in (1, 2, 3, 4)]
    assert [part.measured for part in parts] == [6, 6, 3, 3]
    merged = read_records(tmp_path / "parts")
    assert {r["key"]: answers(r) for r in merged} == {r["key"]: answers(r) for r in whole.records}


def test_contexts_beyond_the_models_window_are_skipped_with_the_reason_not_cut(toy, tmp_path):
    run = EvaluationRun(toy, tmp_path, window=230)
    outcome = run(ToyTask("short", context_words=60), ToyTask("long", context_words=170), limit=1)
    cells = by_cell(outcome.records)
    assert cells["short", "0", "kvzip", 0.3, "agnostic"]["skipped"] is None
    for press, ratio in (("full", 1.0), ("kvzip", 0.3), ("kvzip", 0.6)):
        record = cells["long", "0", press, ratio, "agnostic"]
        needed = record["context_tokens"] + len("\n\nQ: Which word is 0?\n<assistant>It is") + 4
        assert record["skipped"] == f"needs {needed} tokens, the model's window has 230"
        assert record["score"] is record["kept"] is record["seconds"] is None
        assert record["questions"] == []
    assert run.engine.effort.prefills == 1
    assert run(ToyTask("long", context_words=170), limit=1).measured == 0
    wider = EvaluationRun(toy, tmp_path, window=400)(ToyTask("long", context_words=170), limit=1)
    assert wider.measured == 3 and not any(record["skipped"] for record in wider.records)


def test_a_press_of_kvpress_that_cant_do_a_context_is_skipped_there_alone(toy, tmp_path):
    """SnapKV's window of 32 tokens is longer than a short context."""
    run = EvaluationRun(toy, tmp_path)
    grid = {"presses": ("snapkv", "knorm"), "ratios": (0.6,), "prompt": "kvpress", "limit": 1}
    cells = by_cell(run(ToyTask(context_words=4), **grid).records)
    assert "should be greater than the window size 32" in cells["toy", "0", "snapkv", 0.6, "agnostic"]["skipped"]
    assert cells["toy", "0", "knorm", 0.6, "agnostic"]["skipped"] is None
    grid["protocols"] = ("aware",)
    assert len(run(ToyTask(context_words=4), **grid).records) == 2


def test_a_press_of_kvpress_that_breaks_does_not_end_the_run(toy, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(kvpress.KnormPress, "score", broken)
    outcome = EvaluationRun(toy, tmp_path)(presses=("full", "knorm"), limit=1)
    failure = "the press failed: RuntimeError: shapes differ"
    assert [record["skipped"] for record in outcome.records] == [None, failure, failure]

    monkeypatch.undo()
    mended = EvaluationRun(toy, tmp_path)(presses=("full", "knorm"), limit=1)
    assert (mended.measured, mended.found) == (2, 1), "what failed is measured again, what did not is not"
    assert [record["skipped"] for record in mended.records] == [None] * 3
    assert [record["skipped"] for record in read_records(tmp_path)] == [None] * 3

    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(kvpress.KnormPress, "score", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        EvaluationRun(toy, tmp_path / "memory")(presses=("knorm",), limit=1)


class Missing(ToyTask):
    """Its data can't be had."""

    def load(self, request):
        raise FileNotFoundError(f"{self.name}: needs documents")


@pytest.mark.parametrize(
    ("task", "grid", "message"),
    [
        (ToyTask(), {"limit": 1, "shard": (2, 2)}, "the shard 2/2 holds no contexts"),
        (Missing(), {"named": False}, "no contexts to measure on: toy: needs documents"),
        (ToyTask(metric="nonsense"), {"presses": ("knorm",)}, "sample 0 of toy: unknown metric 'nonsense'"),
        (ToyTask(metric="mf"), {}, "sample 0 of toy: the answer 'river' normalises to nothing"),
    ],
)
def test_what_cant_be_measured_or_judged_is_refused_before_any_work(run, task, grid, message):
    with pytest.raises(ValueError, match=message):
        run(task, **grid)
    assert run.engine.effort == Effort()


def test_tasks_of_a_family_that_cant_be_had_are_left_out_named_ones_are_not(toy):
    samples, left_out = load_samples(Grid([(ToyTask(), False), (Missing("missing"), False)], (), ()), toy[1])
    assert len(samples) == 3
    assert left_out == {"missing": "needs documents"}
    with pytest.raises(FileNotFoundError, match="needs documents"):
        load_samples(Grid([(Missing("missing"), True)], (), ()), toy[1])
    (task, named), (other, by_itself) = find_tasks(["gsm8k", "niah"])[0], find_tasks(["RULER-vt"])[0]
    assert (task.name, named) == ("gsm8k", True) and (other.name, by_itself) == ("ruler_vt", True)
    assert not any(named for _, named in find_tasks(["ruler"]))


def test_saved_answers_are_judged_anew_instead_of_asked_again(toy, tmp_path):
    first = EvaluationRun(toy, tmp_path)(ToyTask(metric="vt"))
    other = EvaluationRun(toy, tmp_path, scorer="official")
    outcome = other(ToyTask(metric="vt"))
    assert (outcome.measured, outcome.rescored, outcome.found) == (0, 9, 0)
    assert {record["scorer"] for record in outcome.records} == {"official"}
    assert [answers(a) for a in outcome.records] == [answers(b) for b in first.records]
    assert other(ToyTask(metric="vt")).found == 9


def test_whole_heads_are_measured_with_their_scores(toy, tmp_path):
    run = EvaluationRun(toy, tmp_path, head_scores=HeadScores(torch.rand(3, 2)))
    outcome = run(presses=("kvzip-head",), ratios=(0.5,), limit=1)
    assert outcome.records[0]["kept"] == 0.5
    assert run.engine.effort.replays == 0


def test_answers_can_be_cut_shorter_than_the_task_would(run):
    outcome = run(max_new_tokens=2, limit=1)
    assert {q["details"]["answer_tokens"] for r in outcome.records for q in r["questions"]} <= {1, 2}


def test_long_contexts_are_shown_by_their_ends(run, toy):
    outcome = run(ToyTask(context_words=200), limit=1, presses=("full",))
    context = words(200, 4200)
    assert outcome.records[0]["context_excerpt"] == f"{context[:400]} [...] {context[-400:]}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"presses": ("kvzp",)}, "unknown press 'kvzp'"),
        ({"ratios": (0.0,)}, r"ratios are kept fractions in \(0, 1\], got 0.0"),
        ({"protocols": ("query",)}, "protocols are agnostic, aware, reuse, got 'query'"),
        ({"prompt": "chat"}, "must be one of paper, kvpress, got 'chat'"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"shard": (3, 2)}, "one of 1/2 to 2/2, got 3/2"),
    ],
)
def test_grids_are_checked_at_once(changes, message):
    with pytest.raises(ValueError, match=message):
        Grid([], **{"presses": ("full",), "ratios": (0.3,), **changes})


def test_each_of_our_presses_is_warmed_up_once_and_not_counted(toy, tmp_path, monkeypatch):
    """What is compiled at first use would be in the first cell's time."""
    warmed = []

    def noted(model, chat, presses, **options):
        warmed.append(sorted(presses))
        warm_up(model, chat, presses, **options)

    monkeypatch.setattr(engine_local, "warm_up", noted)
    run = EvaluationRun(toy, tmp_path)
    run(presses=("full", "snapkv"), ratios=(0.3,), limit=2)
    assert warmed == []
    run(presses=("full", "snapkv", "kvzip", "kvzip-int4"), ratios=(0.3, 0.5), limit=2)
    assert warmed == [["kvzip", "kvzip-int4"]]
    # Two contexts: a prefill for ours, another for the new ratio of SnapKV
    assert run.engine.effort.prefills == 4
    assert run.engine.effort.replays == 2
