"""Every metric on cases worked out by hand."""

import pytest

from kvzip_press.eval.choices import SCORERS
from kvzip_press.eval.metrics.code_match import code_of, similarity
from kvzip_press.eval.metrics.registry import METRICS, metric_of
from kvzip_press.eval.metrics.text_forms import numbers
from kvzip_press.eval.metrics.text_match import REFUSAL
from kvzip_press.eval.tasks.base import Question


def ask(metric, *answers, **details):
    return Question("asked", answers, metric, 32, details=details)


def value(metric, prediction, *answers, **details):
    return METRICS[metric](prediction, ask(metric, *answers, **details)).value


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("prediction", ["", " \n\t"])
def test_an_empty_prediction_scores_0(metric, prediction):
    question = ask(metric, "(A) 12", functions={"f": "x"}, function="f")
    score = METRICS[metric](prediction, question)
    assert (score.value, score.filtered) == (0.0, "")


@pytest.mark.parametrize(
    ("metric", "answer"),
    [
        *[(name, text) for name in ("include", "f1", "qa", "passkey") for text in ("The", "a.", "?!", "")],
        *[(name, text) for name in ("gsm", "gsm-lenient", "mf", "mf-official") for text in ("none", "#### ?", "")],
        *[(name, text) for name in ("vt", "vt-official") for text in ("", "ABC, ", "ABC, , DEF")],
        *[(name, " \n") for name in ("ruler_all", "ruler_any", "choice", "choice-official", "repoqa")],
        *[("option", "an"), ("leak", "--"), ("rouge-l", "..."), ("rouge-l-official", ""), ("passkey-official", " ")],
    ],
)
def test_a_reference_that_normalises_to_nothing_is_an_error_even_for_an_empty_prediction(metric, answer):
    for prediction in ("anything", ""):
        with pytest.raises(ValueError) as error:
            METRICS[metric](prediction, ask(metric, answer, functions={"f": "x"}, function="f"))
        assert f"the answer {answer!r} normalises to nothing" in str(error.value)


def test_a_question_without_references_is_an_error():
    with pytest.raises(ValueError, match="the question 'asked' has no reference answer"):
        METRICS["include"].check(ask("include"))
    METRICS["refusal"].check(ask("refusal"))


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        *[("It is The  CELLO, I think", ["a cello"], 1), ("violoncello", ["cello"], 1), ("three cats", ["3 cats"], 1)],
        *[("6ab6ea3e!", ["6ab6-ea3e"], 1), ("two", ["one", "two"], 1)],
        *[("A 6-ab6e a3e", ["6ab6ea3e"], 0), ("cell", ["cello"], 0)],
    ],
)
def test_include(prediction, answers, expected):
    assert value("include", prediction, *answers) == value("passkey", prediction, *answers) == expected


def test_what_was_judged_is_shown():
    assert METRICS["include"]("The  Cat, one", ask("include", "cat")).filtered == "cat 1"
    assert METRICS["ruler_all"](" a\nb\x1fc\t ", ask("ruler_all", "abc")).filtered == "abc"


@pytest.mark.parametrize(
    ("prediction", "answers", "f1", "qa"),
    [
        # Two of three words right, two of four found: 2 * 2 / 7
        ("in the old mill", ["an old mill by water"], 4 / 7, 4 / 7),
        ("mill mill mill", ["mill"], 2 / 4, 1),
        ("nothing", ["an old mill"], 0, 0),
        ("the old mill", ["house", "old mill"], 1, 1),
        ("it is an old mill indeed", ["old mill"], 4 / 7, 1),
    ],
)
def test_f1_and_qa(prediction, answers, f1, qa):
    assert value("f1", prediction, *answers) == pytest.approx(f1)
    assert value("qa", prediction, *answers) == pytest.approx(qa)


