import json
import re
from collections import Counter
from statistics import median

import pytest
from datasets import Dataset
from task_helpers import count_tokens, load

from kvzip_press.eval.metrics.registry import METRICS
from kvzip_press.eval.tasks.generation import needed_tokens

UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def generate(name):
    return load(f"scbench_{name}", limit=3, length=3000)


def read(tmp_path, monkeypatch, name, *rows):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    Dataset.from_list(list(rows)).to_parquet(tmp_path / f"{name}.parquet")
    return load(name, source=tmp_path)


@pytest.mark.parametrize(("size", "tokens"), [("_tiny", 8_000), ("_short", 20_000), ("_mid", 60_000), ("", 120_000)])
def test_sizes(size, tokens):
    (sample,) = load(f"scbench_mf{size}", limit=1)
    assert 0.99 * tokens <= needed_tokens(sample, count_tokens) <= tokens


def test_key_value_pairs():
    for sample in generate("kv"):
        task, data = sample.context.split("\n\nJSON data:\n")
        assert task == "Extract the value corresponding to the specified key in the JSON object below."
        pairs = json.loads(data)
        uuids = [*pairs, *pairs.values()]
        assert len(pairs) > 40 and len(set(uuids)) == 2 * len(pairs) and all(map(UUID.fullmatch, uuids))
        assert len({question.text for question in sample.questions}) == 5
        for question in sample.questions:
            key = re.fullmatch(r'Key: "(.*)"\nThe value associated with the specified key is:', question.text)[1]
            assert question.answers == (pairs[key],) and sample.context.count(pairs[key]) == 1
            assert (question.metric, question.max_new_tokens) == ("include", 96)


def test_statistics_of_numbers():
    for sample in generate("mf"):
        numbers = json.loads(sample.context.split("Below is a list of numbers.\n\n")[1])
        assert len(numbers) % 2 == 1 and len(numbers) > 500
        assert 0 <= min(numbers) < 20 and 80 <= max(numbers) <= 99
        values = sorted(set(numbers))
        expected = {
            "largest": values[-1],
            "second largest": values[-2],
            "third largest": values[-3],
            "smallest": values[0],
            "second smallest": values[1],
            "third smallest": values[2],
            "median": median(numbers),
        }
        asked = {}
        for question in sample.questions:
            match = re.fullmatch(
                r"What is the (.*) number of the list\?\n\nYou should answer with only one number, no other words\. "
                r"The \1 number of the list is:",
                question.text,
            )
            asked[match[1]] = int(question.answers[0])
            assert (question.metric, question.max_new_tokens) == ("mf", 32)
        assert asked == expected


def test_variable_chains():
    for sample in generate("vt"):
        task, empty, text = sample.context.split("\n", 2)
        assert task == "Memorize and track the chain(s) of variable assignment hidden in the following text."
        assert empty == "" and text.count("VAR ") == 5 * 9 and len(sample.questions) == 5
        names = [name for question in sample.questions for name in question.answers]
        assert len(set(names)) == 25
        for question in sample.questions:
            value = re.fullmatch(
                r"Question: Find all variables that are assigned the value (\d{5}) in the text above\.", question.text
            )[1]
            assert question.answer_prefix == (
                "Answer: According to the chain(s) of variable assignment in the text above, "
                f"5 variables are assigned the value {value}, they are:"
            )
            assert (question.metric, question.max_new_tokens) == ("vt", 96)
            first, *others = question.answers
            places = [text.index(f"VAR {first} = {value}\n")]
            for before, name in zip(question.answers, others, strict=False):
                places.append(text.index(f"VAR {name} = VAR {before} \n"))
            assert places == sorted(places)


def test_prefixes_and_suffixes():
    for sample in generate("prefix_suffix"):
        strings = sample.context.split("Below is a list of strings.\n\n")[1].split("\n")
        assert len(strings) == len(set(strings)) > 300 and all(re.fullmatch("[a-z]{6,24}", text) for text in strings)
        begins, ends = Counter(text[:3] for text in strings), Counter(text[-3:] for text in strings)
        for question in sample.questions:
            match = re.fullmatch(
                r'Find the string that begins with "(.{3})" and ends with "(.{3})"\. The string is:', question.text
            )
            begin, end = match.groups()
            assert question.answers == tuple(t for t in strings if t.startswith(begin) and t.endswith(end))
            # Neither half of the query is enough.
            assert begins[begin] > 5 and ends[end] > 5
            assert (question.metric, question.max_new_tokens) == ("include", 96)


def test_published_queries_are_stripped_and_answers_joined(tmp_path, monkeypatch):
    row = {"prompts": ["context ", "\nfirst: ", "second"], "ground_truth": [["ABCDE", "FGHIJ"], ["KLMNO"]]}
    (sample,) = read(tmp_path, monkeypatch, "scbench_vt", row)
    assert sample.context == "context " and [q.text for q in sample.questions] == ["first:", "second"]
    assert [q.answers for q in sample.questions] == [("ABCDE, FGHIJ",), ("KLMNO",)]
    assert METRICS["vt"]("ABCDE", sample.questions[0]).value == 0.5


