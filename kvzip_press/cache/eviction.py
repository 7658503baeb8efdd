"""Eviction: replace the layers of the caller's cache by layers that hold only what is kept."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from ..kernels.memory import return_free_memory
from ..kernels.storage.quantization import PackedKeys, PackedValues, quantize_keys, quantize_values
from ..kernels.storage.segments import Segments
from ..models import reachable_columns
from .ragged import RaggedLayer
from .window import WindowLayer

# Bits of a stored number
QUANTIZATIONS = {"int8": 8, "int4": 4}


def _pack_layer(
    keys: torch.Tensor, values: torch.Tensor, keep: torch.Tensor, quantization: str | None, **described: Any
) -> RaggedLayer:
    """Copy what ``keep`` (batch_size, num_kv_heads, held) names out of dense keys and values."""
    segments = Segments.from_lengths(keep.sum(dim=-1).flatten())
    bits = None if quantization is None else QUANTIZATIONS[quantization]
    packed_keys: PackedKeys = keys[keep] if bits is None else quantize_keys(keys[keep], segments, bits)
    packed_values: PackedValues = values[keep] if bits is None else quantize_values(values[keep], bits)
    positions = None
    if described["window"] is not None:
        length = described["context_length"]
        columns = torch.arange(length - keys.shape[2], length, dtype=torch.int32, device=keys.device)
        positions = columns.expand_as(keep)[keep]
    rows = keys.shape[0]
    return RaggedLayer(packed_keys, packed_values, segments, batch_size=rows, positions=positions, **described)


def evict(
    cache: Cache,
    keep: dict[int, torch.Tensor],
    prefix_pairs: list[int],
    context_pairs: list[int],
    windows: list[int | None],
    quantization: str | None = None,
    backend: str = "auto",
) -> None:
    """
    Evict in place; the full tensors are released layer by layer.

    Layers that slide are small, and share one mask sized by the first that is known to slide: they are replaced
    together. Then the global ones from the last to the first, which sizes their mask: ragged layers can cut one that
    is too wide. So a cache whose eviction was cut off still works, with some layers full.

    Parameters
    ----------
    cache : Cache
        A dynamic cache that holds a whole context.
    keep : dict[int, torch.Tensor]
        For each evicted layer, which of the last ``held`` pairs stay: boolean, shape (batch_size, num_kv_heads, held).
        Layers without an entry slide, and keep their last window.
    prefix_pairs, context_pairs, backend
        As of :class:`RaggedLayer`.
    windows : list[int | None]
        Sliding window of each layer.
    quantization : str, optional
        How the kept pairs of the evicted layers are stored: one of :data:`QUANTIZATIONS`, or as they are.

    Raises
    ------
    ValueError
        If a pair that is to be quantised is not finite, or too large for float16 scales.
    """

    def replacement(index: int) -> RaggedLayer | WindowLayer:
        layer, window = cache.layers[index], windows[index]
        held = keep[index].shape[-1] if index in keep else reachable_columns(layer.keys.shape[2], window)
        first = layer.keys.shape[2] - held
        keys, values = layer.keys[:, :, first:], layer.values[:, :, first:]
        context_length = layer.get_seq_length()
        if index not in keep:
            assert window is not None
            copies = (states.clone(memory_format=torch.contiguous_format) for states in (keys, values))
            return WindowLayer(*copies, context_length=context_length, window=window)
        return _pack_layer(
            keys,
            values,
            keep[index].to(keys.device),
            quantization,
            context_length=context_length,
            prefix_pairs=prefix_pairs,
            context_pairs=context_pairs,
            window=window,
            backend=backend,
        )

    sliding = [index for index, window in enumerate(windows) if window is not None]
    steps = [sliding, *([index] for index, window in reversed(list(enumerate(windows))) if window is None)]
    # Tensors made here must stay usable outside of inference mode
    with torch.inference_mode(False), torch.no_grad():
        for indices in steps:
            for index, layer in [(index, replacement(index)) for index in indices]:
                cache.layers[index] = layer
    if cache.layers[0].device.type == "cpu":
        return_free_memory()
