"""What the model is told before it replays a chunk, and where the user's text begins in a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

Text = str | Sequence[int]


@dataclass(frozen=True)
class ReplayPrompts:
    """
    Wording of the replay, as text or as token ids. With ids for all parts and a prefix length no tokenizer is needed.

    The defaults are the released code's (https://github.com/snu-mllab/KVzip); :data:`PROMPTS` holds the paper's too.

    Parameters
    ----------
    first : str or sequence of int
        Before the first chunk.
    later : str or sequence of int
        Before each later chunk, followed by the last ``anchor_tokens`` tokens of the chunk before it.
    after_anchor : str or sequence of int
        After those tokens.
    anchor_tokens : int
        Number of tokens that tell the model where to start.
    suffix : str or sequence of int, optional
        Between the prompt and the replayed chunk; by default what the chat template puts between a user's text and
        the answer (a line break for a context without chat template).
    prefix_length : int, optional
        Number of leading tokens of the context that belong to the chat template and the system prompt; by default
        found from the chat template.
    """

    first: Text = "\n\nRepeat the previous context exactly."
    later: Text = "\n\nRepeat the part of the previous context exactly, starting with"
    after_anchor: Text = ""
    anchor_tokens: int = 8
    suffix: Text | None = None
    prefix_length: int | None = None

    def __post_init__(self) -> None:
        if self.anchor_tokens < 0:
            raise ValueError(f"anchor_tokens must be at least 0, got {self.anchor_tokens}")
        if self.prefix_length is not None and self.prefix_length < 0:
            raise ValueError(f"prefix_length must be at least 0, got {self.prefix_length}")

    @property
    def needs_tokenizer(self) -> bool:
        """Whether some part is text, or must come from the chat template."""
        parts = (self.first, self.later, self.after_anchor, self.suffix)
        return self.prefix_length is None or any(part is None or isinstance(part, str) and part for part in parts)


PROMPTS = {
    "default": ReplayPrompts(),
    # arXiv 2505.23416, section 3.2
    "paper": ReplayPrompts(
        first="\n\nRepeat the previous context:",
        later="\n\nRepeat the previous context starting with ",
        after_anchor=":",
    ),
}


@dataclass(frozen=True)
class EncodedPrompts:
    """:class:`ReplayPrompts` as token ids, for contexts inside the chat template and for raw ones."""

    first: list[int]
    later: list[int]
    after_anchor: list[int]
    anchor_tokens: int
    chat_prefix: list[int]
    chat_suffix: list[int]
    raw_suffix: list[int]
    bos_token_id: int | None
    prefix_length: int | None

    def find_prefix(self, input_ids: Sequence[int]) -> int:
        """
        Count the leading tokens of ``input_ids`` that belong to the chat template.

        A raw context has none, but for a leading BOS token. The last token of the prefix may differ: tokenizers can
        merge it with the first characters of the user's text.
        """
        if self.prefix_length is not None:
            return min(self.prefix_length, len(input_ids))
        matched = 0
        while matched < min(len(self.chat_prefix), len(input_ids)) and self.chat_prefix[matched] == input_ids[matched]:
            matched += 1
        if self.chat_prefix and matched >= max(1, len(self.chat_prefix) - 1):
            return matched
        return int(len(input_ids) > 0 and self.bos_token_id is not None and input_ids[0] == self.bos_token_id)

    def suffix(self, prefix_length: int) -> list[int]:
        """Tokens between the prompt and the replayed chunk, for a context with that many prefix tokens."""
        in_chat = self.prefix_length is not None or prefix_length >= max(2, len(self.chat_prefix) - 1)
        return self.chat_suffix if in_chat else self.raw_suffix


def chat_affixes(tokenizer: PreTrainedTokenizerBase, opening: str = "", system: str | None = None) -> tuple[str, str]:
    """
    Text that the chat template puts before and after a user's message; the opening of the message ends the text before.

    Without a chat template: the BOS token and a line break, as kvpress's pipeline builds its prompts, and no system
    prompt. A template that doesn't hold a single user message exactly once is refused.
    """
    if tokenizer.chat_template is None:
        return (tokenizer.bos_token or "") + opening, "\n"
    # As in kvpress's pipeline: longer than whatever the opening holds
    mark = "#" * (len(opening) + 10)
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": opening + mark})
    options = {"add_generation_prompt": True, "tokenize": False, "enable_thinking": False}
    rendered = tokenizer.apply_chat_template(messages, **options)
    if rendered.count(mark) != 1:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} holds the user's message {rendered.count(mark)} "
            "times; pass prompts=ReplayPrompts(prefix_length=..., suffix=...)"
        )
    prefix, suffix = rendered.split(mark)
    return prefix, suffix


def context_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Token ids of a text opened as a user's message of the chat template, shape (1, num_tokens), on the CPU."""
    prefix, _ = chat_affixes(tokenizer)
    ids = tokenizer.encode(prefix + text, add_special_tokens=False, verbose=False)
    return torch.tensor([ids], dtype=torch.long, device="cpu")


def encode_prompts(prompts: ReplayPrompts, tokenizer: PreTrainedTokenizerBase | None) -> EncodedPrompts:
    """Tokenize ``prompts``; without a tokenizer no part may be text."""

    def encode(part: Text) -> list[int]:
        if not isinstance(part, str):
            return list(part)
        if not part:
            return []
        if tokenizer is None:
            raise ValueError(f"a tokenizer is needed for the replay prompt {part!r}: pass tokenizer=")
        return list(tokenizer.encode(part, add_special_tokens=False))

    chat_prefix, chat_suffix = "", ""
    if tokenizer is not None and (prompts.prefix_length is None or prompts.suffix is None):
        chat_prefix, chat_suffix = chat_affixes(tokenizer)
    return EncodedPrompts(
        first=encode(prompts.first),
        later=encode(prompts.later),
        after_anchor=encode(prompts.after_anchor),
        anchor_tokens=prompts.anchor_tokens,
        chat_prefix=encode(chat_prefix),
        chat_suffix=encode(chat_suffix if prompts.suffix is None else prompts.suffix),
        raw_suffix=encode("\n" if prompts.suffix is None else prompts.suffix),
        bos_token_id=None if tokenizer is None else tokenizer.bos_token_id,
        prefix_length=prompts.prefix_length,
    )


@lru_cache(maxsize=8)
def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    return tokenizer


def knows_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it is more than the special tokens, which transformers makes where a tokenizer's files are missing."""
    return not set(tokenizer.encode("Repeat", add_special_tokens=False)) <= set(tokenizer.all_special_ids)


def find_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Load the tokenizer by the model's name, once; a model without a name, or a tokenizer under it, is refused."""
    name = model.config.name_or_path
    remedy = "pass KVzipPress(tokenizer=...)"
    if not name:
        raise ValueError(f"{type(model).__name__} was built in memory and has no name to load a tokenizer by; {remedy}")
    try:
        tokenizer = _load_tokenizer(name)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"no tokenizer found for model {name!r}; {remedy}") from error
    if not knows_words(tokenizer):
        raise ValueError(f"the tokenizer found for model {name!r} knows no words; {remedy}")
    return tokenizer
