"""
Folders as kvpress's evaluation writes them, held against the ones that its own script writes.

That script is in kvpress's source distribution alone: the tests that run it need its folder in KVPRESS_SOURCE.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import datasets
import kvpress
import pandas as pd
import pytest
import yaml
from eval_harness import save_tiny_model

from kvzip_press.eval.command.kvpress_evaluate import main, register_presses
from kvzip_press.eval.command.main import main as kvzip_eval
from kvzip_press.eval.presses.registry import PRESSES, make_press, press_parameters
from kvzip_press.eval.results.folder import read_records
from kvzip_press.eval.results.kvpress_format import init_command, registry_name, write_dataset, write_folders
from kvzip_press.eval.tasks.base import Question, Sample

TASKS = ["ruler_niah_single_1", "ruler_vt"]
LENGTH = 2600
SOURCE = os.environ.get("KVPRESS_SOURCE")
SCRIPT = None if SOURCE is None else Path(SOURCE) / "evaluation" / "evaluate.py"
NEEDED = ("bert_score", "fuzzywuzzy", "jieba", "nltk", "rouge")
needs_source = [
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.skipif(
        SCRIPT is None or not SCRIPT.is_file(),
        reason="KVPRESS_SOURCE is not the unpacked source distribution of kvpress "
        "(pip download --no-binary kvpress --no-deps kvpress==0.5.5)",
    ),
    pytest.mark.skipif(not all(find_spec(name) for name in NEEDED), reason="needs pip install 'kvpress[eval]==0.5.5'"),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", window=8192)


@pytest.fixture(scope="module")
def data(model_dir, tmp_path_factory):
    """A small RULER set, as `kvzip-eval export` writes it."""
    folder = tmp_path_factory.mktemp("data")
    command = ["export", "--tasks", *TASKS, "--length", str(LENGTH), "--limit", "2", "-o", str(folder)]
    assert kvzip_eval([*command, "--model", str(model_dir)]) == 0
    return folder


@pytest.fixture(scope="module")
def measured(model_dir, data, tmp_path_factory):
    """That set, measured by ours."""
    results = tmp_path_factory.mktemp("results")
    command = ["leaderboard", "--source", str(data), "--length", str(LENGTH), "--limit", "2", "--ratios", "0.5"]
    presses = ["--presses", "full", "kvzip", "kvzip-pair-layer", "knorm"]
    # The tasks that the set does not hold are left out
    assert kvzip_eval([*command, *presses, "--model", str(model_dir), "-o", str(results), "--quiet"]) == 0
    return results


def folder_of(results, press, removed="0.50"):
    return results / "kvpress" / f"ruler__{LENGTH}__tiny__{press}__{removed}__fraction0.001"


def test_an_exported_set_is_read_by_datasets_and_by_ours(data, measured):
    rows = datasets.load_dataset(str(data), data_dir=str(LENGTH), split="test").to_pandas()
    assert list(rows.columns) == ["context", "question", "answer_prefix", "answer", "task", "max_new_tokens"]
    assert sorted(rows["task"]) == ["niah_single_1"] * 2 + ["vt"] * 2
    records = [record for record in read_records(measured) if record["press"] == "full"]
    assert {record["task"] for record in records} == set(TASKS)
    assert {record["questions"][0]["text"] for record in records} == set(rows["question"])


def test_folders_hold_what_kvpress_writes(measured):
    names = sorted(path.name for path in (measured / "kvpress").iterdir())
    assert names == [
        f"ruler__{LENGTH}__tiny__{press}__fraction0.001"
        for press in ("knorm__0.50", "kvzip_press__0.50", "kvzip_press_pair_layer__0.50", "no_press__0.00")
    ]
    folder = folder_of(measured, "kvzip_press")
    rows = pd.read_csv(folder / "predictions.csv")
    names = "question answer_prefix answer task max_new_tokens predicted_answer compression_ratio"
    assert list(rows.columns) == names.split()
    assert len(rows) == 4 and set(rows["compression_ratio"]) == {0.5}
    metrics = json.loads((folder / "metrics.json").read_text())
    assert list(metrics) == ["niah_single_1", "vt"]
    records = [r for r in read_records(measured) if r["press"] == "kvzip" and r["task"] == "ruler_vt"]
    mean = sum(record["score"] for record in records) / len(records)
    assert metrics["vt"] == {"string_match": round(100 * mean, 2)}
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["press_init_command"].startswith("KVzipPress(compression_ratio=0.5, level='pair', ")
    assert (config["data_dir"], config["press_name"], config["query_aware"]) == (LENGTH, "kvzip_press", False)
    more = json.loads((folder / "kvzip_eval.json").read_text())
    assert more["budget"] == "plain" and more["prompt"] == "kvpress" and more["contexts"] == 4
    assert more["kept"] == pytest.approx(0.5, abs=0.001)


def test_writing_again_gives_the_same_folders(measured, tmp_path):
    records = read_records(measured)
    first, second = (write_folders(records, tmp_path / name) for name in "ab")
    for a, b in zip(first, second, strict=True):
        for file in ("predictions.csv", "metrics.json", "kvzip_eval.json"):
            assert (a / file).read_bytes() == (b / file).read_bytes()
    assert [path.name for path in write_folders(records, tmp_path / "a")] == [path.name for path in first]


def test_what_the_format_cant_hold_is_refused(measured, tmp_path):
    records = read_records(measured)
    with pytest.raises(ValueError, match="kvpress's format holds RULER alone"):
        write_folders([{**record, "family": "niah"} for record in records], tmp_path)
    mixed = [*records, {**records[0], "prompt": "paper"}]
    with pytest.raises(ValueError, match="different sources, seeds, prompts, budgets or ratios"):
        write_folders(mixed, tmp_path)
    # Both would be named 0.12
    close = [{**records[0], "press": "kvzip", "ratio": ratio} for ratio in (0.88, 0.879)]
    with pytest.raises(ValueError, match="kvzip_press__0.12 would hold records of different .* ratios"):
        write_folders(close, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_last_of_some_shards_writes_what_an_unsharded_run_would(model_dir, data, measured, tmp_path):
    command = ["leaderboard", "--model", str(model_dir), "--source", str(data), "--length", str(LENGTH), "--quiet"]
    command += ["--presses", "kvzip", "--ratios", "0.5", "-o", str(tmp_path)]
    for shard in ("1/2", "2/2"):
        assert kvzip_eval([*command, "--shard", shard]) == 0
    folders = (folder_of(results, "kvzip_press") for results in (tmp_path, measured))
    ours, whole = (pd.read_csv(folder / "predictions.csv").sort_values(["task", "question"]) for folder in folders)
    pd.testing.assert_frame_equal(ours.reset_index(drop=True), whole.reset_index(drop=True))


def test_query_aware_runs_are_named_so_behind_the_fraction(measured, tmp_path):
    record = next(record for record in read_records(measured) if record["press"] == "kvzip")
    (folder,) = write_folders([{**record, "protocol": "aware"}], tmp_path)
    assert folder.name == f"ruler__{LENGTH}__tiny__kvzip_press__0.50__fraction0.000__query_aware"


def test_a_whole_set_has_no_fraction_in_its_name(measured, tmp_path):
    record = next(record for record in read_records(measured) if record["press"] == "full")
    whole = [{**record, "model": "Qwen/Qwen3-8B", "length": None} for _ in range(6500)]
    (folder,) = write_folders(whole, tmp_path)
    assert folder.name == "ruler__4096__Qwen--Qwen3-8B__no_press__0.00"


def test_samples_are_needed(tmp_path):
    with pytest.raises(ValueError, match="no samples"):
        write_dataset({}, tmp_path, 4096)
    sample = Sample("0", "context", (Question("q", ("a", "b"), "ruler_all", 3, "prefix"),))
    rows = pd.read_parquet(write_dataset({"ruler_vt": [sample]}, tmp_path, 4096))
    context, asked, prefix, answers, *others = rows.iloc[0]
    assert (context, asked, prefix, list(answers), others) == ("context", "q", "prefix", ["a", "b"], ["vt", 3])


def test_names_in_the_registry_are_distinct_and_never_kvpress_own_for_ours():
    names = {press: registry_name(press) for press in PRESSES}
    assert len(set(names.values())) == len(names)
    known = {"kvzip": "kvzip_press", "kvzip-l2-pair-layer": "kvzip_press_l2_pair_layer", "kvpress-kvzip": "kvzip"}
    assert known.items() <= names.items()
    assert all(name.startswith("kvzip_press") for press, name in names.items() if press.startswith("kvzip"))


def test_commands_are_written_as_they_would_be_typed():
    for name in ("snapkv", "adakv-snapkv", "knorm", "kvpress-kvzip"):
        command = init_command(press_parameters(make_press(name, 0.4, None)), 0.6)
        made = eval(command, dict(vars(kvpress)))
        expected = make_press(name, 0.4, None)
        assert made.compression_ratio == pytest.approx(expected.compression_ratio)
        expected.compression_ratio = made.compression_ratio
        assert repr(made) == repr(expected)
    assert init_command({}, 0.0) == "None"


def test_all_of_ours_are_registered_but_heads():
    registry = {}
    register_presses(registry)
    assert registry["kvzip_press_pair_layer"].level == "pair-layer"
    assert len(registry) == sum(press.startswith("kvzip") for press in PRESSES) - 1


@pytest.mark.parametrize("path", ["missing/evaluate.py", __file__])
def test_a_wrong_path_is_answered_with_how_to_get_the_script(path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([path])
    message = capsys.readouterr().err
    assert "is not kvpress's evaluation/evaluate.py" in message
    assert "pip download --no-binary kvpress --no-deps kvpress==0.5.5" in message


def test_a_script_gets_its_own_options_our_presses_and_the_data(tmp_path, monkeypatch, capsys):
    (tmp_path / "evaluate_registry.py").write_text("PRESS_REGISTRY, DATASET_REGISTRY = {'knorm': 1}, {'ruler': 'hub'}")
    (tmp_path / "evaluate.py").write_text(
        "import sys\nfrom evaluate_registry import *\n"
        "print(sys.argv[1:], DATASET_REGISTRY['ruler'], {'knorm', 'kvzip_press'} <= set(PRESS_REGISTRY))\n"
    )
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.delitem(sys.modules, "evaluate_registry", raising=False)
    main([str(tmp_path / "evaluate.py"), "--press_name", "kvzip_press", "--data_folder=set", "--data_dir", "4096"])
    assert capsys.readouterr().out == "['--press_name', 'kvzip_press', '--data_dir', '4096'] set True\n"


def run_theirs(model_dir, data, output, press, removed):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kvzip_press.eval.command.kvpress_evaluate", str(SCRIPT), f"--data_folder={data}"]
    options = {"dataset": "ruler", "data_dir": LENGTH, "model": model_dir, "device": "cpu", "press_name": press}
    options |= {"compression_ratio": removed, "output_dir": output}
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=output.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = output.glob(f"*__{press}__*")
    return folder


class TestKvpressOwnScript:
    """kvpress's evaluate.py, unmodified, on the same data."""

    pytestmark = needs_source

    @pytest.mark.parametrize(("press", "removed"), [("kvzip_press", 0.5), ("knorm", 0.5), ("no_press", 0.0)])
    def test_it_finds_the_same_answers_and_scores_as_ours(self, model_dir, data, measured, tmp_path, press, removed):
        theirs = run_theirs(model_dir, data, tmp_path / "out", press, removed)
        ours = folder_of(measured, press, f"{removed:.2f}")
        assert json.loads((ours / "metrics.json").read_text()) == json.loads((theirs / "metrics.json").read_text())
        rows = [pd.read_csv(folder / "predictions.csv") for folder in (ours, theirs)]
        assert sorted(rows[0].columns) == sorted(rows[1].columns)
        order = ["task", "question", "answer"]
        a, b = (table[sorted(table.columns)].sort_values(order).reset_index(drop=True) for table in rows)
        pd.testing.assert_frame_equal(a, b)
        configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (ours, theirs)]
        assert list(configs[0]) == list(configs[1])
        differing = {name for name in configs[0] if configs[0][name] != configs[1][name]}
        assert differing <= {"model", "output_dir", "fraction", "model_kwargs", "press_init_command"}
