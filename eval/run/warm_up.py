"""Have kernels compiled before anything is timed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from ..presses.registry import FULL
from ..tasks.base import Question
from .answer import greedy_answer
from .chat import Chat
from .sweep import ContextSweep, Effort, SweptCache

CONTEXT = "The museum in the harbour opens at ten. The director has counted nine ships today, and keeps a list. " * 3
QUESTION = Question("How many ships?", ("nine",), "include", 2)


def warm_up(model: PreTrainedModel, chat: Chat, presses: Iterable[str], **options: Any) -> None:
    """Compress a short context with presses of kvzip-press and ask it something; options as of `ContextSweep`."""
    opened = chat.open(CONTEXT)
    ids = opened.question_ids(QUESTION)
    sweep = ContextSweep(model, opened, Effort(), **options)
    for _, swept in sweep.caches([(FULL, 1.0), *((press, 0.5) for press in presses)]):
        assert isinstance(swept, SweptCache)
        greedy_answer(model, swept.cache, ids, opened.num_tokens, QUESTION.max_new_tokens)
