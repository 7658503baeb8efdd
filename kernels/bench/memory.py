"""
Peak memory of one call above its input.

On the CPU it is measured in a process of its own, ``python -m kvzip_press.kernels.bench.memory``: what the process
freed before would otherwise be used again, and not be seen.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..memory import PeakMemory
from .case import Shape, dtype_name

_WARM_UP_CHUNK = 64


def peak_in_process(run: Callable[[], Any], device: torch.device) -> int | None:
    """Peak bytes that PyTorch allocated on a CUDA device for one call, above what was allocated before."""
    peak = PeakMemory(device)
    run()
    return peak.lap()


def peak_in_subprocess(what: str, shape: Shape, chunk: int, dtype: torch.dtype, backend: str) -> int | None:
    """
    Peak resident bytes of one call on the CPU, above those of a process that has run it on a small input.

    Parameters
    ----------
    what : str
        A name of :func:`kvzip_press.kernels.bench.scores.score_runs`.
    shape, chunk, dtype, backend
        The input, and the kernel backend.

    Returns
    -------
    int, optional
        None where the system has no high-water mark that can be reset.
    """
    heads = [shape.num_kv_heads, shape.group, shape.head_dim]
    order = {"what": what, "shape": heads, "chunk": chunk, "dtype": dtype_name(dtype), "backend": backend}
    order["threads"] = torch.get_num_threads()
    command = [sys.executable, "-m", __name__, json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {what!r} failed: {done.stderr.strip()[-2000:]}")
    peak: int | None = json.loads(done.stdout)
    return peak


def main(argv: list[str]) -> None:
    """Measure what the one argument asks for and print the bytes, or ``null``."""
    from .scores import replay_input, score_runs

    order = json.loads(argv[0])
    torch.set_num_threads(order["threads"])
    shape, dtype, cpu = Shape(*order["shape"]), getattr(torch, order["dtype"]), torch.device("cpu")
    score_runs(replay_input(shape, _WARM_UP_CHUNK, dtype, cpu), order["backend"])[order["what"]]()
    run = score_runs(replay_input(shape, order["chunk"], dtype, cpu), order["backend"])[order["what"]]
    peak = PeakMemory(cpu)
    run()
    print(json.dumps(peak.lap()))


if __name__ == "__main__":
    main(sys.argv[1:])
