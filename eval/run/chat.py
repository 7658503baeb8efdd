"""What the model reads: a context opened as a user's message, and questions behind it, in two wordings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from ...prompts import PROMPTS, chat_affixes, encode_prompts
from ..choices import STYLES
from ..tasks.base import Question

# arXiv 2505.23416, released code
SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class OpenedContext:
    """
    A context as the model reads it, to be followed by questions.

    ``ids``, shape (1, num_tokens), hold what stands before the context, the context, and a question compressed with it,
    if any. The first ``prefix_length`` belong to the chat template and the instruction.
    """

    chat: Chat
    ids: torch.Tensor
    prefix_length: int
    text: str
    suffix: str

    @property
    def num_tokens(self) -> int:
        """Tokens of the context, those of the prefix included."""
        return self.ids.shape[1]

    def question_ids(self, question: Question, *, already_read: bool = False) -> torch.Tensor:
        """
        Token ids of a question and of what leads over to its answer, shape (1, num_question_tokens).

        Where the question is already read, as the end of the context, only what leads over is left.
        """
        asked = "" if already_read else self.chat.question_text(self.text, question.text)
        return self.chat.encode(asked + self.suffix + question.answer_prefix)


@dataclass(frozen=True)
class Chat:
    """A wording, for one model."""

    tokenizer: PreTrainedTokenizerBase  # without a chat template the text is read raw, behind the BOS token if any
    # ``"paper"``: system prompt, instruction and context, then ``Q: ...`` for each question (arXiv 2505.23416).
    # ``"kvpress"``: the ids that kvpress's pipeline makes of the same context, question and answer prefix.
    style: str
    instruction: str  # the paper's sentence in front of the context

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"the prompt style must be one of {', '.join(STYLES)}, got {self.style!r}")

    @property
    def stops_at_first_token(self) -> bool:
        """Whether an end token ends an answer at once: kvpress's pipeline does not look at an answer's first token."""
        return self.style == "paper"

    def encode(self, text: str) -> torch.Tensor:
        """Token ids of a text, shape (1, num_tokens)."""
        ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return torch.tensor([ids], dtype=torch.long)

    def open(self, context: str, question: Question | None = None) -> OpenedContext:
        """Open a context, with a question as its end if a press is to see it."""
        text = context if question is None else context + self.question_text(context, question.text)
        if self.style == "kvpress":
            opened, suffix = chat_affixes(self.tokenizer, text)
            ids = self.encode(opened)
            prefix = encode_prompts(PROMPTS["default"], self.tokenizer).find_prefix(ids[0].tolist())
            return OpenedContext(self, ids, prefix, text, suffix)
        before, suffix = self._paper_affixes()
        # Encoded apart, as in the paper's code, so that the context does not merge with the instruction
        prefix_ids = self.encode(before)
        ids = torch.cat([prefix_ids, self.encode(text)], dim=1)
        return OpenedContext(self, ids, prefix_ids.shape[1], text, suffix)

    def question_text(self, context: str, question: str) -> str:
        """Return the question with what parts it from the context (or from the question read before it)."""
        if self.style == "paper":
            return f"\n\nQ: {question}"
        # kvpress's data sets bring their own line breaks
        touching = question and not question[0].isspace() and not context[-1:].isspace()
        return f"\n\n{question}" if touching else question

    def _paper_affixes(self) -> tuple[str, str]:
        opening = f"{self.instruction}\n\n"
        if self.tokenizer.chat_template is None:
            return chat_affixes(self.tokenizer, opening)[0], "\nA:"
        try:
            return chat_affixes(self.tokenizer, opening, system=SYSTEM)
        except TemplateError:
            # Templates without a system role
            return chat_affixes(self.tokenizer, f"{SYSTEM}\n\n{opening}")
