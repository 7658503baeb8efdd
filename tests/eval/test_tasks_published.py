"""Published data: the hub, parquet and jsonl give the same samples, and missing columns are named."""

import json

import pytest
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled, logging
from task_helpers import count_tokens
from task_helpers import load as load_task


def ruler_rows():
    return [
        {
            "context": f"context {task} {i}\n",
            "question": f"What is the special magic number for {i}? ",
            "answer_prefix": "The special magic number is",
            "answer": [str(i), f"{i}0"],
            "task": task,
            "max_new_tokens": 128,
        }
        for i in range(4)
        for task in ("niah_single_1", "qa_1", "vt")
    ]


def squad_rows():
    return [
        {"context": f"paragraph {i}", "question": f"question {i}.{j}?", "answers": {"text": [f"a{i}{j}", "other"]}}
        for i in range(105)
        for j in range(1 + i % 3)
    ]


def gsm8k_rows():
    # The first problem is too short, the second has 72 tokens before its last sentence.
    long = " ".join(["Ann has 3 pears"] * 17) + " and two. She eats one"
    return [
        {"question": "Ann has 3 pears. How many?", "answer": "She has 3.\n#### 3"},
        {"question": f"{long}. How many pears are left?", "answer": "52 - 1 = <<52-1=51>>51\n#### 51"},
        {"question": f"{long} now. How many? ", "answer": "#### 1,051"},
    ]


def kv_rows():
    return [
        {
            "prompts": [f"context {i}", f'Key: "k{i}"\nThe value associated with the specified key is: ', " Key 2"],
            "ground_truth": [f"v{i}", "w"],
        }
        for i in range(3)
    ]


# Columns, rows, the name of a file in a folder, and what is asked of the hub.
CASES = {
    "ruler_vt": (ruler_rows, "4096/test-00000-of-00001", ("simonjegou/ruler", {"data_dir": "4096", "split": "test"})),
    "ruler_qa_1": (ruler_rows, "anything", ("simonjegou/ruler", {"data_dir": "4096", "split": "test"})),
    "squad": (squad_rows, "plain_text/train-00000-of-00001", ("rajpurkar/squad", {"split": "train"})),
    "gsm8k": (gsm8k_rows, "main/test-00000-of-00001", ("openai/gsm8k", {"name": "main", "split": "test"})),
    "scbench_kv_tiny": (
        kv_rows,
        "scbench_kv_tiny",
        ("Jang-Hyun/SCBench-preprocessed", {"data_files": "scbench_kv_tiny.parquet", "split": "train"}),
    ),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(name, source, **options):
    return load_task(name, source=source, **options)


def write(rows, path, suffix):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = Dataset.from_list(rows)
    (data.to_parquet if suffix == ".parquet" else data.to_json)(path.with_name(path.name + suffix))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("limit", [None, 2])
def test_hub_parquet_and_jsonl_give_the_same_samples(tmp_path, monkeypatch, name, limit):
    rows, file, request = CASES[name]
    write(rows(), tmp_path / "parquet" / file, ".parquet")
    write(rows(), tmp_path / "jsonl" / file, ".jsonl")
    expected = load(name, tmp_path / "parquet", limit=limit)
    assert expected and (limit is None or len(expected) == min(2, len(expected)))
    assert load(name, tmp_path / "jsonl", limit=limit) == expected
    assert load(name, tmp_path / "jsonl" / f"{file}.jsonl", limit=limit) == expected

    asked, data = [], Dataset.from_list(rows())
    monkeypatch.setattr("datasets.load_dataset", lambda path, **options: asked.append((path, options)) or data)
    assert load(name, "hub", limit=limit) == expected
    assert asked == [request]


@pytest.mark.parametrize("name", CASES)
def test_missing_columns_are_named(tmp_path, name):
    rows, file, _ = CASES[name]
    first, second, *_ = rows()[0]
    poor = [{key: value for key, value in row.items() if key not in (first, second)} | {"more": 1} for row in rows()]
    write(poor, tmp_path / file, ".jsonl")
    with pytest.raises(ValueError, match=rf"{name}: the data of .* lack the columns .*{first}, {second}.*have .*more"):
        load(name, tmp_path)


def test_missing_files_name_what_is_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"squad: no data in .*should hold plain_text/train\*\.parquet or"):
        load("squad", tmp_path)
    (tmp_path / "data.csv").write_text("context")
    with pytest.raises(ValueError, match=r"squad: .*data.csv must be one of .parquet, .jsonl"):
        load("squad", tmp_path / "data.csv")


