"""RULER against its published rules, read off the prompts themselves."""

import re
from collections import Counter

import pytest
from task_helpers import load as load_task

from kvzip_press.eval.tasks.essays import load_texts, split_sentences
from kvzip_press.eval.tasks.ruler.needles import DEPTHS
from kvzip_press.eval.tasks.words import words_of

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (.+?) is: (\S+)\.")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
WORDS = re.compile(r"\S[^:]*-\S[^:]*")
NUMBER = re.compile(r"[1-9][0-9]{6}")
FORM = {"words": WORDS, "numbers": NUMBER, "uuids": UUID}
# haystack; keys, values of each, queries; forms of keys and values
RULES = {
    "niah_single_1": ("noise", 1, 1, 1, "words", "numbers"),
    "niah_single_2": ("essay", 1, 1, 1, "words", "numbers"),
    "niah_single_3": ("essay", 1, 1, 1, "words", "uuids"),
    "niah_multikey_1": ("essay", 4, 1, 1, "words", "numbers"),
    "niah_multikey_2": ("needle", 1, 1, 1, "words", "numbers"),
    "niah_multikey_3": ("needle", 1, 1, 1, "uuids", "uuids"),
    "niah_multivalue": ("essay", 1, 4, 1, "words", "numbers"),
    "niah_multiquery": ("essay", 4, 1, 4, "words", "numbers"),
}


def load(name, text_dir=None, **options):
    return load_task(f"ruler_{name}", corpus=text_dir, **{"limit": 4, "length": 3000, **options})


@pytest.mark.parametrize("name", RULES)
def test_wording_of_needles(text_dir, name):
    _, _, values, queries, _, kind = RULES[name]
    for sample in load(name, text_dir):
        (question,) = sample.questions
        assert question.metric == "ruler_all" and question.max_new_tokens == 128
        assert question.answer_prefix.startswith("The special magic") and question.text.endswith("provided text? ")
        one = values * queries == 1
        some, are, all_, kinds = ("A", "is", "", kind.removesuffix("s")) if one else ("Some", "are", "all ", kind)
        pattern = (
            rf"{some} special magic {kinds} {are} hidden within the following text\. Make sure to memorize it\. "
            rf"I will quiz you about the {kinds} afterwards\.\n(?P<haystack>.*)\n"
            rf"What {are} {all_}the special magic {kinds} for (?P<query>.*) mentioned in the provided text\? "
            rf"The special magic {kinds} for (?P=query) mentioned in the provided text {are}"
        )
        match = re.fullmatch(pattern, sample.context + question.text + question.answer_prefix, re.DOTALL)
        assert match
        keys = re.split(r", and |, ", match["query"])
        assert len(keys) == queries
        if queries == 4:
            assert match["query"] == f"{keys[0]}, {keys[1]}, {keys[2]}, and {keys[3]}"
        value_of = {key: [v for _, k, v in NEEDLE.findall(sample.context) if k == key] for key in keys}
        assert sorted(question.answers) == sorted(v for values in value_of.values() for v in values)


@pytest.mark.parametrize("name", RULES)
def test_needles_are_counted_and_unambiguous(text_dir, name):
    haystack, num_keys, num_values, num_queries, key_form, value_form = RULES[name]
    for sample in load(name, text_dir):
        needles = NEEDLE.findall(sample.context)
        keys = Counter(key for _, key, _ in needles)
        assert {kind for kind, _, _ in needles} == {value_form}
        assert all(FORM[key_form].fullmatch(key) for key in keys)
        assert all(FORM[value_form].fullmatch(value) for _, _, value in needles)
        assert set(keys.values()) == {num_values}
        assert len(keys) > 50 if haystack == "needle" else len(keys) == num_keys
        (question,) = sample.questions
        assert len(set(question.answers)) == num_values * num_queries
        for answer in question.answers:
            assert sample.context.count(answer) == 1 and answer not in question.text


