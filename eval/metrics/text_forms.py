"""What is done to texts before they are compared: lower case, no punctuation, numbers as numbers."""

from __future__ import annotations

import re
import string
from collections import Counter

DIGIT_OF = {word: str(i) for i, word in enumerate("zero one two three four five six seven eight nine".split())}
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
# A comma parts thousands only where every group behind the first has exactly three digits.
NUMBER = re.compile(r"(?:(?<![\d.])-)?(?:(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,]*\d)|\d+)(?:\.\d+)?")


def normalise(text: str) -> str:
    """Lower-case, without punctuation and articles, white space collapsed, zero to nine written as digits."""
    bare = ARTICLES.sub(" ", text.lower().translate(PUNCTUATION))
    return " ".join(DIGIT_OF.get(word, word) for word in bare.split())


def includes(prediction: str, answer: str) -> bool:
    """Whether the normalised answer, of which something must be left, is inside the normalised prediction."""
    return normalise(answer) in normalise(prediction)


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the normalised words."""
    words, expected = normalise(prediction).split(), normalise(answer).split()
    shared = sum((Counter(words) & Counter(expected)).values())
    return 2 * shared / (len(words) + len(expected)) if shared else 0.0


def numbers(text: str) -> list[str]:
    """All numbers of a text, in order, without thousands separators."""
    return [number.replace(",", "") for number in NUMBER.findall(text)]


def first_number(text: str) -> str:
    """Return the first number of a text, or nothing."""
    return next(iter(numbers(text)), "")


def same_number(text: str, gold: str) -> bool:
    """Whether both are numbers and equal: 18 is 18.0, but not 180."""
    return bool(text) and bool(gold) and float(text) == float(gold)


def squeeze(text: str) -> str:
    """Return only the letters and digits, in lower case: data are recognised however they are punctuated."""
    return re.sub(r"[^a-z0-9]", "", text.lower())
