import json
import os
import signal
import subprocess
import sys

import pytest

from kvzip_press.eval.results.folder import SampleLog, note_run, read_records, read_run, sha256
from kvzip_press.files import write_atomically

WRITER = """
import sys
from kvzip_press.eval.results.folder import SampleLog
log = SampleLog(sys.argv[1])
number = 0
while True:
    log.add({"key": f"{sys.argv[2]}-{number}", "text": "ü" * 20000})
    number += 1
    print(number, flush=True)
"""


def test_records_are_found_again(tmp_path):
    log = SampleLog(tmp_path / "new")
    log.add({"key": "a", "score": 1.0})
    log.add({"key": "b", "text": "line\nbreak \u2028 ü"})
    # The last record of a key counts, earlier ones stay in the file
    log.add({"key": "a", "score": 2})
    expected = {"a": {"key": "a", "score": 2}, "b": {"key": "b", "text": "line\nbreak \u2028 ü"}}
    assert SampleLog(tmp_path / "new").records == log.records == expected
    assert read_records(tmp_path / "new") == list(expected.values())
    assert (tmp_path / "new" / "samples.jsonl").read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("before", [[], [{"key": "a"}]])
@pytest.mark.parametrize("torn", [b'{"key": "b", "sco', b'{"key": "b"}', b"\xc3", b"{"])
def test_a_torn_last_line_is_left_out_and_written_over(tmp_path, torn, before):
    for record in before:
        SampleLog(tmp_path).add(record)
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(torn)
    assert read_records(tmp_path) == before
    SampleLog(tmp_path).add({"key": "b", "score": 1})
    assert read_records(tmp_path) == [*before, {"key": "b", "score": 1}]


def test_damage_elsewhere_is_named(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"key": "a"}\n{"ke\n{"key": "b"}\n')
    with pytest.raises(ValueError, match="line 2 is not a record: delete that line"):
        SampleLog(tmp_path)
    with pytest.raises(FileNotFoundError, match="kvzip-eval run -o"):
        read_records(tmp_path / "elsewhere")


def kill_writers(folder, names):
    """Let processes write a record each for every number from 0, kill them after 20, and return how many each told."""
    command = [sys.executable, "-c", WRITER, str(folder)]
    writers = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in names]
    try:
        for writer in writers:
            next(line for line in writer.stdout if int(line) >= 20)
    finally:
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
    return [max([20, *map(int, writer.communicate()[0].split())]) for writer in writers]


def test_nothing_that_was_added_is_lost_when_the_process_is_killed(tmp_path):
    (added,) = kill_writers(tmp_path, "a")
    log = SampleLog(tmp_path)
    assert added <= len(log.records) <= added + 1
    assert list(log.records)[:added] == [f"a-{i}" for i in range(added)]
    log.add({"key": "after"})
    assert SampleLog(tmp_path).records == log.records


def test_two_processes_write_to_one_folder(tmp_path):
    added = kill_writers(tmp_path, "ab")
    keys = {record["key"] for record in read_records(tmp_path)}
    assert {f"{name}-{i}" for name, number in zip("ab", added, strict=True) for i in range(number)} <= keys
    SampleLog(tmp_path).add({"key": "after"})  # no lock is left behind


def test_records_are_replaced_all_at_once(tmp_path):
    log = SampleLog(tmp_path)
    log.add({"key": "a", "score": 0})
    log.replace_all({**record, "score": 1} for record in list(log.records.values()))
    assert read_records(tmp_path) == list(log.records.values()) == [{"key": "a", "score": 1}]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock") == ["samples.jsonl"]


def test_an_interrupted_replacement_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_damaged_account_of_the_run_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run.json is damaged: delete it, the records are elsewhere"):
        read_run(tmp_path)


def test_a_folder_remembers_the_latest_run_and_adds_up_what_was_saved(tmp_path):
    assert read_run(tmp_path) == {}
    note_run(tmp_path, {"commit": "1"}, {"prefills": 2, "replays": 1})
    note_run(tmp_path, {"commit": "2"}, left_out={"squad": "no data"})
    note_run(tmp_path, {"commit": "3"}, {"prefills": 3, "replays": 0}, {"gsm8k": "no data either"})
    assert read_run(tmp_path) == {
        "commit": "3",
        "saved": {"prefills": 5, "replays": 1},
        "left_out": {"squad": "no data", "gsm8k": "no data either"},
    }
    assert json.loads((tmp_path / "run.json").read_text()) == read_run(tmp_path)


def test_hashes_do_not_depend_on_the_order_of_names():
    assert sha256({"a": 1, "b": [1, 2]}) == sha256({"b": [1, 2], "a": 1}) != sha256({"a": 1, "b": [2, 1]})
    assert sha256("lone surrogate \ud800")
