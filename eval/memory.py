"""Bytes a cache holds, and the peak memory of a phase."""

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..cache.memory import return_free_memory

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


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


class PeakMemory:
    """Peak memory in laps, above what was in use when it was made.

    On a GPU it is what PyTorch allocated; on a CPU the process's resident memory, whose high-water mark Linux can
    reset. Elsewhere each lap is None.

    Parameters
    ----------
    device : torch.device
        Where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        self._baseline = self._peak() if self._reset() else None

    def lap(self) -> int | None:
        """Peak bytes above the baseline since the last lap, or since the start."""
        if self._baseline is None:
            return None
        peak = self._peak()
        self._reset()
        return peak - self._baseline

    def _reset(self) -> bool:
        """Set the high-water mark to what is in use now, and say whether that is possible."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        # A block of the heap stays resident after it is freed, and would count as in use
        return_free_memory()
        try:
            CLEAR_REFS.write_text("5")
        except OSError:
            return False
        return "VmHWM:" in STATUS.read_text()

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
