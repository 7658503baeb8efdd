"""RULER's two tasks that are generated from SQuAD and HotpotQA, on small documents in their formats."""

import json
import random
import re

import pytest
from datasets import Dataset
from task_helpers import fingerprint
from task_helpers import load as load_task

ARTICLES, PARAGRAPHS = 12, 4
ASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


def squad_rows():
    rng = random.Random(3)
    words = "amber basin cedar delta ember fjord grove haven".split()
    rows = []
    for article in range(ARTICLES):
        for paragraph in range(PARAGRAPHS):
            answer = f"answer{article}x{paragraph}"
            text = f"{' '.join(rng.choices(words, k=30))} {answer} {' '.join(rng.choices(words, k=20))}."
            common = {"title": f"article {article}", "context": text}
            asked = {f"Which is {article}-{paragraph}?": [answer, answer, "x"], "Unanswerable?": []}
            rows += [common | {"question": question, "answers": {"text": found}} for question, found in asked.items()]
    return rows


def squad_json():
    data: dict = {}
    for row in squad_rows():
        paragraphs = data.setdefault(row["title"], {})
        asked = {"question": row["question"], "answers": [{"text": text} for text in row["answers"]["text"]]}
        paragraphs.setdefault(row["context"], []).append(asked | {"is_impossible": not asked["answers"]})
    return {
        "data": [
            {"title": title, "paragraphs": [{"context": text, "qas": qas} for text, qas in paragraphs.items()]}
            for title, paragraphs in data.items()
        ]
    }


def hotpot_json():
    rng = random.Random(4)
    titles = [f"title {i}" for i in range(60)]
    return [
        {
            "question": f"Who {i}?",
            "answer": f"person{i}",
            "context": [[t, [f"First of {t}.", f" Then person{i}." if k == 3 else " Then no one."]] for k, t in chosen],
        }
        for i in range(8)
        for chosen in [list(enumerate(rng.sample(titles, 10)))]
    ]


def hotpot_rows():
    return [
        row | {"context": {"title": [t for t, _ in row["context"]], "sentences": [s for _, s in row["context"]]}}
        for row in hotpot_json()
    ]


def load(name, corpus, **options):
    return load_task(name, corpus=corpus, **{"length": 1500, **options})


@pytest.fixture
def squad_dir(tmp_path):
    (tmp_path / "squad.json").write_text(json.dumps(squad_json()), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "needed"), [("ruler_qa_1", r"SQuAD 2.0 .*squad.json"), ("ruler_qa_2", r"HotpotQA .*hotpotqa.json")]
)
def test_without_documents_the_error_says_how_to_give_them(name, needed):
    with pytest.raises(ValueError, match=f"^{name}: generated from the documents of {needed}"):
        load_task(name)


def test_wording_and_documents(squad_dir):
    rows = squad_rows()
    samples = load("ruler_qa_1", squad_dir, limit=6)
    assert [sample.id for sample in samples] == list("012345")
    for sample, row in zip(samples, rows[::2], strict=False):
        (question,) = sample.questions
        assert sample.context.startswith(f"{ASK}\n\nThe following are given documents.\n\nDocument 1:\n")
        assert question.text == f"{ASK}\n\nQuestion: {row['question']} " and question.answer_prefix == "Answer:"
        assert question.answers == (row["answers"]["text"][0], "x")
        assert question.metric == "ruler_any" and question.max_new_tokens == 32
        documents = re.split(r"\n\nDocument \d+:\n", "\n\n" + sample.context.split("documents.\n\n", 1)[1].strip())[1:]
        assert len(documents) == len(set(documents)) and documents.count(row["context"]) == 1
        # The article's other paragraphs come before those of other articles.
        related = {r["context"] for r in rows if r["title"] == row["title"]}
        assert len(documents) > PARAGRAPHS and related <= set(documents) <= {r["context"] for r in rows}


def test_samples_are_what_they_were(squad_dir):
    (squad_dir / "hotpotqa.json").write_text(json.dumps(hotpot_json()), encoding="utf-8")
    prints = [fingerprint(load(name, squad_dir, limit=2)[1]) for name in ("ruler_qa_1", "ruler_qa_2")]
    assert prints == ["b40181f4e25253bb", "fa7e752a63675ab4"]


