"""Tiny random models in folders, one with a system prompt, and artificial texts: no download, no waiting."""

import random

import pytest
from eval_harness import save_tiny_model

from kvzip_press import load_model

TEMPLATE = (
    "<s>system: help\n{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), TEMPLATE)


@pytest.fixture
def tiny(model_dir):
    return load_model(str(model_dir))


@pytest.fixture(scope="session")
def toy_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def toy(toy_dir):
    """A model that every press runs on, and its tokenizer."""
    return load_model(str(toy_dir))


@pytest.fixture(scope="session")
def texts():
    rng = random.Random(7)
    words = "river stone bright under walking seldom paper engine cloud answer winter matter open".split()
    return [[" ".join(rng.choices(words, k=rng.randint(4, 12))) + "." for _ in range(400)] for _ in range(3)]


@pytest.fixture(scope="session")
def text_dir(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i, sentences in enumerate(texts):
        (folder / f"{i}.txt").write_text(" ".join(sentences), encoding="utf-8")
    return folder