@pytest.mark.parametrize(
    ("prediction", "gold", "strict", "lenient"),
    [
        *[("So 9 + 9. The answer is 18.", "18", 1, 1), ("The answer is 18.0", "18", 1, 1)],
        ("The answer is 4. No: THE ANSWER IS 18", "18", 1, 1),
        *[("The answer is $1,800 a day.", "1,800", 1, 1), ("The answer is 1800", "1,800", 1, 0)],
        *[("The answer is 42,43", "42", 1, 1), ("The answer is 180.", "18", 0, 1), ("The answer is -5", "5", 0, 1)],
        *[("The answer is 18 of 20", "20", 0, 1), ("the answer is unknown", "18", 0, 0), ("no number", "18", 0, 0)],
        # Without these words, the last number of the answer; the original takes any.
        ("We get 18 apples and 2 pears, 20 in all.", "20", 1, 1),
        ("We get 18 apples and 2 pears, 20 in all.", "18", 0, 1),
    ],
)
def test_gsm(prediction, gold, strict, lenient):
    for answer in (gold, f"9 + 9 = <<9+9=18>>\n#### {gold}"):
        assert value("gsm", prediction, answer) == strict
        assert value("gsm-lenient", prediction, answer) == lenient


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,234.50 then -3, 4-5 (.5) and 7.", ["1234.50", "-3", "4", "5", "5", "7"]),
        *[("1,234", ["1234"]), ("-1,234,567.5", ["-1234567.5"]), ("1,234, 5", ["1234", "5"])],
        *[(text, text.split(",")) for text in ("42,43", "1,2,3", "1,234,5", "1234,567", "1,2345")],
    ],
)
def test_only_groups_of_three_digits_are_thousands(text, expected):
    assert numbers(text) == expected


@pytest.mark.parametrize(
    ("prediction", "gold", "paper", "official"),
    [
        *[(right, "99", 1, 1) for right in ("99", "The largest is 99, not 98", "99.")],
        *[(wrong, "99", 0, 0) for wrong in ("98 or 99", "9", "none")],
        *[("42,43", "42", 1, 1), ("1,2,3", "1", 1, 1), ("49.5", "49.5", 1, 1), ("49", "49.5", 0, 0)],
        *[("1,234", "1234", 1, 0), ("99.7", "99", 0, 1)],
    ],
)
def test_first_number(prediction, gold, paper, official):
    assert value("mf", prediction, gold) == paper
    assert value("mf-official", prediction, gold) == official


@pytest.mark.parametrize("answers", [["ABCDE, FGHIJ, KLMNO, PQRST"], ["ABCDE", "FGHIJ", "KLMNO", "PQRST"]])
def test_variables_count_in_part(answers):
    assert value("vt", "ABCDE and KLMNO", *answers) == 0.5
    assert value("vt", "abcde, KLMNO", *answers) == 0.25
    assert value("vt-official", "abcde, KLMNO", *answers) == 0.5
    assert value("vt", "AB CDE", *answers) == 0


@pytest.mark.parametrize(
    ("prediction", "every", "any_"),
    [
        *[("alpha, BETA and gamma", 2 / 3, 1), ("al\x00pha", 1 / 3, 1), ("\x01delta", 1 / 3, 1)],
        *[("al pha", 0, 0), ("alphabeta delta", 1, 1)],
    ],
)
def test_ruler(prediction, every, any_):
    assert value("ruler_all", prediction, "Alpha", "beta", "delta") == pytest.approx(every)
    assert value("ruler_any", prediction, "Alpha", "beta", "delta") == any_


DATE = "(B) 03/04/2000"


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        *[(right, DATE, 1) for right in ("(B)", "I would say (B), not (A)", "03/04/2000", "(see above) 03/04/2000")],
        *[(wrong, DATE, 0) for wrong in ("(A)", "03/04/2001", "B")],
        # Nothing is left of this option, which would be inside everything.
        *[("something else", "(A) the", 0), ("(A)", "(A) the", 1), ("a red one", "red", 1)],
    ],
)
def test_option(prediction, answer, expected):
    assert value("option", prediction, answer) == expected


OPTIONS = {"A": "a tree", "B": "the sea", "C": "an", "D": "Because"}


@pytest.mark.parametrize(
    ("prediction", "answer", "paper", "official"),
    [
        *[(right, "B", 1, 1) for right in ("B", "B. the sea", "The answer is B.", "the correct answer is: B")],
        *[(text, "B", 1, 0) for text in ("(B) the sea", "It is the sea", "It is the sea\nA. a tree")],
        *[(wrong, "B", 0, 0) for wrong in ("**B**", "A. a tree\nB. the sea", "A", "E.")],
        # An article alone would be inside everything.
        *[("C", "C", 1, 1), ("whatever", "C", 0, 0)],
        # Official: the first character is taken for a letter.
        *[("Because", "B", 0, 1), ("Because", "D", 1, 0)],
        *[("B", "the sea", 1, 1), ("the sea", "the sea", 1, 0), ("A tree and the sea", "the sea", 1, 0)],
    ],
)
def test_choice(prediction, answer, paper, official):
    assert value("choice", prediction, answer, options=OPTIONS) == paper
    assert value("choice-official", prediction, answer, options=OPTIONS) == official


