"""KVzipPress: kvpress's face of this package."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from kvpress.presses.base_press import BasePress
from torch import nn
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from .cache.eviction import QUANTIZATIONS
from .compressor import Compressor, PrefilledContext
from .kernels.backends import REPLAY_BACKENDS, check_backend, decode_module, replay_module
from .kernels.storage.quantization import check_bits
from .models import ModelLayout
from .prompts import PROMPTS, ReplayPrompts, encode_prompts, find_tokenizer
from .recorder import PrefillRecorder
from .replay import find_replay
from .replay_plan import REPEATS, REPLAYS
from .routing import check_attention_implementation, install_routing
from .scoring import SCORERS
from .selection import HEAD_LEVEL, LEVELS, Allowance, HeadTable

_DEFAULT_RATIO = 0.3
_AMOUNTS = ("ratio", "compression_ratio", "budget")
_OPTIONAL = (*_AMOUNTS, "tokenizer", "head_scores", "quantization")
_MINIMUM = {"budget": 1, "chunk_size": 1, "n_sink": 0}
_CHOICES: dict[str, Mapping[str, Any] | Sequence[str]] = {
    "level": LEVELS,
    "replay": REPLAYS,
    "scorer": SCORERS,
    "repeat": REPEATS,
    "prompts": PROMPTS,
    "quantization": QUANTIZATIONS,
}
_NOT_SHOWN = ("tokenizer", "head_scores", "progress")


def _check(name: str, value: Any) -> None:
    """Refuse a value that a parameter can't have, naming both."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    got, remedy = repr(value), ""
    if name == "ratio":
        fits, expected = number and 0 < value <= 1, "a number in (0, 1]"
    elif name == "compression_ratio":
        fits, expected = number and 0 <= value < 1, "a number in [0, 1)"
    elif name in _MINIMUM:
        fits = number and isinstance(value, int) and value >= _MINIMUM[name]
        expected = f"a whole number of at least {_MINIMUM[name]}"
    elif name in _CHOICES:
        choices = tuple(_CHOICES[name])
        fits = value in choices or (name == "prompts" and isinstance(value, ReplayPrompts))
        expected = f"one of {', '.join(map(repr, choices))}"
    elif name == "tokenizer":
        fits, expected = isinstance(value, PreTrainedTokenizerBase), "a loaded tokenizer"
        remedy = "; use AutoTokenizer.from_pretrained(name)"
    elif name == "head_scores":
        fits, expected, got = isinstance(value, HeadTable), "a HeadScores", type(value).__name__
        remedy = "; read a file with HeadScores.load(path)"
    else:
        if name == "backend":
            check_backend(value)
        return
    if not fits:
        raise ValueError(f"{name} must be {expected}, got {got}{remedy}")


