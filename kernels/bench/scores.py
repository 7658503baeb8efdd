"""Scoring a chunk in its replay, one layer, against the whole matrix of weights and against one matmul of its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from ..api import replay_attention, replay_scores
from . import layer
from .arguments import Options
from .case import Case, CasePlan, Comparison, Shape, Variant, dtype_name, randn, replay_backend
from .memory import peak_in_process, peak_in_subprocess

ROUNDS = {"cpu": 9, "cuda": 50}
ANCHOR = 26
PROMPT = 30  # replayed tokens that ask for the repetition
_CONTEXT = 2048
_SHAPES = {"cpu": (Shape(3, 3, 64), Shape(8, 4, 128)), "cuda": (Shape(8, 4, 128),)}
_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
_CHUNKS = (2048, 512)
_QUICK_CHUNKS = (128,)

MATERIALISED = "materialised, max"
MATERIALISED_LOGIT = "materialised, logit"
MATMUL = "one matmul"
SCORES = "replay_scores, max"
LOGIT = "replay_scores, logit"
ATTENTION = "replay_attention, max"
PASS = "score pass, max"
LAYER = layer.NAME
_MATMUL_TARGETS = {torch.float32: 2.0, torch.bfloat16: 3.0}


@dataclass(frozen=True)
class ReplayInput:
    """
    One layer's replayed tokens and context.

    Parameters
    ----------
    query : torch.Tensor
        Shape (1, num_heads, q_len, head_dim).
    own_key, own_value : torch.Tensor
        Shape (1, num_kv_heads, q_len, head_dim).
    context_key, context_value : torch.Tensor
        Shape (1, num_kv_heads, context, head_dim).
    start, end : int
        Scored columns; the anchor lies before them.
    """

    query: torch.Tensor
    own_key: torch.Tensor
    own_value: torch.Tensor
    context_key: torch.Tensor
    context_value: torch.Tensor
    start: int
    end: int

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return self.query.shape[-1] ** -0.5

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that all backends take."""
        return {"anchor": ANCHOR, "start": self.start, "end": self.end, "softmax_scale": self.scale}


def replay_input(shape: Shape, chunk: int, dtype: torch.dtype, device: torch.device) -> ReplayInput:
    """Normally distributed numbers: the first chunk of a context, behind its anchor."""
    q_len, context = PROMPT + chunk, ANCHOR + max(chunk, min(_CONTEXT, 4 * chunk))

    def states(heads: int, tokens: int, seed: int) -> torch.Tensor:
        return randn((1, heads, tokens, shape.head_dim), dtype, device, seed)

    return ReplayInput(
        query=states(shape.num_heads, q_len, 1),
        own_key=states(shape.num_kv_heads, q_len, 2),
        own_value=states(shape.num_kv_heads, q_len, 3),
        context_key=states(shape.num_kv_heads, context, 4),
        context_value=states(shape.num_kv_heads, context, 5),
        start=ANCHOR,
        end=ANCHOR + chunk,
    )


def score_plans(options: Options) -> Iterator[CasePlan]:
    """Cases of this suite."""
    for chunk in _QUICK_CHUNKS if options.quick else _CHUNKS:
        for shape in _SHAPES[options.device.type]:
            for dtype in _DTYPES[options.device.type]:
                yield score_plan(shape, chunk, dtype, options)


def score_plan(shape: Shape, chunk: int, dtype: torch.dtype, options: Options) -> CasePlan:
    """The case of one shape, chunk and type."""
    matrix = shape.num_heads * (PROMPT + chunk) * (ANCHOR + PROMPT + 2 * chunk)
    return CasePlan(
        suite="scores",
        name=f"scores {shape} {dtype_name(dtype)} chunk {chunk}",
        shape=shape,
        dtype=dtype,
        context=ANCHOR + max(chunk, min(_CONTEXT, 4 * chunk)),
        rounds=options.rounds(ROUNDS[options.device.type]),
        required_bytes=3 * matrix * dtype.itemsize + 24 * matrix // shape.num_heads,
        build=partial(_build, shape, chunk, dtype, options),
    )


