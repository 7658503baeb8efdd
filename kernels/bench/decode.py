"""Decoding one token from a ragged context, one layer, against full attention and against reading the bytes once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..api import decode_attention
from ..storage.quantization import PackedKeys, PackedValues, quantize_keys, quantize_values
from ..storage.segments import Segments
from .arguments import Options
from .case import (
    KEPT,
    Case,
    CasePlan,
    Comparison,
    Shape,
    Variant,
    decode_backend,
    dtype_name,
    head_lengths,
    randn,
    thousands,
)
from .verify import LSE

ROUNDS = 50
_SHAPES = {"cpu": (Shape(3, 3, 64), Shape(8, 4, 128)), "cuda": (Shape(8, 4, 128),)}
_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
_CONTEXTS = (8 << 10, 32 << 10, 124 << 10)
_QUICK_CONTEXTS = (512, 1024)
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


@dataclass(frozen=True)
class DecodeInput:
    """
    One layer's query, its full cache and what is kept of it.

    Parameters
    ----------
    query : torch.Tensor
        Shape (1, num_heads, 1, head_dim).
    key, value : torch.Tensor
        Shape (1, num_kv_heads, context, head_dim).
    kept_key, kept_value : torch.Tensor
        Shape (total, head_dim).
    segments : Segments
        Bounds of the kept pairs.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kept_key: torch.Tensor
    kept_value: torch.Tensor
    segments: Segments

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return self.query.shape[-1] ** -0.5

    @property
    def full_segments(self) -> Segments:
        """Bounds of the full cache, taken as packed."""
        return Segments.from_lengths(torch.full((self.key.shape[1],), self.key.shape[2]))


def decode_input(shape: Shape, context: int, dtype: torch.dtype, device: torch.device) -> DecodeInput:
    """Normally distributed numbers; each head keeps its first pairs, since which ones they are changes no time."""
    full = (1, shape.num_kv_heads, context, shape.head_dim)
    key, value = randn(full, dtype, device, seed=1), randn(full, dtype, device, seed=2)
    lengths = head_lengths(shape.num_kv_heads, context)
    kept_key, kept_value = (
        torch.cat([heads[0, head, :length] for head, length in enumerate(lengths)]) for heads in (key, value)
    )
    query = randn((1, shape.num_heads, 1, shape.head_dim), dtype, device, seed=3)
    return DecodeInput(query, key, value, kept_key, kept_value, Segments.from_lengths(torch.tensor(lengths)))


def decode_plans(options: Options) -> Iterator[CasePlan]:
    """Cases of this suite."""
    contexts = _QUICK_CONTEXTS if options.quick else _CONTEXTS
    for shape in _SHAPES[options.device.type]:
        for dtype in _DTYPES[options.device.type]:
            for context in contexts:
                yield decode_plan(shape, context, dtype, options)


def decode_plan(shape: Shape, context: int, dtype: torch.dtype, options: Options) -> CasePlan:
    """The case of one shape, length and type."""
    head = context * shape.head_dim
    full = 2 * shape.num_kv_heads * head * dtype.itemsize
    # The bound's buffers, and the reference's copies of a head
    more = 2 * _COPY_BYTES + 24 * head if options.device.type == "cuda" else 64 * head
    return CasePlan(
        suite="decode",
        name=f"decode {shape} {dtype_name(dtype)} {thousands(context)}",
        shape=shape,
        dtype=dtype,
        context=context,
        rounds=options.rounds(ROUNDS),
        required_bytes=2 * full + more,
        build=partial(_build, shape, context, dtype, options),
    )


def _build(shape: Shape, context: int, dtype: torch.dtype, options: Options) -> Case:
    data = decode_input(shape, context, dtype, options.device)
    return gpu_case(data, options.backend) if options.device.type == "cuda" else cpu_case(data, options.backend)


def cpu_case(data: DecodeInput, backend: str) -> Case:
    """Beside full attention and reading the kept bytes once."""
    variants = [_grouped(data), *_kernels(data, backend), _read_bound(data)]
    return Case(variants, _cpu_comparisons(data.query.dtype), bandwidth=READ)


def gpu_case(data: DecodeInput, backend: str) -> Case:
    """Beside every form of full attention that is there and a copy, each call alone and many in a row."""
    fulls = [_grouped(data), _enable_gqa(data), *_flash_attention(data)]
    kernels = [*_kernels(data, backend), *_flash_backend(data)]
    in_a_row = [
        replace(variant, what=variant.what + ROW, calls=_IN_A_ROW, expected=None) for variant in (*fulls, *kernels)
    ]
    variants = [*fulls, *kernels, _copy_bound(data.query.device), *in_a_row]
    return Case(variants, _gpu_comparisons(), bandwidth=COPY)


def _cpu_comparisons(dtype: torch.dtype) -> list[Comparison]:
    return [
        Comparison(KEPT_KERNEL, (FULL_GROUPED,), "time", 0.25),
        Comparison(KEPT_KERNEL, (FULL_KERNEL,), "time", 0.35),
        Comparison(KEPT_KERNEL, (READ,), "time", 2.0),
        # The target is for codes against four bytes a number
        Comparison(INT8, (KEPT_KERNEL,), "time", 0.6 if dtype == torch.float32 else None),
        Comparison(INT4, (INT8,), "time", 1.0),
    ]