def test_ruler_rows(tmp_path):
    write(ruler_rows(), tmp_path / "data", ".parquet")
    samples = load("ruler_vt", tmp_path)
    assert [sample.id for sample in samples] == list("0123")
    assert [sample.context for sample in samples] == [f"context vt {i}\n" for i in range(4)]
    (question,) = samples[2].questions
    assert question.text == "What is the special magic number for 2? "
    assert (question.answer_prefix, question.answers) == ("The special magic number is", ("2", "20"))
    assert (question.metric, question.max_new_tokens) == ("ruler_all", 128)
    assert load("ruler_qa_1", tmp_path)[0].questions[0].metric == "ruler_any"
    with pytest.raises(ValueError, match=r"no task cwe in .*, only \['niah_single_1', 'qa_1', 'vt'\]"):
        load("ruler_cwe", tmp_path)


def test_ruler_has_a_folder_a_length(tmp_path):
    write(ruler_rows()[:3], tmp_path / "4096" / "test", ".parquet")
    write(ruler_rows(), tmp_path / "8192" / "test", ".parquet")
    assert len(load("ruler_vt", tmp_path)) == 1
    assert len(load("ruler_vt", tmp_path, length=8192)) == 4


def test_squad_is_grouped_by_context(tmp_path):
    write(squad_rows(), tmp_path / "train", ".parquet")
    samples = load("squad", tmp_path)
    assert len(samples) == 100
    for i, sample in enumerate(samples):
        assert sample.context == f"paragraph {i}"
        assert [question.text for question in sample.questions] == [f"question {i}.{j}?" for j in range(1 + i % 3)]
        assert [question.answers for question in sample.questions] == [(f"a{i}{j}",) for j in range(1 + i % 3)]
        assert {(q.metric, q.max_new_tokens) for q in sample.questions} == {("include", 256)}
    assert len(load("squad", tmp_path, limit=104)) == 104


def test_gsm8k_asks_the_last_sentence(tmp_path):
    write(gsm8k_rows(), tmp_path / "test", ".jsonl")
    second, third = load("gsm8k", tmp_path)
    assert (second.id, third.id) == ("1", "2")
    assert second.context == " ".join(["Ann has 3 pears"] * 17) + " and two. She eats one."
    (question,) = second.questions
    assert question.text == (
        "Reason and answer the question. You must say the answer in the last sentence beginning with 'The answer is'. "
        "Q: How many pears are left?"
    )
    assert question.answers == ("51",) and question.metric == "gsm" and question.max_new_tokens == 512
    assert third.questions[0].answers == ("1,051",) and third.questions[0].text.endswith("Q: How many?")
    assert count_tokens(second.context) == 75


def test_gsm8k_drops_contexts_below_72_tokens(tmp_path):
    rows = [{"question": f"{'pear ' * n}end. How many?", "answer": "#### 1"} for n in (69, 70, 71)]
    write(rows, tmp_path / "test", ".jsonl")
    # The words, "end" and the full stop
    assert [sample.id for sample in load("gsm8k", tmp_path)] == ["1", "2"]


RULER = ruler_rows()[2]
SQUAD = squad_rows()[0]
GSM8K = gsm8k_rows()[1]
KV = kv_rows()[0]
MIXED = {
    "prompts": ["code", "q1", "q2"],
    "ground_truth": ["def f(): return 1", "w"],
    "lang": "python",
    "repo": "a/b",
    "func_name": ["f", None],
    "task": ["scbench_repoqa", "scbench_kv"],
}
FIDELITY = {"context": "A text.", "questions": ["Why?"]}


