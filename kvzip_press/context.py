"""CompressedContext: compress a text, ask it, measure it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .cache.measure import cache_nbytes, kept_fraction, plain_nbytes
from .decoding import device_time, forgetting, greedy
from .models import language_model
from .press import KVzipPress
from .prompts import chat_affixes, context_ids

# Between the context and a question, as in the original evaluation
QUESTION_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Answer:
    """
    A greedy answer.

    Parameters
    ----------
    text : str
        Decoded, without special tokens.
    token_ids : list[int]
        Generated ids, the end token included if there was one.
    prefill_seconds : float
        Time to read the question and choose the first token.
    seconds_per_token : float
        Mean time of each further token; 0.0 if there was none.
    """

    text: str
    token_ids: list[int]
    prefill_seconds: float
    seconds_per_token: float


def question_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> torch.Tensor:
    """Token ids of a question behind a context and of what leads over to its answer, shape (1, num_tokens)."""
    _, suffix = chat_affixes(tokenizer)
    return torch.tensor([tokenizer.encode(QUESTION_SEPARATOR + question + suffix, add_special_tokens=False)])


def longest_context(model: PreTrainedModel) -> int | None:
    """Tokens that a model can take, None if unlimited."""
    return getattr(language_model(model).config, "max_position_embeddings", None)


@dataclass(repr=False, eq=False)
class CompressedContext:
    """
    A text in a model's KV cache, full or compressed, that answers any number of questions.

    Each question and its answer are dropped afterwards. Build one with :meth:`compress` or :meth:`full`.

    Parameters
    ----------
    model, tokenizer
        The model and its tokenizer.
    cache : Cache
        The transformers cache.
    num_tokens : int
        Tokens of the context, chat prefix included.
    prefill_seconds, compress_seconds : float
        Time of the prefill, and of replay and eviction.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: Cache
    num_tokens: int
    prefill_seconds: float
    compress_seconds: float

    def __repr__(self) -> str:
        return f"CompressedContext(num_tokens={self.num_tokens}, kept_fraction={self.kept_fraction:.3f})"

    @classmethod
    def compress(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text: str,
        *,
        ratio: float | None = None,
        press: KVzipPress | None = None,
    ) -> CompressedContext:
        """
        Prefill a text and compress its cache.

        Parameters
        ----------
        model, tokenizer
            A decoder-only model and its tokenizer.
        text : str
            The context.
        ratio : float, optional
            Kept fraction, in (0, 1]; default that of :class:`KVzipPress`.
        press : KVzipPress, optional
            All other parameters; instead of ``ratio``.

        Raises
        ------
        ValueError
            If the text is empty or longer than the model's window, or ``ratio`` and ``press`` are both given.
        """
        if press is not None and ratio is not None:
            raise ValueError(f"give ratio={ratio} or press={press}, not both")
        if press is None:
            press = KVzipPress(ratio=ratio, tokenizer=tokenizer)
        elif press.tokenizer is None:
            press = replace(press, tokenizer=tokenizer)
        return cls._build(model, tokenizer, text, press)

    @classmethod
    def full(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> CompressedContext:
        """Prefill a text and keep its plain cache, to compare with."""
        return cls._build(model, tokenizer, text, None)

    @classmethod
    def _build(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, press: KVzipPress | None
    ) -> CompressedContext:
        if not text.strip():
            raise ValueError("the text is empty; give a document with at least one word")
        ids = context_ids(tokenizer, text)
        window = longest_context(model)
        if window is not None and ids.shape[1] > window:
            raise ValueError(
                f"the text has {ids.shape[1]} tokens, {ids.shape[1] - window} more than the model's window of {window}"
                "; shorten it or use a model with a longer window"
            )
        decoder = language_model(model)
        cache = DynamicCache(config=decoder.config)
        start = device_time(model.device)
        with torch.no_grad(), nullcontext() if press is None else press(model):
            decoder(input_ids=ids.to(model.device), past_key_values=cache)
            prefilled = device_time(model.device)
        end = prefilled if press is None else device_time(model.device)
        return cls(model, tokenizer, cache, ids.shape[1], prefilled - start, end - prefilled)

    @property
    def kept_fraction(self) -> float:
        """Achieved fraction of the context's KV pairs that stayed."""
        return kept_fraction(self.cache)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages the cache holds."""
        return cache_nbytes(self.cache)

    @property
    def full_nbytes(self) -> int:
        """Bytes of the plain cache of the same context."""
        return plain_nbytes(self.model, self.num_tokens)

    @property
    def max_length(self) -> int | None:
        """The model's window in tokens, None if unlimited."""
        return longest_context(self.model)

    def ask(self, question: str, max_new_tokens: int = 50) -> str:
        """Answer a question greedily; the context stays as it was."""
        return self.answer(question, max_new_tokens).text

    def answer(self, question: str, max_new_tokens: int = 50) -> Answer:
        """
        Answer a question greedily, with its tokens and times; the context stays as it was.

        Raises
        ------
        ValueError
            If ``max_new_tokens`` is below 1, or question and answer don't fit the model's window.
        """
        ids = question_ids(self.tokenizer, question)
        needed = self.num_tokens + ids.shape[1] + max_new_tokens
        if self.max_length is not None and needed > self.max_length:
            raise ValueError(
                f"context, question and answer take {needed} tokens, {needed - self.max_length} more than the model's "
                f"window of {self.max_length}; lower max_new_tokens or shorten the context"
            )
        token_ids: list[int] = []
        with forgetting(self.cache):
            times = [device_time(self.model.device)]
            for token in greedy(self.model, self.cache, ids, self.cache.get_seq_length(), max_new_tokens):
                token_ids.append(token)
                times.append(device_time(self.model.device))
        text = str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        steps = len(token_ids) - 1
        return Answer(text, token_ids, times[1] - times[0], (times[-1] - times[1]) / steps if steps else 0.0)
