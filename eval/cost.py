"""Time and memory of compressing and of decoding, against the plain prefill and the full cache, in one process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import kvpress
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig, PreTrainedModel

from ..cache.measure import cache_nbytes
from ..cache.ragged import RaggedLayer
from ..context import longest_context
from ..decoding import device_time, forgetting, read
from ..kernels.memory import PeakMemory
from ..models import language_model
from ..prompts import chat_affixes
from ..terminal import format_table
from .presses.budget import fit_budget, kept_pairs, masked_indices, protected_length, set_masked_indices
from .presses.registry import FULL, PRESSES, Variant, make_press, variants
from .results.record import Record, provenance
from .run.model import ModelOptions
from .run.sweep import eager_attention
from .tasks.essays import read_corpus

MIB = 2**20
# A cache without a context, which bounds what a smaller one can gain
EMPTY: Variant = ("empty", 0.0)
WARM_UP_TOKENS = 256
# Largest distance of logits from those of the reference, by the length of the latter: what is usual in the type
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
COLUMNS = {
    "tokens": "d",
    "press": "",
    "ratio": ".2f",
    "kept": ".3f",
    "seconds": ".2f",
    "x prefill": ".2f",
    "ms/token": ".1f",
    "x decoding": ".2f",
    "cache MiB": ".1f",
    "x cache": ".3f",
    "prefill peak MiB": ".0f",
    "replay peak MiB": ".0f",
    "logits off": ".1e",
}


@dataclass
class Trial:
    """A cache of a context of ``num_tokens`` tokens, what it took to make it, and to decode from it."""

    cache: Cache
    num_tokens: int
    # What kvpress's masking presses hide, see `masked_indices`
    masks: list[Any] | None = None
    kept: float | None = None
    seconds: float | None = None
    nbytes: int = 0
    # Bytes above those in use before, where the system tells
    prefill_peak: int | None = None
    replay_peak: int | None = None
    logits_off: float | None = None
    step_seconds: list[float] = field(default_factory=list)


def measure(arguments: argparse.Namespace) -> None:
    """Measure what the arguments of `kvzip-eval cost` ask for, print the table, and write it if wanted."""
    given = {name: getattr(arguments, name, None) for name in ModelOptions.__dataclass_fields__}
    engine = ModelOptions(**{name: value for name, value in given.items() if value is not None}).load()
    model, tokenizer = engine.model, engine.tokenizer
    engine.check(arguments.presses)
    if arguments.random_model:
        model = random_model(model.device, model.dtype)
    room, window = arguments.decode_tokens + 1, longest_context(model)
    if window is not None and max(arguments.lengths) + room > window:
        raise ValueError(
            f"lengths must be at most {window - room}: the model takes {window} tokens, {room} are decoded"
        )
    config, protected = language_model(model).config, protected_length(tokenizer)

    def make(name: str, ratio: float, num_tokens: int) -> kvpress.BasePress | None:
        press = make_press(name, ratio, tokenizer, **engine.press_options)
        fit_budget(press, ratio, num_tokens, protected, config.num_hidden_layers, config.num_key_value_heads)
        return press

    wanted = variants([FULL, *arguments.presses], arguments.ratios)
    contexts = [context_of(arguments.corpus, tokenizer, length) for length in (WARM_UP_TOKENS, *arguments.lengths)]
    rows = []
    total = (1 + len(arguments.lengths) * arguments.repeats) * len(wanted)
    with tqdm(total=total, desc="cost", unit="press", disable=arguments.quiet) as bar:
        # What is compiled, allocated or chosen at the first forward pass is no part of any press's cost
        measure_length(model, contexts[0], wanted, make, 1, 1, bar.update)
        for ids in contexts[1:]:
            rows += measure_length(model, ids, wanted, make, arguments.repeats, arguments.decode_tokens, bar.update)
    print(format_table(rows, COLUMNS))
    for row in rows:
        if row["logits off"] is not None and row["ms/token"] is None:
            print(f"no times of {row['press']} at {row['tokens']}: its logits are not the reference's", file=sys.stderr)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        report = {"provenance": provenance(model, arguments), "table": rows}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def random_model(device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of Llama-3.1-8B's shape with random weights, for the times of one without having it."""
    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA_8B, name_or_path="random weights in Llama-3.1-8B's shape")
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def context_of(corpus: str | None, tokenizer: Any, length: int) -> torch.Tensor:
    """Tokens of the chat template's beginning and of a corpus, repeated if it is short, shape (1, length)."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, verbose=False)

    prefix, text = encode(chat_affixes(tokenizer)[0]), encode(read_corpus(corpus) + "\n\n")
    if length <= len(prefix):
        raise ValueError(f"lengths must be above the {len(prefix)} tokens of the chat template, got {length}")
    return torch.tensor([(prefix + text * (length // len(text) + 1))[:length]])


def measure_length(
    model: PreTrainedModel,
    context_ids: torch.Tensor,
    wanted: Sequence[Variant],
    make: Callable[[str, float, int], kvpress.BasePress | None],
    repeats: int,
    steps: int,
    progress: Callable[[], Any] = lambda: None,
) -> list[Record]:
    """
    Measure presses on one context, shape (1, num_tokens): a row for each with its ratio, and one without a context.

    The full cache must be among those wanted, since it is what the others are divided by. `make` gives the press of a
    name and a ratio for a number of tokens, and `progress` is called after each. Everything is done `repeats` times,
    of which times and peaks are medians, and `steps` tokens are decoded each time.
    """
    num_tokens = context_ids.shape[1]
    trials: dict[Variant, list[Trial]] = {variant: [] for variant in (*wanted, EMPTY)}
    for _ in range(repeats):
        for name, ratio in wanted:
            with eager_attention(model) if PRESSES[name].eager else nullcontext():
                trials[name, ratio].append(compress(model, context_ids, make(name, ratio, num_tokens)))
            progress()
        trials[EMPTY].append(Trial(DynamicCache(), 0))
        decode_interleaved(model, [of_variant[-1] for of_variant in trials.values()], steps)
        for of_variant in trials.values():
            of_variant[-1].cache = DynamicCache()
    figures = {variant: _figures(of_variant, TOLERANCES[model.dtype]) for variant, of_variant in trials.items()}
    full = figures[FULL, 1.0]
    rows = []
    for (name, ratio), found in figures.items():
        rows.append({"tokens": num_tokens, "press": name, "ratio": ratio, **found})
        for part, share in {"seconds": "x prefill", "ms/token": "x decoding", "cache MiB": "x cache"}.items():
            rows[-1][share] = found[part] / full[part] if None not in (found[part], full[part]) else None
    return rows


@torch.no_grad()
def compress(model: PreTrainedModel, context_ids: torch.Tensor, press: kvpress.BasePress | None) -> Trial:
    """Prefill and compress a context, timed; the last layer's first output marks the end of the prefill."""
    decoder, ids = language_model(model), context_ids.to(model.device)
    cache = DynamicCache()
    memory = PeakMemory(model.device)
    peaks: list[int | None] = []

    def end_of_prefill(module: torch.nn.Module, inputs: tuple, output: Any) -> None:
        if not peaks:
            peaks.append(memory.lap())

    hook = decoder.layers[-1].register_forward_hook(end_of_prefill)
    try:
        start = device_time(model.device)
        with nullcontext() if press is None else press(model):
            decoder(input_ids=ids, past_key_values=cache)
        seconds = device_time(model.device) - start
    finally:
        hook.remove()
    config, masks = decoder.config, masked_indices(model)
    return Trial(
        cache,
        ids.shape[1],
        masks,
        kept=kept_pairs(model, cache) / (ids.shape[1] * config.num_hidden_layers * config.num_key_value_heads),
        seconds=seconds,
        nbytes=cache_nbytes(cache, masks),
        prefill_peak=peaks[0],
        replay_peak=None if press is None else memory.lap(),
        logits_off=logits_off(model, cache),
    )


