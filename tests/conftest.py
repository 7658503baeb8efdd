"""Fixtures shared by all tests."""

from collections.abc import Callable

import pytest
from tiny_models import FAMILIES, build_model, build_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging

from kvzip_press import load_model
from kvzip_press.eval.tasks.essays import load_texts

logging.disable_progress_bar()


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def model() -> PreTrainedModel:
    return build_model("llama")


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32, from its package."""
    return load_model()


@pytest.fixture(scope="session")
def essay(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> Callable[[int], str]:
    """Natural text of a number of tokens."""
    _, tokenizer = smollm2
    sentences = [sentence for text in load_texts() for sentence in text]
    ids = tokenizer.encode(" ".join(sentences[:1200]), add_special_tokens=False, verbose=False)
    return lambda num_tokens: tokenizer.decode(ids[:num_tokens])