def materialised_scores(data: ReplayInput, causal_mask: torch.Tensor) -> torch.Tensor:
    """
    Scores from the whole matrix of weights, step by step as kvpress 0.5 computes them (``KVzipPress.score_kvzip``).

    Parameters
    ----------
    data : ReplayInput
        The input.
    causal_mask : torch.Tensor
        What is added to the logits of the own keys, shape (q_len, q_len); kvpress keeps it for all layers.

    Returns
    -------
    torch.Tensor
        Shape (1, num_kv_heads, end - start), in the type of the queries.
    """
    q_len = data.query.shape[2]
    parts = [data.context_key[:, :, :ANCHOR], data.context_key[:, :, data.start : data.end], data.own_key]
    keys = torch.cat(parts, dim=2).unsqueeze(2).transpose(-2, -1).contiguous()
    weights = torch.matmul(_grouped(data), keys) / data.query.shape[-1] ** 0.5
    weights[..., -q_len:] += causal_mask
    weights = torch.softmax(weights, dim=-1)
    return weights[..., ANCHOR : ANCHOR + data.end - data.start].amax(dim=(-3, -2))


def materialised_logits(data: ReplayInput) -> torch.Tensor:
    """Highest logit of each pair from the whole matrix of the chunk's logits, shape (1, num_kv_heads, end - start)."""
    keys = data.context_key[:, :, data.start : data.end].unsqueeze(2).transpose(-2, -1).contiguous()
    return (torch.matmul(_grouped(data), keys) / data.query.shape[-1] ** 0.5).amax(dim=(-3, -2))


def _grouped(data: ReplayInput) -> torch.Tensor:
    """Queries by KV head, shape (1, num_kv_heads, group, q_len, head_dim)."""
    _, num_heads, q_len, head_dim = data.query.shape
    num_kv_heads = data.own_key.shape[1]
    return data.query.view(1, num_kv_heads, num_heads // num_kv_heads, q_len, head_dim)


def one_matmul(data: ReplayInput) -> Callable[[], torch.Tensor]:
    """
    Queries by all keys of the softmax, into memory that is there: without page faults, transposition or mask.

    A bound for anything that computes these logits once.
    """
    num_kv_heads, head_dim = data.own_key.shape[1], data.query.shape[-1]
    rows = data.query.reshape(num_kv_heads, -1, head_dim)
    parts = [data.context_key[0, :, :ANCHOR], data.context_key[0, :, data.start : data.end], data.own_key[0]]
    keys = torch.cat(parts, dim=1).transpose(1, 2)
    out = torch.zeros(num_kv_heads, rows.shape[1], keys.shape[2], dtype=rows.dtype, device=rows.device)
    return lambda: torch.bmm(rows, keys, out=out)


def score_runs(data: ReplayInput, backend: str) -> dict[str, Callable[[], Any]]:
    """What turns this input into scores, by name."""
    q_len, dtype = data.query.shape[2], data.query.dtype
    causal_mask = data.query.new_full((q_len, q_len), torch.finfo(dtype).min).triu_(1)
    keys = (data.query, data.own_key, data.context_key)
    everything = (data.query, data.own_key, data.own_value, data.context_key, data.context_value)
    options = {**data.options, "backend": backend}
    return {
        MATERIALISED: partial(materialised_scores, data, causal_mask),
        MATERIALISED_LOGIT: partial(materialised_logits, data),
        SCORES: partial(replay_scores, *keys, reduction="max", **options),
        LOGIT: partial(replay_scores, *keys, reduction="logit", **options),
        ATTENTION: partial(replay_attention, *everything, reduction="max", local=True, **options),
    }


def _build(shape: Shape, chunk: int, dtype: torch.dtype, options: Options) -> Case:
    data = replay_input(shape, chunk, dtype, options.device)
    reference, logits = _references(data)
    expected: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        MATERIALISED: lambda: {"the scores": reference()["the scores"]},
        MATERIALISED_LOGIT: logits,
        SCORES: lambda: {"the scores": reference()["the scores"]},
        LOGIT: logits,
        ATTENTION: reference,
    }
    backend = replay_backend(options.backend, data.query)
    measured = () if options.quick else (MATERIALISED, SCORES, LOGIT, ATTENTION)
    variants = [
        Variant(
            what,
            run,
            backend="torch" if what.startswith("materialised") else backend,
            expected=expected[what],
            extra_memory=_memory(what, run, shape, chunk, dtype, options) if what in measured else None,
        )
        for what, run in score_runs(data, options.backend).items()
    ]
    variants.append(Variant(MATMUL, one_matmul(data)))
    if backend == "triton":
        run = partial(score_pass, data, row_lse(data))
        variants.append(Variant(PASS, run, backend="triton", expected=expected[SCORES]))
    if options.device.type == "cuda":
        variants.append(layer.replay_layer(shape, data, options.backend))
    return Case(variants, _comparisons(dtype, chunk, options.device))


