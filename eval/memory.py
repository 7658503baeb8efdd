"""Bytes a cache holds."""

from collections.abc import Iterable
from typing import Any

import torch


def cache_nbytes(*roots: Any) -> int:
    """Bytes of all storages reachable from some objects, each storage counted once and whole.

    A view keeps its whole storage alive, so a slice of a large tensor counts as the large tensor.

    Parameters
    ----------
    *roots
        Caches, or anything else that holds tensors in attributes, lists, tuples and dictionaries. Modules and classes
        are not entered: a model's weights are no part of a cache.

    Returns
    -------
    int
        The bytes.
    """
    storages: dict[tuple[torch.device, int], int] = {}
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, (str, bytes, type, torch.nn.Module)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            storages[storage.device, storage.data_ptr()] = storage.nbytes()
        else:
            stack.extend(_children(item))
    return sum(storages.values())


def _children(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    return vars(item).values() if hasattr(item, "__dict__") else ()
