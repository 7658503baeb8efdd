"""The real model, loaded once, and contexts of natural text."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvzip_press import load_model
from kvzip_press.eval.essays import load_texts


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_model()


@pytest.fixture(scope="session")
def essay(smollm2):
    """Natural text of a number of tokens."""
    _, tokenizer = smollm2
    sentences = [sentence for text in load_texts() for sentence in text]
    ids = tokenizer.encode(" ".join(sentences[:1200]), add_special_tokens=False)

    def text(num_tokens: int) -> str:
        return tokenizer.decode(ids[:num_tokens])

    return text


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield
