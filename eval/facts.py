"""Contexts with several invented facts hidden in natural text, and the questions that ask for them."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from .tasks.essays import draw_passage

CITIES = "Lisbon Oslo Nairobi Toronto Lima Prague Hanoi Dublin Quito Cairo Athens Manila Havana Vienna Kyoto".split()
PEOPLE = [
    "Clara Jensen", "Omar Haddad", "Nina Petrova", "Victor Almeida", "Ruth Okafor", "Hugo Lindqvist",
    "Mei Tanaka", "Elena Rossi", "Felix Baumann", "Amara Diallo", "Ivan Horvat", "Lucia Navarro",
]  # fmt: skip
INSTRUMENTS = "cello trumpet harp flute banjo oboe accordion clarinet saxophone mandolin".split()
ANIMALS = "parrot tortoise ferret hamster hedgehog gecko goldfish rabbit donkey llama".split()
FRUITS = "mango papaya lemon pineapple kiwi raspberry coconut banana cherry pear".split()


@dataclass(frozen=True)
class FactKind:
    """A wording of a fact: its statement and question with `{key}` and `{answer}`, and what may fill them."""

    statement: str
    question: str
    keys: list[str]
    answers: list[str] | None

    def draw_answer(self, rng: random.Random) -> str:
        """Draw from `answers`, or a number of five digits if there are none."""
        return str(rng.randrange(10000, 100000)) if self.answers is None else rng.choice(self.answers)


# Questions that do not repeat the statement word for word: a model of 135 million parameters then gets a little over
# half of them right with the full cache, which leaves room for a compressed one to do worse.
KINDS = [
    FactKind("The secret number for {key} is {answer}.", "Which number belongs to {key}?", CITIES, None),
    FactKind("{key} plays the {answer}.", "Which instrument does {key} play?", PEOPLE, INSTRUMENTS),
    FactKind("The pet of {key} is a {answer}.", "Which animal does {key} have as a pet?", PEOPLE, ANIMALS),
    FactKind("{key} eats a {answer} every morning.", "What does {key} eat in the morning?", PEOPLE, FRUITS),
]


@dataclass(frozen=True)
class Fact:
    """A fact: the sentence hidden in the context, the question asked, the answer expected."""

    statement: str
    question: str
    answer: str


@dataclass(frozen=True)
class FactContext:
    """A context, the facts asked of those hidden in it, in order of depth, and the seed that made it."""

    seed: int
    text: str
    facts: list[Fact]


def make_context(
    seed: int,
    texts: list[list[str]],
    count_tokens: Callable[[str], int],
    n_facts: int = 8,
    n_asked: int = 4,
    min_tokens: int = 700,
    max_tokens: int = 1600,
) -> FactContext:
    """Hide facts at spread depths, at sentence borders, in a passage of natural text.

    Parameters
    ----------
    seed : int
        Decides everything: the same seed and texts give the same context.
    texts : list of list of str
        What `load_texts` returns.
    count_tokens : callable
        Length of a text in tokens.
    n_facts : int
        Facts to hide. Their keys and answers are distinct, and none occurs in the passage itself.
    n_asked : int
        Facts asked, drawn from those hidden; the others are there to be told apart.
    min_tokens, max_tokens : int
        Bounds (inclusive) of the context's length, facts included.

    Returns
    -------
    FactContext
        The context; every answer is in it exactly once.
    """
    if not 0 < n_asked <= n_facts:
        raise ValueError(f"n_asked must be between 1 and n_facts = {n_facts}, got {n_asked}")
    rng = random.Random(seed)
    # Room for the facts and for the sentence that ends the passage.
    room = 20 * n_facts + 100
    if max_tokens - room < min_tokens:
        raise ValueError(
            f"max_tokens must be at least min_tokens + {room} for {n_facts} facts, got {min_tokens} and {max_tokens}"
        )
    for _ in range(100):
        target = rng.randint(min_tokens, max_tokens - room)
        passage = draw_passage(texts, rng, count_tokens, target, max_tokens)
        facts = draw_facts(rng, n_facts, " ".join(passage))
        text = hide(facts, passage, rng)
        if min_tokens <= count_tokens(text) <= max_tokens:
            asked = sorted(rng.sample(range(n_facts), n_asked))
            return FactContext(seed, text, [facts[i] for i in asked])
    raise ValueError(f"no context of {min_tokens} to {max_tokens} tokens found for seed {seed}: widen the bounds")


def draw_facts(rng: random.Random, n_facts: int, passage: str) -> list[Fact]:
    """Draw facts of all kinds in turn, whose keys and answers are distinct and absent from the passage."""
    taken = passage.lower()
    kinds = [KINDS[i % len(KINDS)] for i in range(n_facts)]
    rng.shuffle(kinds)
    facts: list[Fact] = []
    for kind in kinds:
        for _ in range(1000):
            key, answer = rng.choice(kind.keys), kind.draw_answer(rng)
            if key.lower() not in taken and answer.lower() not in taken:
                break
        else:
            raise ValueError(f"no unused key and answer for {kind.statement!r}: hide fewer than {n_facts} facts")
        fact = Fact(kind.statement.format(key=key, answer=answer), kind.question.format(key=key), answer)
        taken += " " + fact.statement.lower()
        facts.append(fact)
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
