"""
Whole models: tokens a second from full and compressed caches, and what compressing takes.

On the CPU the packaged SmolLM2 on natural text; on a GPU a model of Llama-3.1-8B's shape with random weights, whose
cache is filled with random numbers. Here alone do the benchmarks know presses, which they import when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .arguments import Options
from .case import (
    KEPT,
    Case,
    CasePlan,
    Comparison,
    Shape,
    SkippedError,
    Variant,
    decode_backend,
    dtype_name,
    head_lengths,
    randn,
    replay_backend,
)

ROUNDS = 32  # decoded tokens
_MAX_COMPRESSIONS = 3
_CHECKED_TOKENS = 200
_SMOLLM2_LAYERS, _SMOLLM2_SHAPE = 30, Shape(3, 3, 64)
_TEXT = "lighthouse_station.txt"
_LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
_QUICK_LAYERS = 2

FULL = "full, SDPA"
FULL_KERNEL = "full, kernel"
KEPT_KERNEL = "30 %, kernel"
INT8, INT4 = "30 %, int8", "30 %, int4"
EMPTY = "empty cache"
QUANTIZATIONS: dict[str, str | None] = {KEPT_KERNEL: None, INT8: "int8", INT4: "int4"}
PREFILL = "prefill"
COMPRESSION = "prefill and compression"


def model_plans(options: Options) -> Iterator[CasePlan]:
    """Cases of this suite."""
    if options.device.type == "cuda":
        layers = {"num_hidden_layers": _QUICK_LAYERS} if options.quick else {}
        yield random_model_plan({**_LLAMA_8B, **layers}, torch.bfloat16, options)
        return
    packaged = PackagedModel(options)
    yield packaged.plan("compressing", min(options.rounds(1), _MAX_COMPRESSIONS), packaged.compression_case)
    yield packaged.plan("decoding", options.rounds(ROUNDS), packaged.decoding_case)


class PackagedModel:
    """
    SmolLM2-135M-Instruct in float32 with natural text; what the first case compresses, the second one decodes from.

    Parameters
    ----------
    options : Options
        Number of tokens and kernel backend.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.caches: dict[str, Any] = {}
        self._model: Any = None
        self._tokenizer: Any = None

    def plan(self, what: str, rounds: int, build: Callable[[], Case]) -> CasePlan:
        """One of the two cases."""
        tokens, shape = self.options.tokens, _SMOLLM2_SHAPE
        full = 2 * _SMOLLM2_LAYERS * shape.num_kv_heads * tokens * shape.head_dim * 4
        return CasePlan(
            suite="model",
            name=f"SmolLM2-135M float32 {tokens} tokens, {what}",
            shape=shape,
            dtype=torch.float32,
            context=tokens,
            rounds=rounds,
            required_bytes=4 * full + (2 << 30),  # caches, and the model with what a prefill computes
            build=build,
        )

    def compression_case(self) -> Case:
        """Prefills, with and without compression."""
        self._model, self._tokenizer = _load_packaged()
        ids = example_ids(self._tokenizer, self.options.tokens)
        short = ids[:, :_CHECKED_TOKENS]
        for quantization in (None, *QUANTIZATIONS.values()):  # compile what compiles
            self._prefill("", short, self._press(quantization))
        variants = [Variant(PREFILL, partial(self._prefill, FULL, ids, None), backend="transformers", kept=1.0)]
        backend = replay_backend(self.options.backend, _query_like(self._model))
        for what, quantization in QUANTIZATIONS.items():
            suffix = "" if quantization is None else f", {quantization}"
            run = partial(self._prefill, what, ids, self._press(quantization))
            variants.append(Variant(COMPRESSION + suffix, run, backend=backend, kept=KEPT))
        # Scores are the same however pairs are stored; what is stored shows when it is decoded from
        variants[1] = replace(
            variants[1],
            check=partial(self._scores, short, self.options.backend),
            expected=lambda: {"the scores": self._scores(short, "reference")},
        )
        comparisons = [Comparison(variant.what, (PREFILL,), "time") for variant in variants[1:]]
        comparisons[0] = Comparison(COMPRESSION, (PREFILL,), "time", 1.6)
        return Case(variants, comparisons, warm_up=0, host_clock=True)

    def decoding_case(self) -> Case:
        """Single tokens from the caches that the first case made."""
        if FULL not in self.caches:
            raise SkippedError("nothing was compressed")
        full = self.caches[FULL]
        everything = [torch.ones(layer.keys.shape[:3], dtype=torch.bool) for layer in full.layers]
        caches = {FULL: full, FULL_KERNEL: evicted(full, everything, None, self.options.backend)}
        caches |= {what: self.caches[what] for what in QUANTIZATIONS}
        return decoding_case(self._model, caches, self.options.backend, target=2.0)

    def _press(self, quantization: str | None, backend: str | None = None) -> Any:
        from ... import KVzipPress

        backend = backend or self.options.backend
        return KVzipPress(ratio=KEPT, quantization=quantization, tokenizer=self._tokenizer, backend=backend)

    @torch.no_grad()
    def _prefill(self, name: str, ids: torch.Tensor, press: Any) -> None:
        from transformers import DynamicCache

        filled = DynamicCache()
        with nullcontext() if press is None else press(self._model):
            self._model.model(input_ids=ids, past_key_values=filled)
        if name:
            self.caches[name] = filled

    @torch.no_grad()
    def _scores(self, ids: torch.Tensor, backend: str) -> torch.Tensor:
        """Scores of a context as a whole replay gives them, shape (num_layers, num_kv_heads, num_tokens)."""
        from transformers import DynamicCache

        from ...compressor import PrefilledContext

        filled = DynamicCache()
        self._model.model(input_ids=ids, past_key_values=filled)
        context = PrefilledContext(filled, ids, None, padding=[0], next_positions=[ids.shape[1]])
        scores: torch.Tensor = self._press(None, backend).compressor(self._model).score(context)[0]
        return scores