def _comparisons(dtype: torch.dtype, chunk: int, device: torch.device) -> list[Comparison]:
    targets: dict[str, float | None] = {"time": 0.3, "memory": 0.05, "matmul": _MATMUL_TARGETS[dtype]}
    if device.type == "cuda" or chunk != _CHUNKS[0]:
        targets = dict.fromkeys(targets)
    comparisons = [
        Comparison(SCORES, (MATERIALISED,), "time", targets["time"]),
        Comparison(SCORES, (MATERIALISED,), "memory", targets["memory"]),
        Comparison(SCORES, (MATMUL,), "time", targets["matmul"]),
        Comparison(LOGIT, (MATERIALISED_LOGIT,), "time"),
        Comparison(LOGIT, (MATMUL,), "time"),
        Comparison(ATTENTION, (MATERIALISED,), "time"),
    ]
    if device.type == "cuda":
        of_layer: tuple[float | None, float | None] = (0.1, 0.03) if chunk == _CHUNKS[0] else (None, None)
        comparisons += [
            Comparison(PASS, (LAYER,), "time", of_layer[0]),
            Comparison(LOGIT, (LAYER,), "time", of_layer[1]),
        ]
    return comparisons


def _references(
    data: ReplayInput,
) -> tuple[Callable[[], dict[str, torch.Tensor]], Callable[[], dict[str, torch.Tensor]]]:
    """Output and scores, and the logits: on the CPU the specification in float64, on a GPU torch in float32."""
    inputs = (data.query, data.own_key, data.own_value, data.context_key, data.context_value)
    on_cpu = data.query.device.type == "cpu"
    query, own_key, own_value, context_key, context_value = inputs if on_cpu else (part.float() for part in inputs)
    backend = "reference" if on_cpu else "torch"

    @cache
    def attention() -> dict[str, torch.Tensor]:
        states = (query, own_key, own_value, context_key, context_value)
        out, scores = replay_attention(*states, local=True, reduction="max", backend=backend, **data.options)
        return {"the output": out, "the scores": scores}

    @cache
    def logits() -> dict[str, torch.Tensor]:
        states = (query, own_key, context_key)
        return {"the scores": replay_scores(*states, reduction="logit", backend=backend, **data.options)}

    return attention, logits


def _memory(
    what: str, run: Callable[[], Any], shape: Shape, chunk: int, dtype: torch.dtype, options: Options
) -> Callable[[], int | None]:
    if options.device.type == "cuda":
        return partial(peak_in_process, run, options.device)
    return partial(peak_in_subprocess, what, shape, chunk, dtype, options.backend)


def row_lse(data: ReplayInput) -> torch.Tensor:
    """
    Log-sum-exp of each replayed row over the columns of its softmax, as a replay's attention leaves it.

    Returns
    -------
    torch.Tensor
        In base 2, float32, shape (num_kv_heads, q_len, group).
    """
    q_len = data.query.shape[2]
    future = torch.ones(q_len, q_len, dtype=torch.bool, device=data.query.device).triu_(1)
    parts = [data.context_key[0, :, :ANCHOR], data.context_key[0, :, data.start : data.end], data.own_key[0]]
    heads = []
    for query, keys in zip(_grouped(data)[0].float(), torch.cat(parts, dim=1).float(), strict=True):
        logits = query @ keys.T * data.scale  # [group, q_len, n]
        logits[..., -q_len:].masked_fill_(future, -torch.inf)
        heads.append(torch.logsumexp(logits, dim=-1).T / math.log(2))
    return torch.stack(heads).contiguous()


def score_pass(data: ReplayInput, lse: torch.Tensor) -> torch.Tensor:
    """
    What scoring adds to a replay's attention, in Triton.

    Parameters
    ----------
    data : ReplayInput
        The input.
    lse : torch.Tensor
        See :func:`row_lse`.

    Returns
    -------
    torch.Tensor
        Shape (1, num_kv_heads, end - start), float32.
    """
    from ..replay.triton_scores import column_scores

    return column_scores(
        data.query,
        data.context_key,
        lse,
        start=data.start,
        end=data.end,
        softmax_scale=data.scale,
        softcap=None,
        window=None,
        reduction="max",
        row_weight=None,
        column_weight=None,
    )
