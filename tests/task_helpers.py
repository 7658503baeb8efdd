"""What the tests of evaluation tasks share."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvzip_press.eval.tasks.base import Sample


def build_word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, and one a run of punctuation marks; only for counting."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def fingerprint(sample: Sample) -> str:
    """Hash of everything in a sample."""
    return hashlib.sha256(json.dumps(asdict(sample), sort_keys=True).encode()).hexdigest()[:16]