def _load_packaged() -> tuple[Any, Any]:
    from ... import load_model

    try:
        return load_model()
    except (ImportError, ValueError) as error:
        raise SkippedError(f"the packaged model can't be loaded: {error}") from error


def example_ids(tokenizer: Any, num_tokens: int) -> torch.Tensor:
    """Tokens of the packaged example, again and again, shape (1, num_tokens)."""
    import kvzip_press

    text = (Path(kvzip_press.__file__).parent / "examples" / _TEXT).read_text(encoding="utf-8")
    ids = tokenizer.encode(text + "\n\n", add_special_tokens=False, verbose=False)
    return torch.tensor([(ids * (num_tokens // len(ids) + 1))[:num_tokens]])


def random_model_plan(config: Mapping[str, Any], dtype: torch.dtype, options: Options) -> CasePlan:
    """
    Decoding from a model of random weights.

    Parameters
    ----------
    config : Mapping[str, Any]
        Of transformers' ``LlamaConfig``.
    dtype : torch.dtype
        Of weights and cache.
    options : Options
        Device, tokens and kernel backend.
    """
    heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    shape = Shape(heads, config["num_attention_heads"] // heads, config["head_dim"])
    attention = 2 * (config["num_attention_heads"] + heads) * config["head_dim"] * config["hidden_size"]
    mlp = 3 * config["hidden_size"] * config["intermediate_size"]
    weights = layers * (attention + mlp) + 2 * config["vocab_size"] * config["hidden_size"]
    pairs = layers * heads * options.tokens
    # The full cache twice; 30 % of it in the type, in 8 and in 4 bits with their scales; what a step makes anew
    held = weights + 2 * pairs * shape.head_dim * (2 + KEPT * 2)
    return CasePlan(
        suite="model",
        name=f"random {layers}-layer Llama {shape} {dtype_name(dtype)} {options.tokens} tokens, decoding",
        shape=shape,
        dtype=dtype,
        context=options.tokens,
        rounds=options.rounds(ROUNDS),
        required_bytes=int(1.05 * held * dtype.itemsize) + 6 * pairs * shape.head_dim // layers * dtype.itemsize,
        build=partial(_random_model_case, config, dtype, options),
    )


def _random_model_case(config: Mapping[str, Any], dtype: torch.dtype, options: Options) -> Case:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=dtype, attn_implementation="sdpa").eval()
    shape = (1, config["num_key_value_heads"], options.tokens, config["head_dim"])
    caches = random_caches(config["num_hidden_layers"], shape, dtype, options)
    return decoding_case(model, caches, options.backend, target=None)


def random_caches(
    num_layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, options: Options
) -> dict[str, Any]:
    """
    A full cache of random numbers, and what an uneven random choice of its pairs leaves, in all storages.

    Parameters
    ----------
    num_layers : int
        Layers.
    shape : tuple[int, int, int, int]
        Of a layer's keys: 1, num_kv_heads, context, head_dim.
    dtype, options
        Type, device and kernel backend.
    """
    from transformers import DynamicCache

    full = DynamicCache()
    keep = []
    generator = torch.Generator(options.device).manual_seed(0)
    for layer in range(num_layers):
        states = (randn(shape, dtype, options.device, seed=2 * layer + which) for which in range(2))
        full.update(*states, layer)
        keep.append(torch.zeros(shape[:3], dtype=torch.bool, device=options.device))
        lengths = head_lengths(shape[1], shape[2])
        for head in range(shape[1]):
            # Another head is the long one in the next layer
            length = lengths[(head + layer) % shape[1]]
            chosen = torch.randperm(shape[2], generator=generator, device=options.device)[:length]
            keep[layer][0, head, chosen] = True
    everything = [torch.ones_like(mask) for mask in keep]
    caches = {FULL: full, FULL_KERNEL: evicted(full, everything, None, options.backend)}
    for what, quantization in QUANTIZATIONS.items():
        caches[what] = evicted(full, keep, quantization, options.backend)
    return caches


def evicted(full: Any, keep: list[torch.Tensor], quantization: str | None, backend: str) -> Any:
    """
    A compressed cache beside the full one, which stays as it is.

    Parameters
    ----------
    full : transformers.DynamicCache
        Layers that attend globally.
    keep : list[torch.Tensor]
        For each layer which pairs stay, shape (1, num_kv_heads, context).
    quantization : str, optional
        How they are stored.
    backend : str
        Decode backend.
    """
    from transformers import DynamicCache

    from ...cache.eviction import evict

    packed = DynamicCache()
    packed.layers = list(full.layers)
    layers = range(len(keep))
    evict(
        packed,
        dict(enumerate(keep)),
        prefix_pairs={layer: [0] for layer in layers},
        context_pairs={layer: [keep[layer].numel()] for layer in layers},
        windows=[None] * len(keep),
        quantization=quantization,
        backend=backend,
    )
    return packed


def decoding_case(model: Any, caches: Mapping[str, Any], backend: str, target: float | None) -> Case:
    """
    One token from each cache in turn.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    caches : Mapping[str, transformers.Cache]
        Full and compressed caches by name. Each step makes them one token longer.
    backend : str
        Kernel backend of the compressed ones, whose logits are compared with those of the reference.
    target : float, optional
        How much faster the compressed cache has to be than the full one.
    """
    from transformers import DynamicCache

    trusted = "reference" if model.device.type == "cpu" else "torch"
    variants = []
    for what, filled in {**caches, EMPTY: DynamicCache()}.items():
        run = partial(decode_step, model, filled)
        if what in (FULL, EMPTY):
            variants.append(Variant(what, run, backend="transformers", kept=1.0 if what == FULL else None))
            continue
        expected = partial(_logits_of, model, filled, trusted)
        check = partial(checked_logits, model, filled, backend)
        kept = 1.0 if what == FULL_KERNEL else KEPT
        found = decode_backend(backend, _query_like(model), model.dtype, what in (INT8, INT4))
        variants.append(Variant(what, run, backend=found, kept=kept, check=check, expected=expected))
    comparisons = [
        Comparison(KEPT_KERNEL, (FULL,), "speed", target),
        Comparison(INT8, (FULL,), "speed"),
        Comparison(INT4, (FULL,), "speed"),
        Comparison(EMPTY, (FULL,), "speed"),
        Comparison(KEPT_KERNEL, (FULL_KERNEL,), "speed"),
    ]
    return Case(variants, comparisons, host_clock=True)


@torch.no_grad()
def decode_step(model: Any, filled: Any) -> torch.Tensor:
    """Logits of one more token, shape (1, 1, vocab_size)."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    logits: torch.Tensor = model(input_ids=token, past_key_values=filled).logits
    return logits


def checked_logits(model: Any, filled: Any, backend: str) -> torch.Tensor:
    """Logits of one more token, which then leaves the cache, with another decode backend than the cache's own."""
    length = filled.get_seq_length()
    own = [layer.backend for layer in filled.layers]
    try:
        for layer in filled.layers:
            layer.backend = backend
        return decode_step(model, filled)
    finally:
        filled.crop(length)
        for layer, name in zip(filled.layers, own, strict=True):
            layer.backend = name


def _query_like(model: Any) -> torch.Tensor:
    """Nothing, in the type and head size of the model's queries."""
    return torch.empty(0, model.model.layers[0].self_attn.head_dim, dtype=model.dtype, device=model.device)


def _logits_of(model: Any, filled: Any, backend: str) -> dict[str, torch.Tensor]:
    return {"the logits": checked_logits(model, filled, backend)}
