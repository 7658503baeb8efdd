"""What a cache holds: bytes of storages, and the achieved fraction of pairs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from ..models import ModelLayout, reachable_columns
from .ragged import RaggedLayer


def cache_nbytes(*held: Any) -> int:
    """
    Bytes of all storages that caches keep alive, compressed or not; each storage counts once and whole.

    Storages are counted, not shapes: a slice of a tensor keeps all of it alive.

    Parameters
    ----------
    *held
        Caches, or anything else that holds tensors in attributes, lists, tuples and dictionaries. Modules and classes
        are not entered: a model's weights are no part of a cache.
    """
    storages: dict[tuple[torch.device, int], int] = {}
    seen: set[int] = set()
    stack = list(held)
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, str | bytes | type | torch.nn.Module):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            storages[storage.device, storage.data_ptr()] = storage.nbytes()
        else:
            stack.extend(_parts(item))
    return sum(storages.values())


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, list | tuple | set | frozenset):
        return item
    return vars(item).values() if hasattr(item, "__dict__") else ()


def plain_nbytes(model: PreTrainedModel, num_tokens: int) -> int:
    """Bytes of the plain cache of a context, as transformers holds it."""
    layout = ModelLayout.of(model)
    held = sum(reachable_columns(num_tokens, window) for window in layout.windows)
    return int(2 * held * layout.num_kv_heads * layout.head_dim * model.dtype.itemsize)


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
