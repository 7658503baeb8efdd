"""What the README shows is what runs."""

import re
import shlex
from pathlib import Path

import pytest

from kvzip_press import cli
from kvzip_press.eval.command.main import COMMANDS
from kvzip_press.eval.command.main import main as eval_main
from kvzip_press.eval.command.parser import build_parser
from kvzip_press.eval.presses.registry import check_name
from kvzip_press.eval.run.grid import find_tasks

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder that looks like the root of a clone, to be written to."""
    (tmp_path / "kvzip_press").symlink_to(ROOT / "kvzip_press")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_examples(workplace, capsys):
    namespace: dict = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert all(fact in printed for fact in ("42 met", "Silver Heron", "Helena Voss")), printed
    assert namespace["context"].kept_fraction == pytest.approx(0.3, abs=1e-4)
    assert namespace["cache"].get_seq_length() == namespace["inputs"]["input_ids"].shape[1]
    assert namespace["output"].shape[1] <= namespace["inputs"]["input_ids"].shape[1] + 8


def test_commands(workplace, capsys):
    """Every `kvzip-press` line; `make demo` and `make test` are run by CI, which also installs the package."""
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("kvzip-press ")]
    lines.sort(key=lambda line: "ask" in line)
    assert len(lines) == 3
    for line in lines:
        assert cli.main(shlex.split(line)[1:]) == 0
    assert (workplace / "heads.safetensors").is_file()
    assert "Helena Voss" in capsys.readouterr().out


def test_evaluation_commands(workplace, capsys):
    """Those for the packaged model are run. Others need a model or a cluster, or make tables for an hour: are read."""
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("kvzip-eval ")]
    assert len(lines) == 10
    for line in lines:
        arguments = shlex.split(line)[1:]
        parsed = build_parser(COMMANDS).parse_args(arguments)
        assert all(map(check_name, getattr(parsed, "presses", [])))
        assert find_tasks(getattr(parsed, "tasks", [])) or not hasattr(parsed, "tasks")
        if "--model" not in arguments and "--seed" not in arguments and arguments[0] != "cost":
            assert eval_main(arguments) == 0
    assert (workplace / "results" / "mine" / "report.html").is_file()
    assert "ruler_niah_single_2" in capsys.readouterr().out
