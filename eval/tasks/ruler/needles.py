"""RULER's needles in a haystack: noise, essays, or other needles."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from ..base import Question
from ..essays import read_corpus, split_sentences
from ..generation import draw_distinct, draw_uuid
from ..words import draw_pair
from .templates import NEEDLE, NIAH, NOISE
from .words import hide_in_lines

# Percent of the sentences that may stand before a needle.
DEPTHS = [round(100 * i / 39) for i in range(40)]
ESSAY = "essay"
DRAW = {
    "words": draw_pair,
    "numbers": lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    "uuids": draw_uuid,
}


@dataclass(frozen=True)
class Needles:
    """A kind of haystack and of needles."""

    haystack: str  # ``"noise"``, ``"essay"`` or ``"needle"``
    # keys, values: names in `DRAW`
    keys: str = "words"
    values: str = "numbers"
    # num_keys, num_values, num_queries: hidden keys, values of each, and keys asked for
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    @property
    def smallest(self) -> int:
        """Least size of the haystack: words of essays, otherwise sentences, between which the needles are put."""
        return 1 if self.haystack == ESSAY else self.num_keys * self.num_values

    def make(self, rng: random.Random, size: int, corpus: str | None = None) -> tuple[str, tuple[Question, ...]]:
        """Draw a context and its question; `size` counts words of essays, repetitions of noise, or further needles."""
        taken: set[str] = set()
        keys = draw_distinct(lambda: DRAW[self.keys](rng), self.num_keys, taken)
        values = [draw_distinct(lambda: DRAW[self.values](rng), self.num_values, taken) for _ in keys]
        needles = [
            NEEDLE.format(type=self.values, key=key, value=value)
            for key, of_key in zip(keys, values, strict=True)
            for value in of_key
        ]
        rng.shuffle(needles)
        if self.haystack == ESSAY:
            context = hide_in_sentences(needles, first_sentences(size, corpus), rng)
        else:
            lines = self._lines(rng, size, taken)
            hide_in_lines(needles[::-1], lines, rng)
            context = "\n".join(lines)
        asked = rng.sample(range(self.num_keys), self.num_queries)
        queries = [keys[i] for i in asked]
        query = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
        one = self.num_queries * self.num_values == 1
        template = NIAH.singular() if one else NIAH
        kind = self.values.removesuffix("s") if one else self.values
        prompt = template.fill(type=kind, context=context, query=query)
        return template.split(prompt, [value for i in asked for value in values[i]])

    def _lines(self, rng: random.Random, size: int, taken: set[str]) -> list[str]:
        if self.haystack == "noise":
            return [NOISE] * size
        return [
            NEEDLE.format(
                type=self.values,
                key=draw_distinct(lambda: DRAW[self.keys](rng), 1, taken)[0],
                value=draw_distinct(lambda: DRAW[self.values](rng), 1, taken)[0],
            )
            for _ in range(size)
        ]


@cache
def _essay_words(corpus: str | None) -> list[str]:
    return read_corpus(corpus).split()


def first_sentences(num_words: int, corpus: str | None) -> list[str]:
    """Sentences of the first words of a corpus, which is repeated where it is too short."""
    words = _essay_words(corpus)
    if not words:
        raise ValueError(f"the corpus {corpus} holds no text")
    repeats = -(-num_words // len(words))
    return split_sentences(" ".join((words * repeats)[:num_words]))


def hide_in_sentences(needles: list[str], sentences: list[str], rng: random.Random) -> str:
    """Put needles behind sentences, at different depths of `DEPTHS`."""
    depths = sorted(rng.sample(DEPTHS, len(needles)), reverse=True)
    borders = [len(sentences) * depth // 100 for depth in depths]
    for border, needle in zip(borders, reversed(needles), strict=True):
        sentences.insert(border, needle)
    return " ".join(sentences)