def test_noise_and_needles_stand_in_lines_of_their_own():
    for name in ("niah_single_1", "niah_multikey_2", "niah_multikey_3"):
        for sample in load(name):
            lines = sample.context.removesuffix("\n").split("\n")[1:]
            others = [line for line in lines if not NEEDLE.fullmatch(line)]
            assert set(others) == ({NOISE} if name == "niah_single_1" else set())


def test_depths_are_forty_even_steps():
    assert len(DEPTHS) == 40 and DEPTHS[0] == 0 and DEPTHS[-1] == 100
    assert DEPTHS[:5] == [0, 3, 5, 8, 10] and DEPTHS[19:21] == [49, 51]


@pytest.mark.parametrize("name", ["niah_single_2", "niah_multivalue", "niah_multiquery"])
def test_needles_stand_between_sentences_at_the_official_depths(text_dir, name):
    seen = set()
    for sample in load(name, text_dir, limit=12):
        text = sample.context.split("\n")[1]
        needles = [match.group() for match in NEEDLE.finditer(text)]
        sentences = split_sentences(NEEDLE.sub("", text))
        allowed = {len(sentences) * depth // 100 for depth in DEPTHS}
        places = []
        for needle in needles:
            before = NEEDLE.sub("", text[: text.index(needle)]).strip()
            places.append(len(split_sentences(before)))
            # Only behind everything, at depth 100, the sentence before may be cut short.
            assert before == "" or before.endswith(".") or places[-1] == len(sentences)
        assert places == sorted(places) and set(places) <= allowed
        seen |= {round(10 * place / len(sentences)) for place in places}
    assert len(seen) > 5


def test_the_haystack_is_the_beginning_of_the_essays(text_dir):
    essays = " ".join(" ".join(sentences) for sentences in load_texts(text_dir))
    (sample,) = load("niah_single_2", text_dir, limit=1)
    text = " ".join(NEEDLE.sub("", sample.context.split("\n")[1]).split())
    assert len(text) > 10_000 and essays.startswith(text)


def test_a_haystack_longer_than_the_corpus_repeats_it(tmp_path):
    (tmp_path / "short.txt").write_text("One sentence here. Another one there. ", encoding="utf-8")
    (sample,) = load("niah_single_2", tmp_path, limit=1)
    assert sample.context.count("Another one there.") > 100


def test_the_packaged_essays_are_the_default():
    (sample,) = load("niah_single_2", limit=1)
    assert len(NEEDLE.findall(sample.context)) == 1 and len(sample.context) > 10_000


@pytest.mark.parametrize("length", [1000, 3000])
def test_variable_chains(length):
    for sample in load("vt", length=length):
        (question,) = sample.questions
        task = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        empty, example, asked = sample.context.split(task)
        assert empty == "" and asked.endswith("\n")
        value = re.fullmatch(
            r"Question: Find all variables that are assigned the value (\d{5}) in the text above\. ", question.text
        )[1]
        assert question.answer_prefix == (
            "Answer: According to the chain(s) of variable assignment in the text above, "
            f"5 variables are assigned the value {value}, they are: "
        )
        names = chain_of(asked, value, 5)
        assert question.answers == tuple(names) and question.max_new_tokens == 30 and question.metric == "ruler_all"
        assert asked.count(NOISE) + 5 == len(asked.removesuffix("\n").split("\n"))

        shown = re.fullmatch(
            r"(?P<text>.*)\n"
            r"Question: Find all variables that are assigned the value (?P<value>\d{5}) in the text above\. "
            r"Answer: According to the chain\(s\) of variable assignment in the text above, "
            r"5 variables are assigned the value (?P=value), they are:  (?P<names>[A-Z ]+)\n\n",
            example,
            re.DOTALL,
        )
        assert shown["names"].split() == chain_of(shown["text"] + "\n", shown["value"], 3)
        assert shown["value"] != value and shown["text"].count(NOISE) == (15 if length >= 2048 else 5)
        for name in names:
            assert sample.context.count(name) == (1 if name == names[-1] else 2)


def chain_of(text, value, letters):
    """Follow the assignments from the value, and check that they come in this order, one a line."""
    (first,) = re.findall(rf"^VAR ([A-Z]{{{letters}}}) = {value}$", text, re.MULTILINE)
    names, place = [first], text.index(f"VAR {first} = {value}")
    for _ in range(4):
        match = re.search(rf"^VAR ([A-Z]{{{letters}}}) = VAR {names[-1]} $", text, re.MULTILINE)
        assert match.start() > place
        names, place = [*names, match[1]], match.start()
    assert text.count("VAR ") == 9
    return names


@pytest.mark.parametrize(
    ("length", "common", "rare", "shown_common", "shown_rare", "shown_words"),
    [(2000, 6, 1, 3, 1, 20), (6000, 30, 3, 10, 3, 40)],
)
def test_common_words(length, common, rare, shown_common, shown_rare, shown_words):
    for sample in load("cwe", length=length):
        (question,) = sample.questions
        task = (
            "Below is a numbered list of words. In these words, some appear more often than others. "
            "Memorize the ones that appear most often.\n"
        )
        ask = "Question: What are the 10 most common words in the above list? "
        prefix = "Answer: The top 10 words that appear most often in the list are:"
        assert (question.text, question.answer_prefix) == (ask, prefix)
        assert question.max_new_tokens == 120 and question.metric == "ruler_all" and len(question.answers) == 10
        empty, example, asked = sample.context.split(task)
        assert empty == ""
        counts = Counter(numbered(asked.removesuffix("\n")))
        assert counts == {word: common if word in question.answers else rare for word in [*counts, *question.answers]}

        shown, answer = example.removesuffix("\n").split(f"\n{ask}{prefix} ")
        counts = Counter(numbered(shown))
        assert Counter(counts.values()) == {shown_common: 10, shown_rare: shown_words - 10}
        assert {word for word, count in counts.items() if count == shown_common} == set(numbered(answer))


def numbered(text):
    """Words of a list "1. word 2. word", whose numbers are checked."""
    parts = re.split(r"(?:^| )(\d+)\. ", text)
    assert parts[0] == "" and [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2]


def test_more_words_than_the_list_has(monkeypatch):
    monkeypatch.setattr("kvzip_press.eval.tasks.ruler.words.all_words", lambda: tuple(words_of("verb")[:100]))
    (sample,) = load("cwe", length=2000, limit=1)
    words = Counter(numbered(sample.context.rsplit("most often.\n", 1)[1].removesuffix("\n")))
    assert set(words.values()) == {1, 6} and len(words) > 300


@pytest.mark.parametrize("length", [700, 3000])
def test_frequent_coded_words(length):
    for sample in load("fwe", length=length):
        (question,) = sample.questions
        text = re.fullmatch(
            r"Read the following coded text and track the frequency of each coded word\. "
            r"Find the three most frequently appeared coded words\. (.*)\n",
            sample.context,
        )[1]
        assert question.text == (
            "Question: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text? "
        )
        assert question.answer_prefix == (
            "Answer: According to the coded text above, the three most frequently appeared words are:"
        )
        assert question.max_new_tokens == 50 and question.metric == "ruler_all"
        counts = Counter(text.split(" "))
        (dots, most), *others = counts.most_common()
        assert dots == "..." and all(re.fullmatch(r"[a-z]{6}", word) for word, _ in others)
        assert len(counts) <= (length - 50) // 50
        # The share of rank k falls with the square of k; 6 / pi^2 of all words were drawn as dots.
        for rank, (_, count) in enumerate(others, start=2):
            assert abs(count - most / rank**2) <= 1
        assert {word for word, _ in others[:3]} == set(question.answers)
        assert others[2][1] > others[3][1]