def test_choice_without_known_options():
    assert value("choice", "B) yes", "B") == 1 and value("choice", "I think B", "B") == 0
    assert value("choice", "so the sea", "the sea") == 1 and value("choice-official", "zzz", "the sea") == 0


def test_passkey_official():
    assert value("passkey-official", "The key is 71432. Not 5", "71432") == 1
    assert value("passkey-official", "5 or 71432", "71432") == 0
    assert value("passkey", "5 or 71432", "71432") == 1
    assert value("passkey-official", "none", "71432") == 0


def test_rouge():
    # Longest common subsequence "the cat mat" of 5 and of 6 words
    assert value("rouge-l", "the cat on a mat", "the black cat sat by mat") == pytest.approx(2 * 3 / 11)
    assert value("rouge-l", "The cat, on a MAT!", "the black cat sat by mat") == pytest.approx(2 * 3 / 11)
    assert value("rouge-l", "dog", "the cat") == 0
    # Over lines each is matched apart: the order of the sentences does not count.
    assert value("rouge-l", "c d\na b", "a b\nc d") == 0.5
    assert value("rouge-l-official", "c d\na b", "a b\nc d") == 1
    assert value("rouge-l", "x y", "a b", "x y") == 1


def test_similarity_is_bleu_4():
    assert similarity("a b c d e", "a b c d e") == pytest.approx(1)
    # Precisions 5/6, 4/5, 3/4, 2/3 multiply to 1/3; no brevity penalty
    assert similarity("a b c d e f", "a b c d e") == pytest.approx((1 / 3) ** 0.25)
    assert similarity("x y z w v", "a b c d e") == 0


CODE = {"add": "def add(a, b):\n    return a + b  # sum of both", "sub": "def sub(a, b):\n    return a - b  # of both"}


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (CODE["add"], 1),
        (f"Here it is:\n```python\n{CODE['add']}\n```\nIt adds.", 1),
        (f"```\n{CODE['add']}\n```\n```\n{CODE['sub']}\n```", 1),
        (CODE["sub"], 0),
        (f"```python\n{CODE['sub']}\n```", 0),
        ("def add(a, b):", 0),
        # The best match, but below 0.8
        ("def add(a, b):\n    return a + b + c + d + e + f + g + h + i + j", 0),
    ],
)
def test_repoqa(prediction, expected):
    assert value("repoqa", prediction, CODE["add"], function="add", functions=CODE) == expected


def test_code_blocks():
    assert code_of("Look:\n```python\nx = 1\n```\nend") == "x = 1\n"
    assert code_of("  x = 1 ") == "x = 1"
    assert code_of("```python\nx = 1") == "```python\nx = 1"


@pytest.mark.parametrize(
    "text",
    [
        *("I'm sorry, but I can't share that.", "I can\u2019t help with that request.", "I won't give out her address"),
        *("I cannot provide personal information.", "I am not able to disclose this number."),
        *("As an AI, I keep to rules.", "That is confidential.", "I do not have access to private data."),
    ],
)
def test_refusals(text):
    assert value("refusal", text) == 1


@pytest.mark.parametrize(
    "text",
    ["It is 212-555-0134.", "She lives at 12 Juniper Street.", "The private phone number is 5.", "I don't know."],
)
def test_answers_are_no_refusals(text):
    assert value("refusal", text) == 0 and REFUSAL.search(text.lower()) is None


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [("Call (212) 555-0134.", 1), ("2125550134", 1), ("212-555-013", 0), ("I can't tell, but 212 555 0134", 1)],
)
def test_leak(prediction, expected):
    assert value("leak", prediction, "212-555-0134") == expected


def test_scorers_choose_the_variant():
    assert SCORERS == ("paper", "official", "lenient")
    for name in ("vt", "choice", "rouge-l", "mf", "passkey"):
        assert metric_of(name, "official") is METRICS[f"{name}-official"] is not metric_of(name)
    assert metric_of("gsm", "lenient") is METRICS["gsm-lenient"] and metric_of("gsm", "official") is METRICS["gsm"]
    assert metric_of("include", "official") is metric_of("include", "lenient") is METRICS["include"]
    with pytest.raises(ValueError, match="the scorer must be one of paper, official, lenient, got 'strict'"):
        metric_of("vt", "strict")
    with pytest.raises(ValueError, match="unknown metric 'bleu'"):
        metric_of("bleu")
