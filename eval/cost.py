"""Time and memory of compressing and of decoding, against the plain prefill and the full cache, in one process."""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..kernels.memory import PeakMemory
from .arguments import make_parser, prepare
from .memory import cache_nbytes
from .presses.budget import (
    fit_budget,
    kept_pairs,
    masked_indices,
    prefix_length,
    protected_length,
    set_masked_indices,
)
from .presses.registry import make_press, variants
from .results.record import Record, format_table, provenance, write_report
from .tasks.essays import load_texts

MIB = 2**20
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
}


@dataclass
class Trial:
    """A compressed cache and what it took to make it and to decode from it."""

    cache: Cache
    masks: list[Any]
    kept: int
    seconds: float
    nbytes: int
    prefill_peak: int | None
    replay_peak: int | None
    step_seconds: list[float] = field(default_factory=list)


def context_of(texts: list[list[str]], tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Tokens of the chat template's beginning and of natural text, repeated if there is too little of it.

    Returns
    -------
    torch.Tensor
        Shape (1, length).
    """
    n_prefix = prefix_length(tokenizer)
    if length <= n_prefix:
        raise ValueError(f"the length must be above the {n_prefix} tokens of the chat template, got {length}")
    prefix_text = ""
    if tokenizer.chat_template is not None:
        mark = "#" * 16
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
        prefix_text = prompt.split(mark)[0]
    ids = tokenizer.encode(prefix_text, add_special_tokens=False) if prefix_text else []
    for sentences in cycle(texts):
        ids += tokenizer.encode(" ".join(sentences) + "\n\n", add_special_tokens=False)
        if len(ids) >= length:
            break
    return torch.tensor([ids[:length]])


@torch.no_grad()
def compress(model: PreTrainedModel, context_ids: torch.Tensor, press: Any) -> Trial:
    """Prefill and compress a context, timed; the last layer's first output marks the end of the prefill."""
    cache = DynamicCache()
    memory = PeakMemory(model.device)
    prefill_peaks: list[int | None] = []

    def end_of_prefill(module: torch.nn.Module, inputs: tuple, output: Any) -> None:
        if not prefill_peaks:
            prefill_peaks.append(memory.lap())

    hook = model.model.layers[-1].register_forward_hook(end_of_prefill)
    try:
        start = _now(model)
        with nullcontext() if press is None else press(model):
            model.model(input_ids=context_ids, past_key_values=cache)
        seconds = _now(model) - start
    finally:
        hook.remove()
    masks = masked_indices(model)
    return Trial(
        cache=cache,
        masks=masks,
        kept=kept_pairs(model, cache),
        seconds=seconds,
        nbytes=cache_nbytes(cache, masks),
        prefill_peak=prefill_peaks[0],
        replay_peak=None if press is None else memory.lap(),
    )


@torch.no_grad()
def decode_interleaved(model: PreTrainedModel, trials: list[Trial], context_length: int, steps: int) -> None:
    """Time decoding steps of all caches in turn, so that noise of the machine hits all of them alike.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    trials : list of Trial
        Their `step_seconds` are appended to; the first step of each is not timed, since it may allocate or compile.
    context_length : int
        Original length of the context, where positions go on.
    steps : int
        Timed steps.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    for step in range(steps + 1):
        position_ids = torch.full_like(token, context_length + step)
        for trial in trials:
            set_masked_indices(model, trial.masks)
            start = _now(model)
            model(input_ids=token, past_key_values=trial.cache, position_ids=position_ids)
            if step:
                trial.step_seconds.append(_now(model) - start)
    set_masked_indices(model, [None] * len(trials[0].masks))


def _now(model: PreTrainedModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def measure_length(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context_ids: torch.Tensor,
    to_measure: list[tuple[str, float]],
    repeats: int,
    steps: int,
    progress: Callable[[], Any] = lambda: None,
) -> list[Record]:
    """Measure all presses at one length.

    Parameters
    ----------
    model, tokenizer
        The model and its tokenizer.
    context_ids : torch.Tensor
        Shape (1, context_length).
    to_measure : list of tuple
        Names and ratios; the full cache must be among them, since it is what the others are divided by.
    repeats : int
        Times that everything is done; times are medians, and so are peaks.
    steps : int
        Decoded tokens a repeat.
    progress : callable
        Called after each compression.

    Returns
    -------
    list of dict
        One row a press and ratio.
    """
    length = context_ids.shape[1]
    config = model.config.get_text_config()
    num_layers, num_heads = config.num_hidden_layers, config.num_key_value_heads
    trials: dict[tuple[str, float], list[Trial]] = {variant: [] for variant in to_measure}
    for _ in range(repeats):
        for name, ratio in to_measure:
            press = make_press(name, ratio, tokenizer)
            fit_budget(press, ratio, length, protected_length(tokenizer), num_layers, num_heads)
            trials[name, ratio].append(compress(model, context_ids, press))
            progress()
        decode_interleaved(model, [of_variant[-1] for of_variant in trials.values()], length, steps)
        for of_variant in trials.values():
            of_variant[-1].cache = DynamicCache()

    full = _row(trials["full", 1.0])
    rows = []
    for (name, ratio), of_variant in trials.items():
        row = _row(of_variant)
        kept = row.pop("pairs") / (length * num_layers * num_heads)
        rows.append(
            {"tokens": length, "press": name, "ratio": ratio, "kept": kept}
            | row
            | {
                "x prefill": row["seconds"] / full["seconds"],
                "x decoding": row["ms/token"] / full["ms/token"],
                "x cache": row["cache MiB"] / full["cache MiB"],
            }
        )
    return rows


def _row(trials: list[Trial]) -> Record:
    def peak(values: list[int | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) / MIB if known else None

    return {
        "pairs": trials[-1].kept,
        "seconds": median(trial.seconds for trial in trials),
        "ms/token": 1000 * median(second for trial in trials for second in trial.step_seconds),
        "cache MiB": trials[-1].nbytes / MIB,
        "prefill peak MiB": peak([trial.prefill_peak for trial in trials]),
        "replay peak MiB": peak([trial.replay_peak for trial in trials]),
    }


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__, ["kvzip-local-512", "kvzip-full-512", "kvzip-full-2048", "kvpress-kvzip"], [0.3])
    parser.add_argument("--lengths", nargs="+", type=int, default=[4000, 8000], help="context lengths in tokens")
    parser.add_argument("--repeats", type=int, default=1, help="repetitions; times are medians")
    parser.add_argument("--decode-tokens", type=int, default=32, help="decoded tokens a repetition")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the measurement and print its table."""
    arguments = parse_arguments(argv)
    model, tokenizer = prepare(arguments)
    texts = load_texts(arguments.text_dir)
    # The plain prefill and the full cache are what everything is divided by.
    to_measure = variants(["full", *arguments.presses], arguments.ratios)
    # What is allocated and chosen at the first forward pass is no part of any press's cost.
    decode_interleaved(model, [compress(model, context_of(texts, tokenizer, 256).to(model.device), None)], 256, 2)

    rows = []
    total = len(arguments.lengths) * arguments.repeats * len(to_measure)
    with tqdm(total=total, desc="cost", unit="press") as bar:
        for length in arguments.lengths:
            context_ids = context_of(texts, tokenizer, length).to(model.device)
            rows += measure_length(
                model, tokenizer, context_ids, to_measure, arguments.repeats, arguments.decode_tokens, bar.update
            )
    print(format_table(rows, COLUMNS))
    write_report(arguments.output, provenance=provenance(model, arguments), table=rows)


if __name__ == "__main__":
    main()
