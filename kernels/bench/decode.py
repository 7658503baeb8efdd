"""Decoding one token from a ragged context, one layer, against full attention and against reading the bytes once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..api import decode_attention
from ..backends import REGISTRY, decode_module
from ..storage.quantization import quantize_keys, quantize_values
from ..storage.segments import Segments
from .case import KEPT, LSE, TRUSTED, Case, Comparison, Variant, head_lengths, randn, require_memory

LENGTHS, QUICK_LENGTHS = (8 << 10, 32 << 10, 124 << 10), (512, 1024)  # tokens of context
ROUNDS = {"cpu": 50, "cuda": 50}
_COPY_BYTES = 1 << 30
_IN_A_ROW = 20  # calls

FULL_GROUPED = "full, grouped SDPA"
FULL_GQA = "full, SDPA enable_gqa"
FULL_FLASH = "full, flash-attn"
FULL_KERNEL = "full, kernel"
KEPT_KERNEL = "30 %, kernel"
KEPT_FLASH = "30 %, flash backend"
INT8, INT4 = "30 %, int8", "30 %, int4"
READ = "30 % read once"
COPY = "copy of 1 GiB"
ROW = ", calls in a row"

_FULLS = (FULL_GROUPED, FULL_GQA, FULL_FLASH, FULL_KERNEL)
_FULLS_IN_A_ROW = tuple(full + ROW for full in _FULLS)


def comparisons(case: Case) -> list[Comparison]:
    """Ratios of interest."""
    if case.device.type == "cuda":
        return [
            Comparison(KEPT_KERNEL, _FULLS, "speed", 3.0),
            Comparison(KEPT_KERNEL, (COPY,), "bandwidth", 0.75),
            Comparison(INT8, _FULLS, "speed"),
            Comparison(INT4, _FULLS, "speed", 5.0),
            Comparison(FULL_KERNEL, (COPY,), "bandwidth"),
            Comparison(KEPT_FLASH, (KEPT_KERNEL,), "time"),
            Comparison(KEPT_KERNEL + ROW, _FULLS_IN_A_ROW, "speed"),
            Comparison(INT4 + ROW, _FULLS_IN_A_ROW, "speed"),
        ]
    return [
        Comparison(KEPT_KERNEL, (FULL_GROUPED,), "time", 0.25),
        Comparison(KEPT_KERNEL, (FULL_KERNEL,), "time", 0.35),
        Comparison(KEPT_KERNEL, (READ,), "time", 2.0),
        # The target is for codes against four bytes a number
        Comparison(INT8, (KEPT_KERNEL,), "time", 0.6 if case.dtype == torch.float32 else None),
        Comparison(INT4, (INT8,), "time", 1.0),
    ]


Packed = tuple[Any, Any, Segments]  # keys and values, quantised or not, [total, head_dim]


@dataclass(frozen=True)
class DecodeInput:
    """One layer's query, its full cache, and that cache and what is kept of it as packed pairs."""

    query: torch.Tensor  # [1, num_heads, 1, head_dim]
    key: torch.Tensor  # [1, num_kv_heads, context, head_dim]
    value: torch.Tensor
    full: Packed
    kept: Packed


def decode_input(case: Case) -> DecodeInput:
    """Normally distributed numbers; each head keeps its first pairs, since which ones they are changes no time."""
    heads, context, head_dim = case.shape.num_kv_heads, case.length, case.shape.head_dim
    key, value = (randn((1, heads, context, head_dim), case.dtype, case.device, seed) for seed in (1, 2))
    query = randn((1, heads * case.shape.group, 1, head_dim), case.dtype, case.device, seed=3)
    full = key[0].flatten(0, 1), value[0].flatten(0, 1), Segments.from_lengths(torch.full((heads,), context))
    lengths = head_lengths(heads, context)
    kept_key, kept_value = (torch.cat([each[0, head, :n] for head, n in enumerate(lengths)]) for each in (key, value))
    kept = kept_key, kept_value, Segments.from_lengths(torch.tensor(lengths))
    return DecodeInput(query, key, value, full, kept)


