"""What the tests of evaluation tasks share."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvzip_press.eval.tasks.base import Request, Sample
from kvzip_press.eval.tasks.registry import TASKS


def build_word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, and one a run of punctuation marks; only for counting."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


TOKENIZER = build_word_tokenizer()


def count_tokens(text: str) -> int:
    """Length of a text in words and runs of punctuation marks."""
    return len(TOKENIZER.encode(text))


def load(name: str, **options) -> list[Sample]:
    """Samples of a task, whose source and corpus may be paths."""
    options = {option: str(value) if isinstance(value, Path) else value for option, value in options.items()}
    return TASKS[name].load(Request(tokenizer=TOKENIZER, **options))


def fingerprint(sample: Sample) -> str:
    """Hash of everything in a sample."""
    return hashlib.sha256(json.dumps(asdict(sample), sort_keys=True).encode()).hexdigest()[:16]