def test_published_numbers(tmp_path, monkeypatch):
    (sample,) = read(tmp_path, monkeypatch, "scbench_mf_short", {"prompts": ["[1, 2]", "q"], "ground_truth": [2]})
    assert sample.questions[0].answers == ("2",) and sample.questions[0].max_new_tokens == 32


def test_a_row_with_an_answer_too_few(tmp_path, monkeypatch):
    rows = [{"prompts": prompts, "ground_truth": ["a"]} for prompts in (["c", "q"], ["c", "q", "r"])]
    with pytest.raises(ValueError, match="scbench_kv: row 1 has 2 queries and 1 answers"):
        read(tmp_path, monkeypatch, "scbench_kv", *rows)


def test_many_shot_answers_are_whole_options(tmp_path, monkeypatch):
    query = "Which date?\nOptions:\n(A) 01/02/1999\n(B) 03/04/2000\nAnswer:"
    row = {"prompts": ["examples", query, query], "ground_truth": ["B", "(A)"]}
    (sample,) = read(tmp_path, monkeypatch, "scbench_many_shot_tiny", row)
    assert [q.answers for q in sample.questions] == [("(B) 03/04/2000",), ("(A) 01/02/1999",)]
    assert METRICS["option"]("03/04/2000", sample.questions[0]).value == 1
    with pytest.raises(ValueError, match=r"0 lines with \(C\) in the query"):
        read(tmp_path, monkeypatch, "scbench_many_shot", {"prompts": ["e", query], "ground_truth": ["C"]})


@pytest.mark.parametrize("answer", ["C", "the sea"])
def test_choices_know_their_options(tmp_path, monkeypatch, answer):
    query = "Question: Where?\nA. in a house\nB. A tree\nC. the sea\nD. up\n\nThe the correct answer is"
    (sample,) = read(tmp_path, monkeypatch, "scbench_choice_eng", {"prompts": ["b", query], "ground_truth": [answer]})
    (question,) = sample.questions
    assert question.details["options"] == {"A": "in a house", "B": "A tree", "C": "the sea", "D": "up"}
    for scorer in ("choice", "choice-official"):
        assert METRICS[scorer]("C. the sea", question).value == 1
        assert METRICS[scorer]("A. in a house", question).value == 0


CODE = {"lang": "python", "repo": "a/b"}


def test_repoqa_knows_all_functions_of_its_context(tmp_path, monkeypatch):
    functions = {"f": "def f(): return 1", "g": "def g(): return 2"}
    row = {"prompts": ["code", "q1", "q2"], "ground_truth": [*functions.values()], "func_name": [*functions]}
    (sample,) = read(tmp_path, monkeypatch, "scbench_repoqa_mid", CODE | row)
    for question, name in zip(sample.questions, "fg", strict=True):
        details = {"language": "python", "repository": "a/b", "function": name, "functions": functions}
        assert question.details == details and (question.metric, question.max_new_tokens) == ("repoqa", 512)


def test_mixed_tasks_have_a_metric_a_query(tmp_path, monkeypatch):
    row = {"prompts": ["code", "q1", "q2"], "ground_truth": ["def f(): return 1", "6ab6ea3e"], "func_name": ["f", None]}
    row |= CODE | {"task": ["scbench_repoqa", "scbench_kv"]}
    (sample,) = read(tmp_path, monkeypatch, "scbench_repoqa_and_kv", row)
    code, value = sample.questions
    assert (code.metric, code.max_new_tokens, value.metric, value.max_new_tokens) == ("repoqa", 512, "include", 512)
    assert code.details["functions"] == {"f": "def f(): return 1"} and value.details == {"task": "scbench_kv"}

    row = {"prompts": ["texts", "q1", "q2"], "ground_truth": ["a summary", "71432"]}
    row["task"] = ["scbench_summary", "scbench_passkey"]
    (sample,) = read(tmp_path, monkeypatch, "scbench_summary_with_needles", row)
    assert [(q.metric, q.max_new_tokens) for q in sample.questions] == [("rouge-l", 256), ("passkey", 256)]
    row["task"][1] = "scbench_dance"
    with pytest.raises(ValueError, match=r"row 0: column task must be a list of 2 names out of .*'scbench_dance'"):
        read(tmp_path, monkeypatch, "scbench_summary_with_needles_mid", row)


def test_columns_of_some_tasks_only_are_named_too(tmp_path, monkeypatch):
    row = {"prompts": ["c", "q"], "ground_truth": ["def f(): return 1"], "repo": "a"}
    with pytest.raises(ValueError, match="scbench_repoqa: .* lack the columns lang, func_name"):
        read(tmp_path, monkeypatch, "scbench_repoqa", row)