@pytest.mark.parametrize(
    ("name", "row", "column", "value", "message"),
    [
        ("ruler_vt", RULER, "answer", "river", "answer must be a list of 1 or more texts .*got 'river'"),
        ("ruler_vt", RULER, "answer", [], r"answer must be a list of 1 or more texts .*got \[\]"),
        ("ruler_vt", RULER, "context", " \n", "context must be a text that is not empty, got"),
        *[
            ("ruler_vt", RULER, "max_new_tokens", value, f"max_new_tokens must be a whole number of .*got {value!r}")
            for value in ("eight", 0, True)
        ],
        ("ruler_vt", RULER, "answer_prefix", None, "answer_prefix must be a text, got None"),
        ("squad", SQUAD, "context", None, "context must be a text that is not empty, got None"),
        ("squad", SQUAD, "answers", {"text": "river"}, "answers.text must be a list .*got 'river'"),
        ("squad", SQUAD, "answers", {"start": [3]}, r"answers.text must be a list .*got answers = \{'start'"),
        ("squad", SQUAD, "answers", ["river"], r"answers.text must be a list .*got answers = \['river'\]"),
        ("squad", SQUAD, "answers", "river", "answers.text must be a list .*got answers = 'river'"),
        ("squad", SQUAD, "answers", None, "answers.text must be a list .*got answers = None"),
        ("gsm8k", GSM8K, "question", None, "question must be a text that is not empty, got None"),
        ("fidelity", FIDELITY, "questions", "What now?", "questions must be a list .*got 'What now[?]'"),
        ("fidelity", FIDELITY, "context", "", "context must be a text that is not empty, got ''"),
        ("scbench_kv", KV, "prompts", "abc", "prompts must be a list of 2 or more texts .*got 'abc'"),
        ("scbench_kv", KV, "prompts", None, "prompts must be a list of 2 or more texts .*got None"),
        ("scbench_kv", KV, "prompts", ["context"], "prompts must be a list of 2 or more texts"),
        ("scbench_kv", KV, "ground_truth", [None, "w"], r"ground_truth must be a list of answers.*got \[None, 'w'\]"),
        ("scbench_kv", KV, "ground_truth", "vw", "ground_truth must be a list of answers.*got 'vw'"),
        ("scbench_repoqa_and_kv", MIXED, "task", ["scbench_kv"], "task must be a list of 2 names out of repoqa"),
        ("scbench_repoqa_and_kv", MIXED, "func_name", [], "func_name must be a text, or a list with a text at place 0"),
    ],
)
def test_values_that_do_not_fit_are_named_with_their_row(tmp_path, name, row, column, value, message):
    file = tmp_path / f"{name}.jsonl"
    file.write_text(f"{json.dumps(row)}\n{json.dumps(row | {column: value})}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"^{name}: row 1: column {message}") as error:
        load(name, file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "data"),
    [
        *[("a.jsonl", data) for data in (b"", b"\n\n", b"no json", b'{"context": \n', b"3\n")],
        *[("a.parquet", data) for data in (b"", b"PAR1 nonsense PAR1")],
    ],
)
def test_files_that_are_damaged_or_empty_are_named(tmp_path, file, data):
    (tmp_path / file).write_bytes(data)
    with pytest.raises(ValueError, match=rf"^squad: .*{file} has no rows or can't be read.*: correct") as error:
        load("squad", tmp_path)
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"context": "one"}\n{"context": "\xff"}\n')
    with pytest.raises(ValueError, match="^fidelity: row 1 is not UTF-8 text"):
        load("fidelity", tmp_path)


def test_numbers_as_text_are_refused(tmp_path):
    write([RULER | {"max_new_tokens": "8"}], tmp_path / "a", ".parquet")
    with pytest.raises(ValueError, match="^ruler_vt: row 0: column max_new_tokens must be a whole .*got '8'"):
        load("ruler_vt", tmp_path)


def test_a_table_without_rows_is_named(tmp_path):
    Dataset.from_dict({"context": [], "question": [], "answers": []}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"^squad: .*a.parquet has no rows"):
        load("squad", tmp_path)


def test_gsm8k_says_why_all_rows_were_left_out(tmp_path):
    write(gsm8k_rows()[:1] * 3, tmp_path / "test", ".jsonl")
    with pytest.raises(ValueError, match="^gsm8k: of 3 rows none has 72 tokens or more before the question"):
        load("gsm8k", tmp_path)


@pytest.mark.parametrize("data", [b"", (json.dumps(SQUAD) + "\n").encode()])
def test_datasets_is_silent_only_while_it_loads(tmp_path, capfd, data):
    (tmp_path / "a.jsonl").write_bytes(data)
    verbosity, disabled = logging.get_verbosity(), are_progress_bars_disabled()
    try:
        load("squad", tmp_path)
    except ValueError:
        assert not data
    assert capfd.readouterr().err == ""
    assert (logging.get_verbosity(), are_progress_bars_disabled()) == (verbosity, disabled)
