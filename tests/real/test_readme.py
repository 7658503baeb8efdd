"""What the README shows is what runs."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from kvzip_press import cli

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


def test_measurement_commands():
    """They take an hour, so here only their arguments are read; `tests/eval` runs the scripts on tiny models."""
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("python -m ")]
    assert len(lines) == 4
    for line in lines:
        _, _, module, *arguments = shlex.split(line)
        assert importlib.import_module(module).parse_arguments(arguments).presses


def test_commands(workplace, capsys):
    """Every `kvzip-press` line; `make demo` and `make test` are run by CI, which also installs the package."""
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("kvzip-press ")]
    lines.sort(key=lambda line: "ask" in line)
    assert len(lines) == 3
    for line in lines:
        assert cli.main(shlex.split(line)[1:]) == 0
    assert (workplace / "heads.safetensors").is_file()
    assert "Helena Voss" in capsys.readouterr().out
