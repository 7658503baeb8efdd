"""A tiny random model in a folder, and artificial texts: no download, no waiting."""

import random

import pytest
from eval_harness import WORDS, save_tiny_model

from kvzip_press import load_model


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
    return [[" ".join(rng.choices(WORDS[:-1], k=rng.randint(4, 12))) + "." for _ in range(400)] for _ in range(3)]


@pytest.fixture(scope="session")
def text_dir(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i, sentences in enumerate(texts):
        (folder / f"{i}.txt").write_text(" ".join(sentences), encoding="utf-8")
    return folder
