"""English words to draw from, those that RULER draws from."""

from __future__ import annotations

import random
from functools import cache


@cache
def words_of(category: str) -> tuple[str, ...]:
    """All words of a category ("noun", "adjective" or "verb"), sorted."""
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise ImportError("words are drawn from the package wonderwords: pip install 'kvzip-press[eval]'") from error
    return tuple(sorted(set(RandomWord().filter(include_categories=[category]))))


@cache
def all_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs, sorted."""
    return tuple(sorted({*words_of("noun"), *words_of("adjective"), *words_of("verb")}))


def draw_pair(rng: random.Random) -> str:
    """Draw an adjective and a noun, joined by a hyphen."""
    return f"{rng.choice(words_of('adjective'))}-{rng.choice(words_of('noun'))}"
