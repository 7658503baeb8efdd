"""Comparison of an answer in free text with the expected one."""

import re
import string

DIGIT_OF = {word: str(i) for i, word in enumerate("zero one two three four five six seven eight nine".split())}
PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower-case, without punctuation and articles, white space collapsed, zero to nine written as digits."""
    bare = ARTICLES.sub(" ", text.lower().translate(PUNCTUATION))
    return " ".join(DIGIT_OF.get(word, word) for word in bare.split())


def includes(prediction: str, answer: str) -> bool:
    """Whether the normalised answer is inside the normalised prediction.

    Raises
    ------
    ValueError
        If nothing is left of the answer: such an answer is inside everything.
    """
    expected = normalise(answer)
    if not expected:
        raise ValueError(f"the answer {answer!r} normalises to nothing: correct the data")
    return expected in normalise(prediction)
