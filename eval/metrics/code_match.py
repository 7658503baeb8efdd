"""The metric that compares code: which of a repository's functions an answer repeats (RepoQA, arXiv 2406.06025)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..tasks.base import Question
from .text_match import Score

THRESHOLD = 0.8
CODE_BLOCK = re.compile(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", re.DOTALL | re.MULTILINE)


def code_of(prediction: str) -> str:
    """Return the first code block of an answer, or all of it if there is none."""
    match = CODE_BLOCK.search(prediction.strip())
    return match.group(1) if match else prediction.strip()


def similarity(candidate: str, reference: str) -> float:
    """BLEU-4 of the words, smoothed by method 4 of Chen and Cherry."""
    try:
        from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
    except ImportError as error:
        raise ImportError("BLEU needs the package nltk: pip install 'kvzip-press[eval]'") from error
    smoothing = SmoothingFunction().method4
    return float(sentence_bleu([reference.split()], candidate.split(), smoothing_function=smoothing))


def repoqa(prediction: str, question: Question) -> Score:
    """Whether the asked function is the most similar of all asked in its context, with a similarity of at least 0.8.

    The question's details name the `function` and hold the code of all `functions` by name.
    """
    functions: Mapping[str, str] = question.details["functions"]
    code = code_of(prediction)
    similarities = {name: similarity(code, reference) for name, reference in functions.items()}
    best = max(similarities, key=lambda name: similarities[name])
    right = best == question.details["function"] and similarities[best] >= THRESHOLD
    return Score(float(right), code)
