"""Several invented facts hidden in natural text, and questions that ask for some of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from .base import Question, Request, Sample, Task
from .essays import draw_passage, load_texts
from .generation import token_counter
from .loading import wants_generated

CITIES = "Lisbon Oslo Nairobi Toronto Lima Prague Hanoi Dublin Quito Cairo Athens Manila Havana Vienna Kyoto".split()
PEOPLE = [
    "Clara Jensen", "Omar Haddad", "Nina Petrova", "Victor Almeida", "Ruth Okafor", "Hugo Lindqvist",
    "Mei Tanaka", "Elena Rossi", "Felix Baumann", "Amara Diallo", "Ivan Horvat", "Lucia Navarro",
]  # fmt: skip
INSTRUMENTS = "cello trumpet harp flute banjo oboe accordion clarinet saxophone mandolin".split()
ANIMALS = "parrot tortoise ferret hamster hedgehog gecko goldfish rabbit donkey llama".split()
FRUITS = "mango papaya lemon pineapple kiwi raspberry coconut banana cherry pear".split()


# Statement, question, and what may be its key and its answer (None: a number of five digits). Questions do not repeat
# the statement word for word: a model of 135 million parameters then gets a little over half of them right with the
# full cache, which leaves room for a compressed one to do worse.
KINDS: list[tuple[str, str, list[str], list[str] | None]] = [
    ("The secret number for {} is {}.", "Which number belongs to {}?", CITIES, None),
    ("{} plays the {}.", "Which instrument does {} play?", PEOPLE, INSTRUMENTS),
    ("The pet of {} is a {}.", "Which animal does {} have as a pet?", PEOPLE, ANIMALS),
    ("{} eats a {} every morning.", "What does {} eat in the morning?", PEOPLE, FRUITS),
]


class Fact(NamedTuple):
    """A fact: the sentence hidden in the context, the question asked, the answer expected."""

    statement: str
    question: str
    answer: str


LENGTH = 1600
NUM_CONTEXTS = 24
NUM_FACTS, NUM_ASKED = 8, 4
NEW_TOKENS = 24
# For the facts and for the sentence that ends the passage
ROOM = 20 * NUM_FACTS + 100


class Facts(Task):
    """
    Eight facts at spread depths of an essay, of which four are asked.

    The request's length bounds the context alone: by default 700 to 1,600 tokens.
    """

    name = "facts"
    family = "facts"

    def load(self, request: Request) -> list[Sample]:
        """Return 24 contexts by default, each decided by the sum of the request's seed and its own index."""
        wants_generated(self, request)
        count_tokens, texts = token_counter(self, request), load_texts(request.corpus)
        length = request.length or LENGTH
        return [
            Sample(str(index), *make_context(request.seed + index, texts, count_tokens, length))
            for index in range(request.number(NUM_CONTEXTS))
        ]


def make_context(
    seed: int, texts: list[list[str]], count_tokens: Callable[[str], int], length: int
) -> tuple[str, tuple[Question, ...]]:
    """
    Hide facts at spread depths, at sentence borders, in a passage of natural text; seed and texts decide everything.

    The context has from 7/16 of the length to all of it, in tokens, and holds every answer exactly once; the questions
    come in order of depth.
    """
    rng = random.Random(seed)
    least = length * 7 // 16
    if length - ROOM < least:
        raise ValueError(f"facts: needs a length of at least {16 * ROOM // 9} tokens, got {length}: raise the length")
    for _ in range(100):
        passage = draw_passage(texts, rng, count_tokens, rng.randint(least, length - ROOM), length)
        facts = draw_facts(rng, NUM_FACTS, " ".join(passage))
        text = hide(facts, passage, rng)
        if least <= count_tokens(text) <= length:
            asked = [facts[index] for index in sorted(rng.sample(range(NUM_FACTS), NUM_ASKED))]
            # Worded for kvpress's pipeline, which reads a question as it is
            return text, tuple(
                Question(f"Question: {fact.question}", (fact.answer,), "include", NEW_TOKENS) for fact in asked
            )
    raise ValueError(f"facts: no context of {least} to {length} tokens found for seed {seed}: choose another length")


def draw_facts(rng: random.Random, n_facts: int, passage: str) -> list[Fact]:
    """Draw facts of all kinds in turn, whose keys and answers are distinct and absent from the passage."""
    taken = passage.lower()
    kinds = [KINDS[i % len(KINDS)] for i in range(n_facts)]
    rng.shuffle(kinds)
    facts: list[Fact] = []
    for statement, question, keys, answers in kinds:
        for _ in range(1000):
            key = rng.choice(keys)
            answer = str(rng.randrange(10000, 100000)) if answers is None else rng.choice(answers)
            if key.lower() not in taken and answer.lower() not in taken:
                break
        else:
            raise ValueError(f"no unused key and answer for {statement!r}: hide fewer than {n_facts} facts")
        facts.append(Fact(statement.format(key, answer), question.format(key), answer))
        taken += " " + facts[-1].statement.lower()
    return facts


def hide(facts: list[Fact], passage: list[str], rng: random.Random) -> str:
    """Insert each fact at a random sentence border of its own equal part of the passage."""
    sentences = list(passage)
    n = len(passage)
    # From the back, so that an insertion does not shift the borders still to come.
    for i in reversed(range(len(facts))):
        first, last = i * n // len(facts), (i + 1) * n // len(facts)
        sentences.insert(rng.randint(first, max(first, last - 1)), facts[i].statement)
    return " ".join(sentences)


TASKS: list[Task] = [Facts()]
