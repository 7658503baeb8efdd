"""The page as text, and the files of a report."""

import base64
import hashlib
import json
import re
from importlib import resources

import pytest
from eval_harness import EvaluationRun, ToyTask
from report_records import HOSTILE, made_page, realistic, record, write_results

from kvzip_press.eval.report.web_page import write_report


def data_of(text, name):
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.S).group(1))


def test_texts_of_a_model_stay_text():
    hostile = record("one", "0", "full", 1.0, [1.0], context_excerpt=HOSTILE)
    hostile["questions"][0] |= {"prediction": HOSTILE, "filtered": HOSTILE, "text": "]]>\u2028 \x00 & \ud83d\ude00"}
    text = made_page([hostile], title="</title><script>alert(1)</script>")
    assert "&lt;/title&gt;&lt;script&gt;" in text
    assert text.count("<script") == text.count("</script>") == 3
    data = data_of(text, "records")
    assert data["records"][0]["answers"] == [[HOSTILE, None, 1.0]]
    assert data["contexts"][0]["excerpt"] == HOSTILE
    assert data["contexts"][0]["questions"][0]["text"] == hostile["questions"][0]["text"]


def test_only_the_script_of_the_page_may_run():
    text = made_page([record("one", "0", "full", 1.0, [1.0])])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text).group(1)
    assert policy.startswith("default-src 'none'; img-src data:; ")
    for name, tag in (("style", "<style>(.*?)</style>"), ("script", "<script>(.*?)</script>")):
        content = re.search(tag, text, re.S).group(1)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


def test_nothing_is_fetched_and_contexts_are_held_once():
    text = made_page(realistic(2))
    data = data_of(text, "records")
    assert len(data["contexts"]) == 3 * 2 and len(data["records"]) == 3 * 2 * 51
    bare = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S)
    assert set(re.findall(r"https?://[^\s\"']+", bare)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|\burl\(|\bfetch\(|XMLHttpRequest|<link[^>]+href=\"(?!data:)|\ssrc=", bare)


def test_skipped_contexts_have_no_answers():
    skipped = record("one", "1", "full", 1.0, [], skipped="too long", questions=[])
    text = made_page([record("one", "0", "full", 1.0, [1.0]), skipped])
    assert len(data_of(text, "records")["records"]) == 1
    assert ["one", "full", "1", "too long", "1"] in sum((t["rows"] for t in data_of(text, "report")["tables"]), [])


def test_all_parts_of_the_page_are_packaged():
    tomllib = pytest.importorskip("tomllib")
    root = resources.files("kvzip_press.eval.report")
    names = sorted(file.name for file in (root / "assets").iterdir())
    assert names == ["page.css", "page.html", "page.js", "plots.js", "samples.js"]
    project = tomllib.loads((root / ".." / ".." / "pyproject.toml").read_text(encoding="utf-8"))
    assert "assets/*" in project["tool"]["setuptools"]["package-data"]["kvzip_press.eval.report"]


def test_a_report_is_written_from_a_folder(tmp_path):
    results = write_results(tmp_path / "results", realistic(2), saved={"prefills": 6, "prefills_alone": 306})
    files = write_report(results)
    assert files == [results / "report.md", results / "report.html"]
    text = files[0].read_text(encoding="utf-8")
    assert text.startswith("# SmolLM2-135M-Instruct\n\n## Relative average\n")
    assert "| prefills | 6 | 306 |" in text and "| device | cpu |" in text
    assert write_report(results, tmp_path / "a" / "b") == [tmp_path / "a" / "b" / file.name for file in files]
    assert (tmp_path / "a" / "b" / "report.html").read_bytes() == files[1].read_bytes()


def test_a_report_of_a_real_run(toy, tmp_path):
    run = EvaluationRun(toy, tmp_path / "results")
    run(ToyTask("one"), ToyTask("two", metric="fidelity"), ToyTask("long", context_words=1500))
    (table, html) = (file.read_text(encoding="utf-8") for file in write_report(tmp_path / "results"))
    assert "# toy-model\n" in table and "## Fidelity\n" in table and "the model's window has 1024" in table
    assert "Top-1 agreement with the full cache: mean over 3 contexts" in table
    data = data_of(html, "records")
    assert len(data["contexts"]) == 2 * 3 and len(data["records"]) == 2 * 3 * 3
    assert all(0 < record["kept"] <= 1 and record["seconds"]["prefill"] > 0 for record in data["records"])


def test_no_records_no_report(tmp_path):
    with pytest.raises(FileNotFoundError, match="name the folder"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="no records"):
        write_report(write_results(tmp_path, []))
