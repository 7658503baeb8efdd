"""One function on all of torch's threads."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numba
import torch
from numba import types

_WORKER = types.void(types.intp)


@lru_cache(maxsize=1)
def _source_digest() -> str:
    kernels = Path(__file__).parent.parent
    sources = sorted(path for part in ("simd/*.py", "decode/cpu*.py", "replay/cpu*.py") for path in kernels.glob(part))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def worker(function: Callable) -> Callable:
    """
    Compile ``function(address)`` to a C function that threads can run without the interpreter.

    Kept for later processes where a folder for that can be written. numba looks for changes in the file of the function
    alone, so its name tells the state of all files that it is made from.
    """
    function.__qualname__ = f"{function.__name__}_{_source_digest()}"
    try:
        return numba.cfunc(_WORKER, cache=True)(function)
    except RuntimeError:  # no folder for numba's cache can be written
        return numba.cfunc(_WORKER)(function)


@lru_cache(maxsize=1)
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """
    OpenMP's entry point for a parallel region, of the OpenMP that torch itself uses; None where it has none.

    Its threads are torch's own: awake after the operation before, and never more than ``torch.get_num_threads()``.
    """
    suffix = {"darwin": "dylib", "win32": "dll"}.get(torch.sys.platform, "so")  # type: ignore[attr-defined]
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"
    try:
        # A symbol is looked for in the library and in those it depends on
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


@lru_cache(maxsize=64)
def float_bits(number: float) -> int:
    """A float32 as the integer of its bits, for a word of a job."""
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="kvzip-press")


def run_on_threads(compiled_worker: Callable, job: list[int], threads: int) -> None:
    """
    Run a :func:`worker` on ``threads`` threads, this one included, and wait for all.

    Parameters
    ----------
    compiled_worker : callable
        What :func:`worker` made.
    job : list[int]
        Words of 64 bits; the worker is given their address.
    threads : int
        How many may run; fewer may, so the work must be taken from a common counter.
    """
    words = array("q", job)
    address = words.buffer_info()[0]
    parallel = _parallel()
    if threads <= 1:
        compiled_worker.ctypes(address)  # type: ignore[attr-defined]
    elif parallel is not None:
        parallel(compiled_worker.address, address, threads, 0)  # type: ignore[attr-defined]
    else:
        function = compiled_worker.ctypes  # type: ignore[attr-defined]
        others = [_pool().submit(function, address) for _ in range(threads - 1)]
        function(address)
        for other in others:
            other.result()
