"""Memory of the process: its peak, and giving back what is free."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def return_free_memory() -> None:
    """
    Let glibc return freed memory to the system; nothing happens with another C library.

    Its allocator keeps blocks of some megabytes, such as the keys of one layer, for later use: without this the
    resident memory of a process falls by a part of what an eviction frees.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return


class PeakMemory:
    """
    Peak memory in laps, above what was in use when it was made.

    On a GPU it is what PyTorch allocated; on a CPU the process's resident memory, whose high-water mark Linux can
    reset. Elsewhere each lap is None.
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
            _CLEAR_REFS.write_text("5")
        except OSError:
            return False
        return "VmHWM:" in _STATUS.read_text()

    def _peak(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device)
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