def _gpu_comparisons() -> list[Comparison]:
    fulls = (FULL_GROUPED, FULL_GQA, FULL_FLASH, FULL_KERNEL)
    fulls_in_a_row = tuple(full + ROW for full in fulls)
    return [
        Comparison(KEPT_KERNEL, fulls, "speed", 3.0),
        Comparison(KEPT_KERNEL, (COPY,), "bandwidth", 0.75),
        Comparison(INT8, fulls, "speed"),
        Comparison(INT4, fulls, "speed", 5.0),
        Comparison(FULL_KERNEL, (COPY,), "bandwidth"),
        Comparison(KEPT_FLASH, (KEPT_KERNEL,), "time"),
        Comparison(KEPT_KERNEL + ROW, fulls_in_a_row, "speed"),
        Comparison(INT4 + ROW, fulls_in_a_row, "speed"),
    ]


def _reference(data: DecodeInput, key: PackedKeys, value: PackedValues, segments: Segments) -> Callable[[], dict]:
    """On the CPU the specification in float64, on a GPU the torch form in float32; computed once."""

    @cache
    def compute() -> dict[str, torch.Tensor]:
        query, backend = data.query, "reference"
        if query.device.type != "cpu":
            query, backend = query.float(), "torch"
        out, lse = decode_attention(query, key, value, segments, softmax_scale=data.scale, backend=backend)
        return {"the output": out, LSE: lse}

    return compute


def _packed_full(data: DecodeInput) -> tuple[torch.Tensor, torch.Tensor]:
    return data.key[0].flatten(0, 1), data.value[0].flatten(0, 1)


def _full_variant(what: str, data: DecodeInput, run: Callable[[], Any], backend: str = "torch") -> Variant:
    nbytes = data.key.nbytes + data.value.nbytes
    expected = _reference(data, *_packed_full(data), data.full_segments)
    return Variant(what, run, backend=backend, kept=1.0, nbytes=nbytes, expected=expected)


def _grouped(data: DecodeInput) -> Variant:
    # The query heads of a KV head are rows of one attention: nothing is repeated
    rows = data.query.view(1, data.key.shape[1], -1, data.query.shape[-1])
    return _full_variant(FULL_GROUPED, data, lambda: scaled_dot_product_attention(rows, data.key, data.value))


def _enable_gqa(data: DecodeInput) -> Variant:
    run = partial(scaled_dot_product_attention, data.query, data.key, data.value, enable_gqa=True)
    return _full_variant(FULL_GQA, data, run)


def _installed_flash_attn() -> ModuleType | None:
    try:
        return importlib.import_module("flash_attn")
    except ImportError:
        return None


def _flash_attention(data: DecodeInput) -> list[Variant]:
    flash_attn = _installed_flash_attn()
    if flash_attn is None:
        return []
    tokens_first = [states.transpose(1, 2) for states in (data.query, data.key, data.value)]
    return [_full_variant(FULL_FLASH, data, partial(flash_attn.flash_attn_with_kvcache, *tokens_first), "flash-attn")]


def _kernels(data: DecodeInput, backend: str) -> list[Variant]:
    kept = (data.kept_key, data.kept_value)
    variants = [
        _kernel(FULL_KERNEL, data, *_packed_full(data), data.full_segments, backend, 1.0),
        _kernel(KEPT_KERNEL, data, *kept, data.segments, backend, KEPT),
    ]
    for what, bits in ((INT8, 8), (INT4, 4)):
        packed = (quantize_keys(data.kept_key, data.segments, bits), quantize_values(data.kept_value, bits))
        variants.append(_kernel(what, data, *packed, data.segments, backend, KEPT))
    return variants


def _flash_backend(data: DecodeInput) -> list[Variant]:
    if _installed_flash_attn() is None:
        return []
    return [_kernel(KEPT_FLASH, data, data.kept_key, data.kept_value, data.segments, "flash", KEPT)]


def _kernel(
    what: str,
    data: DecodeInput,
    key: PackedKeys,
    value: PackedValues,
    segments: Segments,
    backend: str,
    kept: float,
) -> Variant:
    quantized = not isinstance(key, torch.Tensor)
    found = decode_backend(backend, data.query, key.dtype, quantized)
    return Variant(
        what,
        partial(decode_attention, data.query, key, value, segments, softmax_scale=data.scale, backend=backend),
        backend=found,
        kept=kept,
        nbytes=key.nbytes + value.nbytes,
        expected=_reference(data, key, value, segments),
        dtype=torch.bfloat16 if quantized and found == "triton" else None,  # it multiplies codes in 16 bits
    )


def _read_bound(data: DecodeInput) -> Variant:
    nbytes = data.kept_key.nbytes + data.kept_value.nbytes
    buffer = torch.ones(nbytes // 4)
    return Variant(READ, buffer.sum, kept=KEPT, nbytes=nbytes)


def _copy_bound(device: torch.device) -> Variant:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Variant(COPY, lambda: target.copy_(source), nbytes=2 * _COPY_BYTES)
