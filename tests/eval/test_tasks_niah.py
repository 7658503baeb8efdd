import re

import pytest
from task_helpers import count_tokens, load

from kvzip_press.eval.tasks.essays import read_corpus

NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."


def test_33_cases_of_the_essays():
    samples = load("niah")
    assert [sample.id for sample in samples] == [f"{n}-{d}" for n in (500, 2000, 8000) for d in range(0, 101, 10)]
    for sample in samples:
        length, depth = map(int, sample.id.split("-"))
        assert min(length - 5, 0.995 * length) <= count_tokens(sample.context) <= length
        assert sample.context.count(NEEDLE) == 1 and sample.context.count("Dolores") == 1
        before, after = sample.context.split(NEEDLE)
        if 0 < depth < 100:
            assert before.endswith(".\n") and after.startswith("\n")
        share = len(before) / len(sample.context.replace(NEEDLE, ""))
        assert share <= depth / 100 + 0.01 and share >= depth / 100 - (0.12 if length == 500 else 0.05)


def test_the_haystack_is_the_beginning_of_the_essays_in_sorted_order():
    essays = read_corpus()
    for sample in load("niah", length=500):
        assert essays.strip().startswith(sample.context.replace(f"\n{NEEDLE}\n", "").replace(NEEDLE, "").strip())


def test_question():
    for sample in load("niah", limit=2):
        (question,) = sample.questions
        assert question.text == "Based on the content of the book, the best thing to do in San Francisco is:"
        assert question.answers == ("Eat a sandwich and sit in Dolores Park on a sunny day.",)
        assert (question.metric, question.max_new_tokens, question.answer_prefix) == ("include", 32, "")


@pytest.mark.parametrize(
    ("length", "lengths"),
    [(500, [500]), (300, [300]), (1000, [500, 1000]), (2000, [500, 2000]), (9000, [500, 2000, 8000])],
)
def test_lengths_are_cut_to_the_length_asked_for(length, lengths):
    samples = load("niah", length=length)
    assert [sample.id for sample in samples] == [f"{n}-{d}" for n in lengths for d in range(0, 101, 10)]
    assert max(count_tokens(sample.context) for sample in samples) <= length


def test_the_needle_moves_back_behind_a_full_stop(tmp_path):
    text = "One two. Version 2.5 of it.Then three, four! Five six seven eight nine. "
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for sample in load("niah", corpus=tmp_path, length=300):
        before, _ = sample.context.split(NEEDLE)
        depth = int(sample.id.split("-")[1])
        if 0 < depth < 100:
            assert re.search(r"(two|it|nine)\.\n$", before)
    assert load("niah", corpus=tmp_path, length=300, limit=1)[0].context.startswith(NEEDLE)


def test_a_corpus_may_be_one_file(tmp_path):
    file = tmp_path / "book.md"
    file.write_text("A sentence of a book. " * 50, encoding="utf-8")
    assert "sentence of a book" in load("niah", corpus=file, length=100, limit=1)[0].context
    with pytest.raises(FileNotFoundError, match="no .txt file in"):
        load("niah", corpus=tmp_path)
