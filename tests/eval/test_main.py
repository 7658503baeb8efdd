import json
import subprocess
import sys

import pytest
from eval_harness import ToyTask

from kvzip_press.eval.command import demo
from kvzip_press.eval.command.main import COMMANDS, main
from kvzip_press.eval.command.parser import OPTIONS
from kvzip_press.eval.presses.registry import PRESSES
from kvzip_press.eval.report import web_page
from kvzip_press.eval.results.folder import SampleLog, read_records, read_run
from kvzip_press.eval.tasks import registry


@pytest.fixture
def toys(monkeypatch):
    """Toy tasks under names of their own."""
    tasks = {name: ToyTask(name) for name in ("toy_a", "toy_b")}
    for name, task in tasks.items():
        monkeypatch.setitem(registry.TASKS, name, task)
    return tasks


@pytest.fixture
def evaluate(toys, toy_dir, tmp_path, capsys):
    """Runs the command on the toy model, expects its status, and gives what it printed."""

    def run(*arguments, status=0):
        assert main([str(argument) for argument in arguments]) == status
        return capsys.readouterr()

    run.results = tmp_path / "results"
    run.model = ["--model", toy_dir, "-o", run.results, "--quiet"]
    return run


def test_run_measures_prints_tables_and_goes_on(evaluate):
    command = ["run", "--tasks", "toys", "--presses", "full", "kvzip", "snapkv", "--ratios", 0.3, 0.5, "--limit", 2]
    printed = evaluate(*command, *evaluate.model)
    assert any(line.split()[:3] == ["toy_a", "kvzip", "0.3"] for line in printed.out.splitlines())
    assert "Score divided by the full cache's" in printed.out or "of full" in printed.out
    # Four contexts: one prefill for the full cache and ours, one for each ratio of SnapKV; one replay for both ratios
    assert "20 cells measured, 0 found finished" in printed.out
    assert "12 prefills and 4 replays; one by one it would have been 20 and 8" in printed.out
    assert len(read_records(evaluate.results)) == 20
    run = read_run(evaluate.results)
    assert run["arguments"]["tasks"] == ["toys"] and run["arguments"]["limit"] == 2
    assert (run["versions"]["kvpress"], run["model"]) == ("0.5.5", read_records(evaluate.results)[0]["model"])
    assert run["saved"] == {"prefills": 12, "replays": 4, "prefills_alone": 20, "replays_alone": 8}

    assert "0 cells measured, 20 found finished" in evaluate(*command, *evaluate.model).out
    assert read_run(evaluate.results)["saved"] == run["saved"]


def test_what_of_a_family_could_not_be_had_is_noted_for_the_report(evaluate, toys, monkeypatch):
    def load(request):
        raise FileNotFoundError("no data")

    monkeypatch.setattr(toys["toy_b"], "load", load)
    printed = evaluate("run", "--tasks", "toys", "--presses", "full", "--limit", 1, *evaluate.model)
    assert "Left out: toy_b: no data" in printed.out
    assert read_run(evaluate.results)["left_out"] == {"toy_b": "no data"}
    elsewhere = evaluate.results / "elsewhere"
    for arguments, folder in ([], evaluate.results), (["-o", elsewhere], elsewhere):
        printed = evaluate("report", evaluate.results, *arguments)
        assert printed.out == f"{folder / 'report.md'}\n{folder / 'report.html'}\n"
        assert "| toy_b | all | all | no data | all |" in (folder / "report.md").read_text()


def test_an_interrupted_run_keeps_its_records_and_its_counts(evaluate, monkeypatch):
    add = SampleLog.add

    def interrupted(self, record):
        add(self, record)
        if len(self.records) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(SampleLog, "add", interrupted)
    printed = evaluate("run", "--tasks", "toys", *evaluate.model, status=130)
    assert "the same command goes on where it was" in printed.err
    assert len(read_records(evaluate.results)) == 2
    run = read_run(evaluate.results)
    assert (run["saved"]["prefills"], run["saved"]["prefills_alone"], run["planned cells"]) == (1, 1, 12)


def test_fidelity_is_told_in_nats(evaluate, monkeypatch):
    monkeypatch.setitem(registry.TASKS, "toy_f", ToyTask("toy_f", metric="fidelity"))
    printed = evaluate("run", "--tasks", "toy_f", "--limit", 1, *evaluate.model)
    assert "toy_f: KL(full, compressed), nats a token" in printed.out


