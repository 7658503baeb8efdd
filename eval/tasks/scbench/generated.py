"""Contexts of SCBench that need no corpus: key-value pairs, numbers, variable chains, strings."""

from __future__ import annotations

import random
import string
from functools import partial

from ..base import Question
from ..generation import draw_distinct, draw_uuid
from ..ruler.templates import NOISE, VT
from ..ruler.words import HOPS, draw_chain, draw_letters, hide_in_lines

NUM_QUERIES = 5
KV_TASK = "Extract the value corresponding to the specified key in the JSON object below."
MF_ANSWER = "You should answer with only one number, no other words. The {target} of the list is:"


def make_kv(rng: random.Random, size: int) -> tuple[str, tuple[Question, ...]]:
    """Draw a JSON object of `size` pairs of UUIDs, at least five; five keys are asked for."""
    uuids = draw_distinct(lambda: draw_uuid(rng), 2 * size)
    pairs = list(zip(uuids[::2], uuids[1::2], strict=True))
    data = ", ".join(f'"{key}": "{value}"' for key, value in pairs)
    return f"{KV_TASK}\n\nJSON data:\n{{{data}}}", tuple(
        Question(f'Key: "{key}"\nThe value associated with the specified key is:', (value,), "include", 96)
        for key, value in rng.sample(pairs, NUM_QUERIES)
    )


def make_mf(rng: random.Random, size: int) -> tuple[str, tuple[Question, ...]]:
    """Draw 2 * `size` + 1 integers from 0 to 99 (`size` at least 20); seven order statistics are asked for."""
    least, greatest = rng.randint(0, 19), rng.randint(80, 99)
    numbers = [rng.randint(least, greatest) for _ in range(2 * size + 1)]
    values = sorted(set(numbers))
    answers = {
        "largest number": values[-1],
        "second largest number": values[-2],
        "third largest number": values[-3],
        "smallest number": values[0],
        "second smallest number": values[1],
        "third smallest number": values[2],
        "median number": sorted(numbers)[size],
    }
    return f"Below is a list of numbers.\n\n{numbers}", tuple(
        Question(f"What is the {target} of the list?\n\n{MF_ANSWER.format(target=target)}", (str(answer),), "mf", 32)
        for target, answer in answers.items()
    )


def make_vt(rng: random.Random, size: int) -> tuple[str, tuple[Question, ...]]:
    """Draw five chains of variables, hidden in noise that is repeated `size` times (at least 5); each is asked for."""
    taken: set[str] = set()
    chains = [draw_chain(rng, 5, taken) for _ in range(NUM_QUERIES)]
    lines = [NOISE] * size
    for _, _, assignments in chains:
        hide_in_lines(assignments, lines, rng)
    task, question = VT.text.split("\n{context}\n")
    return f"{task}\n" + "\n".join(lines), tuple(
        Question(
            question.format(query=value),
            tuple(names),
            "vt",
            96,
            VT.answer_prefix.strip().format(query=value, number=HOPS + 1),
        )
        for value, names, _ in chains
    )


def make_prefix_suffix(rng: random.Random, size: int) -> tuple[str, tuple[Question, ...]]:
    """Draw strings: five asked for by their beginning and end, `size` others, many of which share one of the two."""
    taken: set[str] = set()
    ends = draw_distinct(lambda: draw_letters(rng, string.ascii_lowercase, 3), 2 * NUM_QUERIES)
    asked = list(zip(ends[::2], ends[1::2], strict=True))

    def draw(begin: str, end: str) -> str:
        middle = partial(draw_letters, rng, string.ascii_lowercase)
        return draw_distinct(lambda: begin + middle(rng.randint(6, 18)) + end, 1, taken)[0]

    answers = [draw(begin, end) for begin, end in asked]
    others: list[str] = []
    while len(others) < size:
        begin, end = rng.choice(asked)
        other = draw(*rng.choice([(begin, ""), ("", end), ("", "")]))
        if (other[:3], other[-3:]) not in asked:
            others.append(other)
    words = answers + others
    rng.shuffle(words)
    return "Below is a list of strings.\n\n" + "\n".join(words), tuple(
        Question(
            f'Find the string that begins with "{begin}" and ends with "{end}". The string is:',
            (answer,),
            "include",
            96,
        )
        for (begin, end), answer in zip(asked, answers, strict=True)
    )