@dataclass(repr=False)
class KVzipPress(BasePress):
    """
    KVzip with real eviction (arXiv 2505.23416): compress a context once, ask it many questions.

    The model replays its context from the cache, each KV pair is scored by the attention it gets in that replay, and
    the weakest pairs are evicted. State of a compressed context lives in its cache; the model carries nothing.

    ``ratio``, ``compression_ratio`` and ``budget`` are one state with three names: setting one, in the constructor or
    later, sets the others (to None where a budget leaves the fraction to the context).

    Parameters
    ----------
    ratio : float, optional
        Fraction of the context's KV pairs that is kept, in (0, 1]. Default 0.3.
    compression_ratio : float, optional
        Fraction removed, in [0, 1): kvpress's name.
    budget : int, optional
        Kept tokens per head on average, as an alternative to a fraction.
    level : str
        ``"pair"``: one threshold over the model; ``"pair-layer"``: each layer the same budget; ``"pair-uniform"``: each
        head; ``"head"``: whole heads by ``head_scores``, without any replay.
    chunk_size : int
        Context tokens that one replay pass repeats.
    replay : str
        ``"local"``: replayed tokens attend to chat prefix, chunk and themselves in the scored layers, at a cost linear
        in the context; ``"full"``: to the whole cache (the paper).
    scorer : str
        ``"kvzip"``, ``"kvzip-plus"``, ``"logit"`` or ``"l2"``, see :mod:`kvzip_press.scoring`.
    repeat : str
        What is replayed: the ``"context"``, or for ablations (paper, section 6.1) its ``"first"`` or ``"last"`` tenth,
        or the ``"prompt"`` alone.
    prompts : str or ReplayPrompts
        Wording: ``"default"`` (the released code's), ``"paper"``, or your own as text or token ids.
    tokenizer : PreTrainedTokenizerBase, optional
        By default loaded by the model's name, when first needed.
    n_sink : int
        Leading tokens that are always kept where the chat prefix is shorter. They and the prefix are outside the
        budget.
    head_scores : HeadScores, optional
        For ``level="head"``.
    quantization : str, optional
        Store the kept pairs in 8 (``"int8"``) or 4 bits (``"int4"``) a number, keys by channel and values by token (as
        in KIVI, arXiv 2402.02750); tokens after the context stay in the model's type. Not quantised by default.
    backend : str
        Kernels: ``"auto"``, or ``"cpu"``, ``"triton"``, ``"torch"``, ``"flash"`` or ``"reference"``
        (:data:`kvzip_press.kernels.api.BACKENDS`), which then runs or raises. ``"flash"`` (flash-attn) has a kernel for
        decoding alone: the replay then takes what ``"auto"`` takes.
    progress : bool
        Show a progress bar of the replay.

    Raises
    ------
    ValueError
        For any value out of range, at once and whenever it is set.

    Examples
    --------
    >>> press = KVzipPress(ratio=0.3)
    >>> with press(model):
    ...     model.model(input_ids, past_key_values=cache)
    """

    ratio: float | None = None
    compression_ratio: float | None = None
    budget: int | None = None
    level: str = "pair"
    chunk_size: int = 512
    replay: str = "local"
    scorer: str = "kvzip"
    repeat: str = "context"
    prompts: str | ReplayPrompts = "default"
    tokenizer: PreTrainedTokenizerBase | None = None
    n_sink: int = 4
    head_scores: HeadTable | None = None
    quantization: str | None = None
    backend: str = "auto"
    progress: bool = False

    def __post_init__(self) -> None:
        given = [name for name in _AMOUNTS if getattr(self, name) is not None]
        same = self.budget is None and math.isclose((self.ratio or 0) + (self.compression_ratio or 0), 1)
        if len(given) > 1 and not same:
            values = ", ".join(f"{name}={getattr(self, name)}" for name in given)
            raise ValueError(f"give one of ratio, compression_ratio and budget, got {values}")
        if self.head_scores is not None and self.level != HEAD_LEVEL:
            raise ValueError(f"head_scores are for level='head', got level={self.level!r}")
        if self.level == HEAD_LEVEL:
            self._check_head_scores()
        object.__setattr__(self, "_constructed", True)
        name = given[0] if given else "ratio"
        setattr(self, name, getattr(self, name) if given else _DEFAULT_RATIO)

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None or name not in _OPTIONAL:
            _check(name, value)
        if name not in _AMOUNTS or not hasattr(self, "_constructed"):
            object.__setattr__(self, name, value)
            return
        if value is None:
            raise ValueError(f"{name} can't be unset; set ratio, compression_ratio or budget to a number instead")
        # Rounded, as 1 - 0.7 is not 0.3 in binary
        other = None
        if name != "budget":
            other = min(round(1 - value, 12) or 1 - value, 1.0 if name == "compression_ratio" else math.nextafter(1, 0))
        amounts = {"budget": None, "ratio": other, "compression_ratio": other, name: value}
        for key, amount in amounts.items():
            object.__setattr__(self, key, amount)

    def __repr__(self) -> str:
        amount = "ratio" if self.budget is None else "budget"
        others = [item for item in fields(self) if item.name not in (*_AMOUNTS, *_NOT_SHOWN)]
        names = [amount, *(item.name for item in others if getattr(self, item.name) != item.default)]
        return f"KVzipPress({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """
        Refuse to be wrapped: kvpress's wrappers call this before they run another press's hooks.

        Raises
        ------
        ValueError
            Always.
        """
        raise ValueError(
            "KVzipPress replays the whole context once the prefill is done and can't run inside another press "
            "(ComposedPress, AdaKVPress, DecodingPress, ...); use it alone, as in `with KVzipPress(ratio=0.3)(model):`"
        )

    def forward_hook(self, module: nn.Module, input: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """
        Collect the scores of one layer in one pass of the replay.

        It is on the attention modules of the scored layers for as long as a context is replayed. The routed attention
        has just computed its output and the scores of the repeated chunk from one softmax; they go into the replay's
        own cache, found in ``kwargs``, so that press and model hold nothing of a context.

        Raises
        ------
        ValueError
            Outside of a replay, see :meth:`post_init_from_model`.
        """
        replay = find_replay(input, kwargs)
        if replay is None:
            self.post_init_from_model(module)  # type: ignore[arg-type]
        else:
            replay.collect(module.layer_idx)  # type: ignore[arg-type]
        return output

    def _check_head_scores(self) -> HeadTable:
        if self.head_scores is None:
            raise ValueError("level='head' needs head_scores=HeadScores.from_text(...) or HeadScores.load(path)")
        return self.head_scores

    @property
    def _replay_backend(self) -> str:
        return self.backend if self.backend in REPLAY_BACKENDS else "auto"

    def _check_kernels(self, model: PreTrainedModel, size: int) -> None:
        if self.quantization is not None:
            check_bits(QUANTIZATIONS[self.quantization], size)
        # Weights that are loaded piece by piece say nothing of where attention will run
        if self.backend == "auto" or model.device.type == "meta":
            return
        decode_module(self.backend, model.device, model.dtype, model.dtype, size, self.quantization is not None)
        if self.level != HEAD_LEVEL:
            replay_module(self._replay_backend, model.device, model.dtype, size)

    def allowance(self) -> Allowance:
        """How much of a context stays."""
        return Allowance(self.ratio, self.budget)

    def compressor(self, model: PreTrainedModel) -> Compressor:
        """
        Resolve the parameters for a model, doing no work on any context.

        Raises
        ------
        ValueError
            If the model's attention can't be routed, its head scores have another shape, no tokenizer is found, or the
            named backend can't run it.
        ImportError
            If what the named backend needs is not installed.
        """
        install_routing()
        layout = ModelLayout.of(model)
        check_attention_implementation(layout.decoder.config._attn_implementation)
        self._check_kernels(model, layout.head_dim)
        if self.level == HEAD_LEVEL:
            self._check_head_scores().check_model(model)
        prompts = PROMPTS[self.prompts] if isinstance(self.prompts, str) else self.prompts
        tokenizer = self.tokenizer
        if tokenizer is None and prompts.needs_tokenizer:
            tokenizer = find_tokenizer(model)
        return Compressor(
            layout=layout,
            prompts=encode_prompts(prompts, tokenizer),
            scorer=SCORERS[self.scorer],
            chunk_size=self.chunk_size,
            local=self.replay == "local",
            repeat=self.repeat,
            n_sink=self.n_sink,
            quantization=self.quantization,
            decode_backend=self.backend,
            replay_backend=self._replay_backend,
            progress=self.progress,
            forward_hook=self.forward_hook,
        )

    def compress_context(self, compressor: Compressor, context: PrefilledContext) -> None:
        """Compress one prefilled cache in place: score unless nothing needs scores, select, evict."""
        heads = self._check_head_scores().scores if self.level == HEAD_LEVEL else None
        scores = None if heads is not None or self.ratio == 1 else compressor.score(context)
        compressor.evict(context, self.allowance(), level=self.level, scores=scores, head_scores=heads)

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[None]:
        """
        Compress every cache that is prefilled inside the block.

        What is fed to one cache inside the block, in one call or several, is one context, compressed when the block
        ends. Inside ``model.generate`` the prompt is compressed between the prefill and the first decode step. After
        an exception nothing is compressed. Other threads and caches that are compressed already are left alone.

        Parameters
        ----------
        model : PreTrainedModel
            A decoder-only model.

        Raises
        ------
        ValueError
            Before any work, if the model or a cache can't be compressed; the message names the remedy.
        """
        compressor = self.compressor(model)
        recorder = PrefillRecorder(model, compressor.layout.decoder)

        def compress_recorded(cache: Cache | None = None) -> None:
            for context in recorder.take(cache):
                self.compress_context(compressor, context)

        with recorder.watch(compress_recorded):
            yield
            compress_recorded()
