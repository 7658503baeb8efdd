"""A job that all of torch's threads share: its record, how they take items of it, and that all of them were done."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from .vectors import compiled, fetch_add

_WORKER = types.void(types.intp)


def integers(names: str) -> list[tuple[str, Any]]:
    """Fields of a record for numbers and addresses: one int64 for each of the ``names``."""
    return [(name, ctypes.c_int64) for name in names.split()]


class Counters(ctypes.Structure):
    """The first field of every job: its number of ``items``, and what the threads count."""

    __slots__ = ()
    _fields_ = integers("items started taken attended done")


def record_at(structure: type[ctypes.Structure]) -> Callable:
    """The compiled function that reads an address as a record with the fields of ``structure``, by their names."""
    record = numba.from_dtype(np.dtype(structure))

    @intrinsic
    def view(context, address):  # type: ignore[no-untyped-def]
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(record))

        return record(types.intp), codegen

    return view


def _counter(name: str) -> Callable:
    offset = getattr(Counters, name).offset

    @compiled
    def count(job):  # type: ignore[no-untyped-def]
        return fetch_add(job + offset, 1)

    return count


# Each takes the job's address, counts one more, and returns the count before; an item that raises is never finished
start_thread, take_item, attend_item, finish_item = map(_counter, ("started", "taken", "attended", "done"))


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
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"
    try:
        # A symbol is looked for in the library and in those it depends on
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="kvzip-press")


def run_on_threads(compiled_worker: Any, job: Any, threads: int) -> None:
    """
    Run a :func:`worker` on ``threads`` threads, this one included, and wait for all.

    It is given the address of ``job``, a record whose first field is ``counters``, with ``items`` set. Fewer threads
    may run, so each takes items, by :func:`take_item`, until none is left. Raises ``RuntimeError`` if an item was not
    done: compiled code raised in it, which the interpreter prints where it can't hand it on.
    """
    counters, address = job.counters, ctypes.addressof(job)
    counters.started = counters.taken = counters.attended = counters.done = 0
    parallel = _parallel()
    if threads <= 1:
        compiled_worker.ctypes(address)
    elif parallel is not None:
        parallel(compiled_worker.address, address, threads, 0)
    else:
        others = [_pool().submit(compiled_worker.ctypes, address) for _ in range(threads - 1)]
        try:
            compiled_worker.ctypes(address)
        finally:
            wait(others)  # the job's memory is theirs until they return
        for other in others:
            other.result()
    if counters.done != counters.items:
        raise RuntimeError(
            f"{compiled_worker.__name__} finished {counters.done} of {counters.items} items: compiled code raised, "
            "see the exception printed above"
        )
