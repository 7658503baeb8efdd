"""What a cache holds: bytes of storages, and the achieved fraction of pairs."""

from __future__ import annotations

import torch
from transformers import Cache

from .ragged import RaggedLayer
from .window import WindowLayer


def cache_nbytes(cache: Cache) -> int:
    """
    Bytes of the storages that a cache keeps alive, compressed or not.

    Storages are counted, not shapes: a slice of a tensor keeps all of it alive. A storage that several layers share
    counts once.
    """
    total, seen = 0, set()
    for layer in cache.layers:
        if isinstance(layer, RaggedLayer | WindowLayer):
            total += layer.nbytes
            continue
        for value in vars(layer).values():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in seen:
                seen.add(value.untyped_storage().data_ptr())
                total += value.untyped_storage().nbytes()
    return total


def kept_fraction(cache: Cache) -> float:
    """
    Fraction of the context's pairs that stayed, of those subject to the budget; 1.0 for a cache without compression.

    Chat prefix and sinks, later tokens and sliding layers of hybrid models do not count.
    """
    ragged = [layer for layer in cache.layers if isinstance(layer, RaggedLayer)]
    total = sum(sum(layer.context_pairs) for layer in ragged)
    return sum(layer.kept_pairs for layer in ragged) / total if total else 1.0


def is_compressed(cache: Cache) -> bool:
    """Whether a cache holds a compressed context."""
    return any(isinstance(layer, RaggedLayer) and layer.context_length > 0 for layer in cache.layers)