def variants(case: Case) -> list[Variant]:
    """Full attention, the kernels, and the bound: on the CPU reading the kept bytes once."""
    on_gpu, head = case.device.type == "cuda", case.length * case.shape.head_dim
    # The cache and what is kept of it, the reference's copies of a head, the buffers of a GPU's bound
    cached = 2 * case.shape.num_kv_heads * head * case.dtype.itemsize
    require_memory(case, 2 * cached + 64 * head + 2 * _COPY_BYTES * on_gpu)
    data = decode_input(case)
    key, value, segments = data.kept
    int8, int4 = ((quantize_keys(key, segments, bits), quantize_values(value, bits), segments) for bits in (8, 4))
    packed = {FULL_KERNEL: data.full, KEPT_KERNEL: data.kept, INT8: int8, INT4: int4}
    # The query heads of a KV head are rows of one attention: nothing is repeated
    rows = data.query.view(1, case.shape.num_kv_heads, case.shape.group, case.shape.head_dim)
    calls = [_full(FULL_GROUPED, data, partial(scaled_dot_product_attention, rows, data.key, data.value))]
    calls += [_kernel(what, data.query, pairs, case.backend) for what, pairs in packed.items()]
    if on_gpu:
        return gpu_variants(data, calls)
    nbytes = key.nbytes + value.nbytes
    return [*calls, Variant(READ, torch.ones(nbytes // 4).sum, kept=KEPT, nbytes=nbytes, bound=True)]


def gpu_variants(data: DecodeInput, calls: list[Variant]) -> list[Variant]:
    """Add every form of full attention that is there and a copy; each call alone and many in a row."""
    gqa = partial(scaled_dot_product_attention, data.query, data.key, data.value, enable_gqa=True)
    calls = [*calls, _full(FULL_GQA, data, gqa)]
    if REGISTRY["flash"].installed:
        flash_attn = importlib.import_module("flash_attn")
        tokens_first = [states.transpose(1, 2) for states in (data.query, data.key, data.value)]
        flash = partial(flash_attn.flash_attn_with_kvcache, *tokens_first)
        calls += [_full(FULL_FLASH, data, flash, "flash-attn"), _kernel(KEPT_FLASH, data.query, data.kept, "flash")]
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=data.query.device)
    copy = Variant(COPY, partial(torch.empty_like(source).copy_, source), nbytes=2 * _COPY_BYTES, bound=True)
    return [*calls, copy, *(replace(call, what=call.what + ROW, calls=_IN_A_ROW, expected=None) for call in calls)]


def _full(what: str, data: DecodeInput, run: Callable[[], Any], backend: str = "torch") -> Variant:
    right, nbytes = _right(data.query, data.full), data.key.nbytes + data.value.nbytes
    return Variant(what, run, backend, 1.0, nbytes, expected=lambda: {"the output": right()["the output"]})


def _kernel(what: str, query: torch.Tensor, packed: Packed, backend: str) -> Variant:
    key, value, _ = packed
    quantized = not isinstance(key, torch.Tensor)
    module = decode_module(backend, query.device, query.dtype, key.dtype, query.shape[-1], quantized)
    found = module.__name__.rpartition(".")[2]
    return Variant(
        what,
        partial(decode_attention, query, *packed, softmax_scale=query.shape[-1] ** -0.5, backend=backend),
        backend=found,
        kept=1.0 if what == FULL_KERNEL else KEPT,
        nbytes=key.nbytes + value.nbytes,
        expected=_right(query, packed),
        dtype=torch.bfloat16 if quantized and found == "triton" else None,  # it multiplies codes in 16 bits
    )


def _right(query: torch.Tensor, packed: Packed) -> Callable[[], dict[str, torch.Tensor]]:
    """On the CPU the specification in float64, on a GPU the torch form in float32; computed once."""

    @cache
    def compute() -> dict[str, torch.Tensor]:
        options = {"softmax_scale": query.shape[-1] ** -0.5, "backend": TRUSTED[query.device.type]}
        return dict(zip(("the output", LSE), decode_attention(query.float(), *packed, **options), strict=True))

    return compute
