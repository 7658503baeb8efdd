"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes


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