@torch.no_grad()
def logits_off(model: PreTrainedModel, cache: Cache) -> float | None:
    """Distance of a next token's logits from the reference's, by their length; None where no kernel of ours decodes."""
    layers = [layer for layer in cache.layers if isinstance(layer, RaggedLayer)]
    if not layers:
        return None
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    own = [layer.backend for layer in layers]
    trusted = "reference" if model.device.type == "cpu" else "torch"
    found = []
    try:
        for backends in (own, [trusted] * len(own)):
            for layer, backend in zip(layers, backends, strict=True):
                layer.backend = backend
            with forgetting(cache):
                found.append(read(model, cache, token, cache.get_seq_length()).double())
    finally:
        for layer, backend in zip(layers, own, strict=True):
            layer.backend = backend
    return float((found[0] - found[1]).norm() / found[1].norm())


def decode_interleaved(model: PreTrainedModel, trials: Sequence[Trial], steps: int) -> None:
    """
    Time decoding steps of all caches in turn, so that noise of the machine hits all of them alike.

    The first step of each is not timed, since it may allocate; the others are appended to its ``step_seconds``.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    unmasked: list[Any] = [None] * language_model(model).config.num_hidden_layers
    for step in range(steps + 1):
        for trial in trials:
            set_masked_indices(model, trial.masks or unmasked)
            start = device_time(model.device)
            read(model, trial.cache, token, trial.num_tokens + step)
            if step:
                trial.step_seconds.append(device_time(model.device) - start)
    set_masked_indices(model, unmasked)


def _figures(trials: Sequence[Trial], tolerance: float) -> Record:
    off = max((trial.logits_off for trial in trials if trial.logits_off is not None), default=None)
    # Also where it is NaN
    wrong = off is not None and not off <= tolerance

    def middle(values: Iterable[float | None], scale: float = 1) -> float | None:
        known = [value for value in values if value is not None]
        return scale * median(known) if known else None

    return {
        "kept": trials[-1].kept,
        "seconds": None if wrong else middle(trial.seconds for trial in trials),
        "ms/token": None if wrong else middle((second for trial in trials for second in trial.step_seconds), 1000),
        "cache MiB": trials[-1].nbytes / MIB,
        "prefill peak MiB": middle((trial.prefill_peak for trial in trials), 1 / MIB),
        "replay peak MiB": middle((trial.replay_peak for trial in trials), 1 / MIB),
        "logits off": off,
    }
