"""A needle in a haystack: one sentence at eleven depths of essays of three lengths (arXiv 2505.23416)."""

from __future__ import annotations

import re
from collections.abc import Callable

from .base import Question, Request, Sample, Task
from .essays import read_corpus
from .generation import grow, token_counter
from .loading import wants_generated

LENGTHS = (500, 2000, 8000)
DEPTHS = tuple(range(0, 101, 10))
NEEDLE = "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n"
QUESTION = Question(
    text="Based on the content of the book, the best thing to do in San Francisco is:",
    answers=("Eat a sandwich and sit in Dolores Park on a sunny day.",),
    metric="include",
    max_new_tokens=32,
)
# The essays as packaged lack the space between some sentences.
FULL_STOP = re.compile(r"\.(?=\s|[A-Z][a-z])")


class Niah(Task):
    """
    33 cases; the request's length bounds the context alone, as in the original.

    A length of 500 or less gives the 11 cases of that length, one of 1,000 those of 500 and of 1,000.
    """

    name = "niah"
    family = "niah"

    def load(self, request: Request) -> list[Sample]:
        """Return the cases, ordered by length and then by depth; each is named by both."""
        wants_generated(self, request)
        count_tokens = token_counter(self, request)
        lengths = sorted({min(length, request.length or length) for length in LENGTHS})
        text = read_corpus(request.corpus)
        cases = [(length, depth) for length in lengths for depth in DEPTHS][: request.limit]
        return [
            Sample(f"{length}-{depth}", hide(text, length, depth, count_tokens), (QUESTION,)) for length, depth in cases
        ]


def hide(text: str, length: int, depth: int, count_tokens: Callable[[str], int]) -> str:
    """
    Put the needle into the beginning of a text, which is repeated if it is too short, for a length in tokens.

    `depth` is the percentage of the haystack in front of the needle, which then, unless it is 100, moves back behind
    the last full stop.
    """

    def make(size: int) -> str:
        haystack = (text * -(-size // len(text)))[:size] if size else ""
        border = size * depth // 100
        if depth < 100:
            # Two characters more, to see what follows a full stop right before the border.
            stops = (match.end() for match in FULL_STOP.finditer(haystack, 0, border + 2))
            border = max((stop for stop in stops if stop <= border), default=0)
        return (haystack[:border] + NEEDLE + haystack[border:]).strip()

    return grow(Niah.name, make, count_tokens, length, smallest=0)


TASKS: list[Task] = [Niah()]
