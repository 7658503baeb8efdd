"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest
from tiny_models import FAMILIES, build_model, build_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def model() -> PreTrainedModel:
    return build_model("llama")


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param