def test_rescore_judges_in_place_or_elsewhere(evaluate, tmp_path):
    evaluate("run", "--tasks", "toy_a", "--presses", "full", "--limit", 2, *evaluate.model)
    before = read_records(evaluate.results)
    printed = evaluate("rescore", evaluate.results, "--scorer", "official", "-o", tmp_path / "other")
    assert "toy_a" in printed.out
    assert read_records(evaluate.results) == before
    others = read_records(tmp_path / "other")
    assert [record["scorer"] for record in others] == ["official"] * 2
    assert read_run(tmp_path / "other")["model"] == read_run(evaluate.results)["model"]
    assert {record["key"] for record in others}.isdisjoint(record["key"] for record in before)
    evaluate("rescore", evaluate.results, "--scorer", "official")
    assert [record["key"] for record in read_records(evaluate.results)] == [record["key"] for record in others]
    # A saved answer that was edited is judged as it now stands
    lines = (evaluate.results / "samples.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    for question in record["questions"]:
        question["prediction"] = f"surely {question['answers'][0]}"
    (evaluate.results / "samples.jsonl").write_text(json.dumps(record) + "\n")
    evaluate("rescore", evaluate.results)
    assert read_records(evaluate.results)[0]["score"] == 1


def test_the_demo_measures_its_grid_by_the_cheap_sweep_and_reports(evaluate, monkeypatch):
    monkeypatch.setattr(web_page, "write_report", lambda results, out: [results / "report.html"])
    assert {task.family for task, _ in demo.demo_grids()[0].tasks} == {"ruler"}
    monkeypatch.setattr(demo, "PARTS", (demo.Part("toy_a", None, 1), demo.Part("toy_b", None, 2)))
    printed = evaluate("demo", *evaluate.model)
    assert "57 cells measured" in printed.out
    assert "27 prefills and 3 replays; one by one it would have been 57 and 27" in printed.out
    assert printed.out.endswith(f"{evaluate.results / 'report.html'}\n")
    cells = {(record["press"], record["ratio"]) for record in read_records(evaluate.results)}
    assert {("full", 1.0), ("kvzip", 0.1), ("kvzip", 1.0), ("snapkv", 0.3), ("observed-attention", 0.5)} <= cells
    assert len(cells) == 19


def test_lists(evaluate):
    tasks, presses = (evaluate(command).out for command in ("tasks", "presses"))
    assert all(name in tasks for name in registry.TASKS)
    assert [line.split()[0] for line in presses.splitlines()[1:]] == list(PRESSES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "toys", "--presses", "snapkw"], "unknown press 'snapkw': did you mean snapkv"),
        (["--tasks", "ruller"], "unknown task 'ruller': did you mean ruler"),
        (["--tasks", "toys", "--presses", "kvzip-head"], "press kvzip-head: kvzip-head needs head scores"),
        (["--tasks", "toys", "--presses", "duo-attention"], "press duo-attention: duo-attention has no pattern"),
        (["--tasks", "toys", "--attention", "eager"], "press kvzip:"),
        (["--tasks", "toys", "--head-scores", "missing.safetensors"], "missing.safetensors"),
        (["--tasks", "toys", "--presses", "KVZIP"], "unknown press 'KVZIP': did you mean kvzip"),
        (["--tasks", "toys", "--backend", "nonsense"], "backend must be one of auto"),
        (["--tasks", "toys", "--presses", "full", "--backend", "nonsense"], "backend must be one of auto"),
        (["--tasks", "toys", "--address", "auto"], "--address and --workers are for --engine ray"),
        (["--tasks", "scbench_kv", "--source", "nowhere"], "nowhere"),
    ],
)
def test_errors_are_one_line_with_value_and_remedy_and_come_before_any_work(evaluate, arguments, message):
    printed = evaluate("run", *arguments, *evaluate.model, status=2)
    assert printed.err.startswith("kvzip-eval: error: ") and message in printed.err
    assert len(printed.err.strip().splitlines()) == 1
    assert not (evaluate.results / "samples.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "--tasks"),
        (["run", "--tasks", "toys", "-o", "x", "--ratios", "1.5"], "must be in (0, 1], got 1.5"),
        (["run", "--tasks", "toys", "-o", "x", "--ratios", "half"], "must be a number, got 'half'"),
        (["run", "--tasks", "toys", "-o", "x", "--limit", "0"], "must be at least 1, got 0"),
        (["run", "--tasks", "toys", "-o", "x", "--shard", "3/2"], "one of 1/2 to 2/2, got 3/2"),
        (["run", "--tasks", "toys", "-o", "x", "--shard", "3"], "written I/N, as in 1/4, got '3'"),
        (["nonsense"], "invalid choice: 'nonsense'"),
    ],
)
def test_wrong_arguments_end_with_status_2_and_a_line(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    printed = capsys.readouterr().err
    assert message in printed and len(printed.splitlines()) == 1


def test_help_does_not_load_torch():
    code = (
        "import sys\nfrom kvzip_press.eval.command.main import main\n"
        "try: main(['run', '--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_every_command_has_its_options():
    assert COMMANDS.keys() == OPTIONS.keys()
