"""CompressedContext: compress a text, ask it, measure it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .cache.measure import cache_nbytes, is_compressed, kept_fraction
from .models import head_dim, language_model
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


class CompressedContext:
    """
    A text in a model's KV cache, full or compressed, that answers any number of questions.

    Each question and its answer are dropped afterwards. Build one with :meth:`compress` or :meth:`full`.

    Attributes
    ----------
    cache : Cache
        The transformers cache.
    num_tokens : int
        Tokens of the context, chat prefix included.
    prefill_seconds, compress_seconds : float
        Time of the prefill, and of replay and eviction.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: Cache,
        num_tokens: int,
        prefill_seconds: float,
        compress_seconds: float,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.num_tokens = num_tokens
        self.prefill_seconds = prefill_seconds
        self.compress_seconds = compress_seconds

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
        decoder = language_model(model)
        window = getattr(decoder.config, "max_position_embeddings", None)
        if window is not None and ids.shape[1] > window:
            raise ValueError(
                f"the text has {ids.shape[1]} tokens, {ids.shape[1] - window} more than the model's window of {window}"
                "; shorten it or use a model with a longer window"
            )
        cache = DynamicCache(config=decoder.config)
        start = time.perf_counter()
        with torch.no_grad():
            if press is None:
                decoder(input_ids=ids.to(model.device), past_key_values=cache)
                prefilled = time.perf_counter()
            else:
                with press(model):
                    decoder(input_ids=ids.to(model.device), past_key_values=cache)
                    _synchronize(model)
                    prefilled = time.perf_counter()
        _synchronize(model)
        end = time.perf_counter()
        return cls(model, tokenizer, cache, ids.shape[1], prefilled - start, end - prefilled if press else 0.0)

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
        config = language_model(self.model).config
        pairs = sum(
            layer_tokens * config.num_key_value_heads
            for layer_tokens in _plain_layer_lengths(self.model, self.num_tokens)
        )
        return 2 * pairs * head_dim(self.model) * self.model.dtype.itemsize

    @property
    def max_length(self) -> int | None:
        """The model's window in tokens, None if unlimited."""
        return getattr(language_model(self.model).config, "max_position_embeddings", None)

    def ask(self, question: str, max_new_tokens: int = 50) -> str:
        """Answer a question greedily; the context stays as it was."""
        return self.answer(question, max_new_tokens).text

    @torch.no_grad()
    def answer(self, question: str, max_new_tokens: int = 50) -> Answer:
        """
        Answer a question greedily, with its tokens and times; the context stays as it was.

        Raises
        ------
        ValueError
            If ``max_new_tokens`` is below 1, or question and answer don't fit the model's window.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        _, suffix = chat_affixes(self.tokenizer)
        ids = torch.tensor([self.tokenizer.encode(QUESTION_SEPARATOR + question + suffix, add_special_tokens=False)])
        needed = self.num_tokens + ids.shape[1] + max_new_tokens
        if self.max_length is not None and needed > self.max_length:
            raise ValueError(
                f"context, question and answer take {needed} tokens, {needed - self.max_length} more than the model's "
                f"window of {self.max_length}; lower max_new_tokens or shorten the context"
            )
        end_ids = self.model.generation_config.eos_token_id
        end_ids = set(end_ids if isinstance(end_ids, list) else [end_ids])
        saved = _save_plain_layers(self.cache)
        length = self.cache.get_seq_length()
        try:
            start = time.perf_counter()
            token_ids = [self._next_token(ids, length)]
            first = time.perf_counter()
            while len(token_ids) < max_new_tokens and token_ids[-1] not in end_ids:
                position = length + ids.shape[1] + len(token_ids) - 1
                token_ids.append(self._next_token(torch.tensor([token_ids[-1:]]), position))
            steps = len(token_ids) - 1
            per_token = (time.perf_counter() - first) / steps if steps else 0.0
        finally:
            _restore(self.cache, saved, length)
        text = str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        return Answer(text, token_ids, first - start, per_token)

    def _next_token(self, ids: torch.Tensor, position: int) -> int:
        positions = torch.arange(position, position + ids.shape[1], device=self.model.device).unsqueeze(0)
        outputs = self.model(
            input_ids=ids.to(self.model.device),
            past_key_values=self.cache,
            position_ids=positions,
            logits_to_keep=1,
        )
        return int(outputs.logits[0, -1].argmax())


def _plain_layer_lengths(model: PreTrainedModel, num_tokens: int) -> list[int]:
    """Tokens that each layer of transformers' own cache holds."""
    layers = DynamicCache(config=language_model(model).config).layers
    return [
        min(num_tokens, layer.sliding_window - 1) if layer.is_sliding else num_tokens  # type: ignore[attr-defined]
        for layer in layers
    ]


def _save_plain_layers(cache: Cache) -> list[dict] | None:
    """Remember an uncompressed cache; transformers replaces its tensors instead of writing into them."""
    return None if is_compressed(cache) else [dict(vars(layer)) for layer in cache.layers]


def _restore(cache: Cache, saved: list[dict] | None, length: int) -> None:
    if saved is None:
        cache.crop(length)
        return
    for layer, attributes in zip(cache.layers, saved, strict=True):
        vars(layer).update(attributes)


def _synchronize(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