def test_short_prompts_hold_related_documents_only(squad_dir):
    (sample,) = load("ruler_qa_1", squad_dir, limit=1, length=270)
    related = {row["context"] for row in squad_rows() if row["title"] == "article 0"}
    assert 1 < sum(text in sample.context for text in related) < PARAGRAPHS
    assert not any(row["context"] in sample.context for row in squad_rows() if row["context"] not in related)


def test_there_are_no_more_documents_than_there_are(squad_dir):
    (sample,) = load("ruler_qa_1", squad_dir, limit=1, length=100_000)
    assert sample.context.count("Document ") == ARTICLES * PARAGRAPHS


def test_hotpot_keeps_the_paragraphs_that_come_with_a_question(tmp_path):
    (tmp_path / "hotpotqa.json").write_text(json.dumps(hotpot_json()), encoding="utf-8")
    samples = load("ruler_qa_2", tmp_path, length=400)
    assert len(samples) == 8
    for sample, row in zip(samples, hotpot_json(), strict=True):
        for title, sentences in row["context"]:
            assert f":\n{title}\n{''.join(sentences)}" in sample.context
        assert sample.context.count("Document ") > 10
        assert sample.questions[0].answers == (row["answer"],) and row["answer"] in sample.context


@pytest.mark.parametrize("text", ["", '{"data": [', "[]", '{"data": [{}]}'])
def test_a_damaged_json_file_is_named(squad_dir, text):
    (squad_dir / "squad.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"^ruler_qa_1: .*squad.json is not the JSON of SQuAD 2.0 \(dev\) \("):
        load("ruler_qa_1", squad_dir)


def test_documents_that_are_no_texts_are_named(tmp_path):
    rows = hotpot_json()
    rows[3]["context"][0][1] = "First."
    (tmp_path / "hotpotqa.json").write_text(json.dumps(rows), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^ruler_qa_2: row 3: column context.sentences must be a list of 10 lists of"):
        load("ruler_qa_2", tmp_path)


def test_questions_that_do_not_fit_are_passed_over(squad_dir):
    data = squad_json()
    paragraph = data["data"][0]["paragraphs"][0]
    paragraph["context"] += " long" * 2000
    (squad_dir / "squad.json").write_text(json.dumps(data), encoding="utf-8")
    assert [sample.id for sample in load("ruler_qa_1", squad_dir, limit=2)] == ["1", "2"]
    with pytest.raises(ValueError, match="no question with its documents fits into 50 tokens"):
        load("ruler_qa_1", squad_dir, length=50)


HOTPOTQA = {"path": "hotpotqa/hotpot_qa", "name": "distractor", "split": "validation"}
SQUAD = {"path": "rajpurkar/squad_v2", "split": "validation"}


@pytest.mark.parametrize(
    ("name", "rows", "official", "file", "published"),
    [
        ("ruler_qa_1", squad_rows, squad_json, "dev-v2.0.json", SQUAD),
        ("ruler_qa_2", hotpot_rows, hotpot_json, "hotpot_dev_distractor_v1.json", HOTPOTQA),
    ],
)
def test_all_sources_of_documents_give_the_same(tmp_path, monkeypatch, name, rows, official, file, published):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for folder in ("json", "parquet", "jsonl"):
        (tmp_path / folder).mkdir()
    (tmp_path / "json" / file).write_text(json.dumps(official()), encoding="utf-8")
    data = Dataset.from_list(rows())
    data.to_parquet(tmp_path / "parquet" / "validation-00000.parquet")
    data.to_json(tmp_path / "jsonl" / "validation.jsonl")
    expected = load(name, tmp_path / "json", limit=5)
    assert len(expected) == 5
    for source in (f"json/{file}", "parquet", "jsonl/validation.jsonl"):
        assert load(name, tmp_path / source, limit=5) == expected
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda path, **options: asked.append({"path": path} | options) or data)
    assert load(name, "hub", limit=5) == expected
    assert asked == [published]
