"""Scoring a chunk in its replay, one layer, against the whole matrix of weights and against one matmul of its size."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from ..api import ReplayOptions, replay_attention
from ..backends import replay_module
from ..memory import PeakMemory
from .case import TRUSTED, Case, Comparison, Shape, Variant, randn, require_memory

LENGTHS, QUICK_LENGTHS = (2048, 512), (128,)  # tokens of the chunk
ROUNDS = {"cpu": 9, "cuda": 50}
_ANCHOR = 26
_PROMPT = 30  # replayed tokens that ask for the repetition
_CONTEXT = 2048
_WARM_UP_LENGTH = 64

MATERIALISED, MATERIALISED_LOGIT = "materialised, max", "materialised, logit"
ATTENTION, LOGIT = "replay_attention, max", "replay_attention, logit"
UNSCORED = "replay_attention, nothing scored"
MATMUL = "one matmul"


class States(NamedTuple):
    """What ``replay_attention`` takes, in that order."""

    query: torch.Tensor
    own_key: torch.Tensor
    own_value: torch.Tensor
    context_key: torch.Tensor
    context_value: torch.Tensor


def comparisons(case: Case) -> list[Comparison]:
    """Ratios of interest."""
    has_targets = case.device.type == "cpu" and case.length == LENGTHS[0]
    time, memory, product = (0.4, 0.1, 2.5) if has_targets else (None, None, None)
    return [
        Comparison(ATTENTION, (MATERIALISED,), "time", time),
        Comparison(ATTENTION, (MATERIALISED,), "memory", memory),
        Comparison(ATTENTION, (MATMUL,), "time", product),
        Comparison(ATTENTION, (UNSCORED,), "time"),
        Comparison(LOGIT, (MATERIALISED_LOGIT,), "time"),
        Comparison(LOGIT, (MATMUL,), "time"),
    ]


def replay_states(
    batch: int, shape: Shape, q_len: int, context: int, dtype: torch.dtype, device: torch.device
) -> States:
    """Normally distributed states."""
    heads = (shape.num_kv_heads * shape.group, *4 * (shape.num_kv_heads,))
    sizes = zip(heads, (q_len, q_len, q_len, context, context), strict=True)
    return States(*(randn((batch, *size, shape.head_dim), dtype, device, seed) for seed, size in enumerate(sizes, 1)))


def replay_input(case: Case) -> tuple[States, ReplayOptions]:
    """The first chunk of a context, behind its anchor."""
    context, end = _ANCHOR + max(case.length, min(_CONTEXT, 4 * case.length)), _ANCHOR + case.length
    states = replay_states(1, case.shape, _PROMPT + case.length, context, case.dtype, case.device)
    scale = case.shape.head_dim**-0.5
    return states, ReplayOptions(anchor=_ANCHOR, start=_ANCHOR, end=end, local=True, softmax_scale=scale)


def score_runs(case: Case) -> dict[str, Callable[[], Any]]:
    """What turns the input into scores, by name; the end of the name is the reduction."""
    states, options = replay_input(case)
    logit, q_len = replace(options, reduction="logit"), states.query.shape[2]
    # kvpress keeps it for all layers
    causal_mask = states.query.new_full((q_len, q_len), torch.finfo(case.dtype).min).triu_(1)
    return {
        MATERIALISED: partial(materialised, states, options, causal_mask),
        MATERIALISED_LOGIT: partial(materialised, states, logit, causal_mask),
        ATTENTION: partial(replay_attention, *states, options, backend=case.backend),
        LOGIT: partial(replay_attention, *states, logit, backend=case.backend),
    }


def variants(case: Case) -> list[Variant]:
    """Output and scores together, beside the materialised scores and one product; in Triton beside the output alone."""
    num_heads = case.shape.num_kv_heads * case.shape.group
    matrix = num_heads * (_PROMPT + case.length) * (_ANCHOR + _PROMPT + 2 * case.length)
    require_memory(case, 3 * matrix * case.dtype.itemsize + 24 * matrix // num_heads)
    states, options = replay_input(case)
    found = replay_module(case.backend, case.device, case.dtype, case.shape.head_dim).__name__.rpartition(".")[2]

    @cache
    def right(reduction: str) -> tuple[torch.Tensor, torch.Tensor]:
        wide, asked = States(*(part.float() for part in states)), replace(options, reduction=reduction)
        return replay_attention(*wide, asked, backend=TRUSTED[case.device.type])

    def named(reduction: str, *parts: str) -> dict[str, torch.Tensor]:
        return {part: right(reduction)[part == "the scores"] for part in parts}

    made = [Variant(MATMUL, one_matmul(states, options))]
    for what, run in score_runs(case).items():
        kernel, reduction = what in (ATTENTION, LOGIT), what.rpartition(", ")[2]
        expected = partial(named, reduction, *("the output",) * kernel, "the scores")
        peak = partial(peak_memory, what, case)
        made.append(Variant(what, run, found if kernel else "torch", expected=expected, peak_memory=peak))
    if found == "triton":
        seen = (states.context_key[:, :, : options.end], states.context_value[:, :, : options.end])
        alone = replace(options, anchor=0, start=0, end=0, local=False)
        attend = partial(replay_attention, *states[:3], *seen, alone, backend=case.backend)
        made.append(Variant(UNSCORED, lambda: attend()[0], found, expected=partial(named, "max", "the output")))
    return made


def materialised(states: States, options: ReplayOptions, causal_mask: torch.Tensor) -> torch.Tensor:
    """
    Scores from the whole matrix, step by step as kvpress 0.5 computes them (``KVzipPress.score_kvzip``).

    Shape (1, num_kv_heads, end - start), in the type of the queries. ``"logit"`` needs the chunk's columns alone.
    """
    query, chunk = states.query, states.context_key[:, :, options.start : options.end]
    logit = options.reduction == "logit"
    keys = (chunk if logit else _columns(states, options)).unsqueeze(2).transpose(-2, -1).contiguous()
    weights = torch.matmul(_grouped(states), keys) / query.shape[-1] ** 0.5
    if not logit:
        weights[..., -query.shape[2] :] += causal_mask
        weights = torch.softmax(weights, dim=-1)[..., options.anchor : -query.shape[2]]
    return weights.amax(dim=(-3, -2))


def one_matmul(states: States, options: ReplayOptions) -> Callable[[], torch.Tensor]:
    """Queries by all keys of the softmax, into memory that is there: a bound for what computes these logits once."""
    rows, keys = _grouped(states)[0].flatten(1, 2), _columns(states, options)[0].transpose(1, 2)
    out = rows.new_zeros(len(rows), rows.shape[1], keys.shape[2])
    return lambda: torch.bmm(rows, keys, out=out)


def _columns(states: States, options: ReplayOptions) -> torch.Tensor:
    """Keys of anchor, chunk and replayed tokens, shape (1, num_kv_heads, columns, head_dim)."""
    context = states.context_key
    return torch.cat([context[:, :, : options.anchor], context[:, :, options.start : options.end], states.own_key], 2)


def _grouped(states: States) -> torch.Tensor:
    """Queries by KV head, shape (1, num_kv_heads, group, q_len, head_dim)."""
    return states.query.unflatten(1, (states.own_key.shape[1], -1))


def peak_memory(what: str, case: Case) -> int | None:
    """Peak bytes of one of :func:`score_runs` above its input, after a run on a small input."""
    if case.device.type == "cuda":
        return _peak_here(what, case, torch.get_num_threads())
    # A process of its own: what this one freed before would be used again, and not be seen
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak_here, what, case, torch.get_num_threads()).result()


def _peak_here(what: str, case: Case, threads: int) -> int | None:
    torch.set_num_threads(threads)
    for length in (_WARM_UP_LENGTH, case.length):
        run = score_runs(replace(case, length=length))[what]
        peak = PeakMemory(case.device)
        run()
    return peak.lap()
