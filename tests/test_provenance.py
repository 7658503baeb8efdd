"""Where a measurement comes from."""

import shutil
import subprocess

import pytest

from kvzip_press.kernels.provenance import commit_of


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_file(monkeypatch, tmp_path):
    own, other = tmp_path / "own.py", tmp_path / "other.py"
    own.write_text("")
    other.write_text("")
    assert commit_of(own) is None  # no repository
    for arguments in ("init -q", "add other.py", "-c user.name=x -c user.email=x@example.org commit -qm x"):
        subprocess.run(["git", *arguments.split()], cwd=tmp_path, check=True)
    assert commit_of(own) is None  # somebody else's repository around an installed package
    found = commit_of(other)
    assert len(found) == 40 and set(found) <= set("0123456789abcdef")
    other.write_text("changed")
    assert commit_of(other) == f"{found}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(other) is None  # no git
