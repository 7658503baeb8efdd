"""Launch configurations of the Triton kernels: fixed tables; nothing is timed or chosen on the user's machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch

# Kernels imported in this process run in Triton's interpreter, on CPU tensors
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Architectures with tables of their own: A100; consumer and inference cards (99 KiB of shared memory a block); H100
ARCHITECTURES = (80, 86, 90)
_INTERPRETER_MULTIPROCESSORS = 4


@lru_cache
def architecture(device: torch.device) -> int:
    """
    The member of :data:`ARCHITECTURES` whose tables serve ``device``.

    Raises
    ------
    ValueError
        If the GPU is older than compute capability 8.0.
    """
    if INTERPRETED:
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(
            f"the Triton kernels need compute capability 8.0, {device} has {major}.{minor}; use backend='torch'"
        )
    if major == 8:
        return 80 if minor in (0, 7) else 86
    return 86 if major >= 12 else 90


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Number of SMs of ``device``."""
    if INTERPRETED:
        return _INTERPRETER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class DecodeConfig:
    """
    How the decode kernel is launched.

    Parameters
    ----------
    block_m : int
        Query rows (query heads of a KV head x tokens) of a tile.
    block_n : int
        Keys of a tile.
    num_warps, num_stages : int
        Options of the launch.
    blocks_per_sm : int
        Blocks that an SM holds at a time: the work is cut into as many items as the GPU then holds blocks.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    blocks_per_sm: int
