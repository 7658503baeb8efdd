"""Samples drawn from a seed and grown to a length in tokens."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from .base import Question, Request, Sample, Task

T = TypeVar("T")
# Draws a context and its questions, with a haystack of so many units.
Maker = Callable[[random.Random, int], tuple[str, tuple[Question, ...]]]


class TooLongError(ValueError):
    """Even the smallest thing is longer than allowed."""


def generate(
    task: Task,
    request: Request,
    make: Maker,
    *,
    length: int,
    number: int,
    smallest: int = 1,
    largest: int | None = None,
    stream: str | None = None,
) -> list[Sample]:
    """
    Draw samples, each with the largest haystack that fits, of a size between two bounds; see `sampler`.

    `number` is how many there are where the request does not say.
    """
    draw = sampler(task, request, length, stream)
    return [draw(index, make, smallest, largest) for index in range(request.number(number))]


def sampler(task: Task, request: Request, length: int, stream: str | None = None) -> Callable[..., Sample]:
    """
    Return a function that draws the sample of an index, given a `Maker` and the smallest and largest size.

    Each sample depends on the task's name, the length (the task's own where the request names none), the seed and the
    index alone: not on the samples before it, the process or the Python version. Tasks that share a `stream`, which
    takes the place of the name, share their samples. The maker is called several times with the same generator state
    and different sizes.

    Raises
    ------
    ValueError
        If the request has no tokenizer, or (`TooLongError`, of the function) if even the smallest sample is too long.
    """
    count_tokens = token_counter(task, request)
    budget = request.length or length

    def draw(index: int, make: Maker, smallest: int, largest: int | None) -> Sample:
        def draw_sized(size: int) -> Sample:
            seed = f"{stream or task.name}/{budget}/{request.seed}/{index}"
            return Sample(str(index), *make(random.Random(seed), size))

        tokens = partial(needed_tokens, count_tokens=count_tokens)
        return grow(task.name, draw_sized, tokens, budget, smallest, largest)

    return draw


def grow(
    task_name: str,
    make: Callable[[int], T],
    tokens: Callable[[T], int],
    budget: int,
    smallest: int = 1,
    largest: int | None = None,
) -> T:
    """
    Make the largest thing that fits, by a binary search that guesses from the lengths seen so far.

    `make` gives the thing of a size, from `smallest` to `largest` (inclusive), and `tokens` its length, which grows
    about evenly with the size. The search ends within half a percent of the budget. `TooLongError`, which names the
    task, says that the smallest one does not fit.
    """
    low, best = smallest, make(smallest)
    low_tokens = tokens(best)
    if low_tokens > budget:
        raise TooLongError(
            f"{task_name}: needs a length of at least {low_tokens} tokens, got {budget}: raise the length"
        )
    while True:
        if low == largest:
            return best
        high = 2 * low + 1 if largest is None else min(2 * low + 1, largest)
        thing = make(high)
        high_tokens = tokens(thing)
        if high_tokens > budget:
            break
        low, best, low_tokens = high, thing, high_tokens
    turn = 0
    while high - low > 1 and budget - low_tokens > budget // 200:
        # Every third step halves, so that lengths which grow unevenly cost at most three times as many steps.
        turn += 1
        share = 0.5 if turn % 3 == 0 else (budget - low_tokens) / (high_tokens - low_tokens)
        size = min(max(low + int((high - low) * share), low + 1), high - 1)
        thing = make(size)
        thing_tokens = tokens(thing)
        if thing_tokens > budget:
            high, high_tokens = size, thing_tokens
        else:
            low, best, low_tokens = size, thing, thing_tokens
    return best


def needed_tokens(sample: Sample, count_tokens: Callable[[str], int]) -> int:
    """Tokens of a sample's context, its longest question, the beginning of the answer and the answer together."""
    return count_tokens(sample.context) + max(
        count_tokens(question.text + question.answer_prefix) + question.max_new_tokens for question in sample.questions
    )


def token_counter(task: Task, request: Request) -> Callable[[str], int]:
    """Return a function that measures texts with the request's tokenizer, or raise ValueError if it has none."""
    tokenizer = request.tokenizer
    if tokenizer is None:
        raise ValueError(f"{task.name}: lengths are measured in tokens: give the request a tokenizer")
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def draw_uuid(rng: random.Random) -> str:
    """Draw a version 4 UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_distinct(draw: Callable[[], str], number: int, taken: set[str] | None = None) -> list[str]:
    """Draw until there are so many different values, none of them in `taken`, to which they are added."""
    taken = set() if taken is None else taken
    values: list[str] = []
    while len(values) < number:
        value = draw()
        if value not in taken:
            taken.add(value)
            values.append(value)
    return values
