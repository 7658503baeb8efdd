"""RULER's variable chains and its most frequent words."""

from __future__ import annotations

import math
import random
import string
from functools import partial

from ..base import Question
from ..generation import draw_distinct
from ..words import all_words, draw_pair
from .templates import CWE, FWE, NOISE, VT

HOPS = 4
# Repetitions of the noise in the example of `vt`, about 500 tokens; and the fewest, for short prompts.
VT_EXAMPLE, VT_SHORT_EXAMPLE, VT_SHORT = 15, HOPS + 1, 2048
# From this length on the words of `cwe` are repeated more often.
LONG = 4096
NUM_COMMON = 10
# The least number of words of `fwe` with which the fourth most frequent one is always rarer than the third.
FWE_SMALLEST = 80
ZETA_2 = math.pi**2 / 6


def draw_letters(rng: random.Random, letters: str, length: int) -> str:
    """Draw a word of random letters."""
    return "".join(rng.choices(letters, k=length))


def draw_chain(rng: random.Random, name_length: int, taken: set[str]) -> tuple[str, list[str], list[str]]:
    """Draw a chain of variables: its value, the variables that have it, and the assignments."""
    draw = partial(draw_letters, rng, string.ascii_uppercase, name_length)
    names = draw_distinct(draw, HOPS + 1, taken)
    (value,) = draw_distinct(lambda: str(rng.randint(10_000, 99_999)), 1, taken)
    assignments = [f"VAR {names[0]} = {value}"]
    assignments += [f"VAR {name} = VAR {before} " for before, name in zip(names, names[1:], strict=False)]
    return value, names, assignments


def hide_in_lines(hidden: list[str], lines: list[str], rng: random.Random) -> None:
    """Put other lines, in their order, in front of different lines."""
    positions = sorted(rng.sample(range(len(lines)), len(hidden)))
    for shift, (position, line) in enumerate(zip(positions, hidden, strict=True)):
        lines.insert(position + shift, line)


def make_vt(rng: random.Random, size: int, length: int) -> tuple[str, tuple[Question, ...]]:
    """
    Draw a chain hidden in noise that is repeated `size` times, at least 5, behind an example with its answer.

    Below a `length` of 2048, that of the whole sample in tokens, the example is shorter.
    """
    taken: set[str] = set()
    shown, shown_names = _vt_prompt(rng, VT_SHORT_EXAMPLE if length < VT_SHORT else VT_EXAMPLE, 3, taken)
    prompt, names = _vt_prompt(rng, size, 5, taken)
    return VT.split(f"{shown} {' '.join(shown_names)}\n\n{prompt}", names)


def _vt_prompt(rng: random.Random, size: int, name_length: int, taken: set[str]) -> tuple[str, list[str]]:
    value, names, assignments = draw_chain(rng, name_length, taken)
    lines = [NOISE] * size
    hide_in_lines(assignments, lines, rng)
    return VT.fill(context="\n".join(lines), query=value, number=len(names)), names


def make_cwe(rng: random.Random, size: int, length: int) -> tuple[str, tuple[Question, ...]]:
    """
    Draw a numbered list of words in which ten are more frequent than `size` others, behind an example with its answer.

    How often words are repeated follows from `length`, that of the whole sample in tokens.
    """
    long = length >= LONG
    shown, shown_common = _numbered_words(rng, 30 if long else 10, *((10, 3) if long else (3, 1)))
    words, common = _numbered_words(rng, size, *((30, 3) if long else (6, 1)))
    answer = " ".join(f"{number}. {word}" for number, word in enumerate(shown_common, start=1))
    return CWE.split(f"{CWE.fill(context=shown)} {answer}\n{CWE.fill(context=words)}", common)


def _numbered_words(rng: random.Random, num_rare: int, common_repeats: int, rare_repeats: int) -> tuple[str, list[str]]:
    number = NUM_COMMON + num_rare
    # Beyond the word list, where the original takes a larger one, pairs of words are added.
    words = rng.sample(all_words(), min(number, len(all_words())))
    words += draw_distinct(lambda: draw_pair(rng), number - len(words), set(words))
    common = words[:NUM_COMMON]
    repeated = common * common_repeats + words[NUM_COMMON:] * rare_repeats
    rng.shuffle(repeated)
    return " ".join(f"{place}. {word}" for place, word in enumerate(repeated, start=1)), common


def make_fwe(rng: random.Random, size: int, length: int) -> tuple[str, tuple[Question, ...]]:
    """
    Draw coded words with frequencies after a zeta distribution (exponent 2), the most frequent one being dots.

    There are `size` words before each frequency is rounded down. How many of them differ follows from `length`, that of
    the whole sample in tokens.
    """
    num_words = max(5, (length - FWE.max_new_tokens) // 50)
    words = ["...", *draw_distinct(partial(draw_letters, rng, string.ascii_lowercase, 6), num_words - 1)]
    coded = [word for rank, word in enumerate(words, start=1) for _ in range(int(size / rank**2 / ZETA_2))]
    rng.shuffle(coded)
    return FWE.split(FWE.fill(context=" ".join(coded)), words[1:4])
