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
        If the GPU is older than compute capability 8.0, or not NVIDIA's.
    """
    if INTERPRETED:
        return ARCHITECTURES[0]
    if torch.version.hip is not None:
        raise ValueError(f"the Triton kernels are written for NVIDIA GPUs, {device} is not one; use backend='torch'")
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


MAX_HEAD_DIM = 256
_DECODE_KINDS = {torch.float32: "float32", torch.bfloat16: "16-bit", torch.float16: "16-bit"}
# By kind, head_dim up to, and query rows up to (the most also serve more, in several tiles): for each of ARCHITECTURES
# the keys of a tile, num_warps, num_stages and the blocks that an SM then holds. Tests compile all of them.
_DECODE = {
    ("float32", 64, 8): ((32, 8, 2, 4), (32, 8, 2, 4), (32, 8, 2, 4)),
    ("float32", 64, 16): ((32, 8, 3, 4), (32, 8, 3, 2), (32, 8, 3, 4)),
    ("float32", 128, 8): ((32, 8, 2, 4), (32, 8, 2, 2), (32, 8, 2, 4)),
    ("float32", 128, 16): ((32, 8, 3, 2), (32, 8, 3, 1), (32, 8, 3, 3)),
    ("float32", 256, 8): ((16, 8, 2, 3), (16, 8, 2, 2), (16, 8, 2, 3)),
    ("float32", 256, 16): ((16, 8, 2, 3), (16, 8, 2, 1), (16, 8, 2, 3)),
    ("16-bit", 64, 16): ((64, 4, 3, 4), (64, 4, 3, 2), (64, 4, 3, 6)),
    ("16-bit", 64, 64): ((64, 4, 3, 2), (64, 4, 3, 2), (64, 4, 3, 3)),
    ("16-bit", 128, 16): ((64, 4, 3, 2), (64, 4, 2, 2), (64, 4, 3, 3)),
    ("16-bit", 128, 64): ((64, 4, 2, 2), (64, 8, 2, 1), (64, 4, 3, 2)),
    ("16-bit", 256, 16): ((32, 4, 3, 2), (32, 4, 2, 2), (32, 4, 3, 3)),
    ("16-bit", 256, 64): ((32, 8, 2, 1), (32, 8, 2, 1), (32, 8, 2, 1)),
    ("int8", 64, 8): ((64, 2, 3, 8), (64, 2, 3, 5), (64, 2, 3, 8)),
    ("int8", 64, 32): ((64, 4, 3, 2), (64, 4, 3, 2), (64, 4, 3, 2)),
    ("int8", 128, 8): ((64, 2, 3, 4), (64, 2, 3, 2), (64, 2, 3, 4)),
    ("int8", 128, 16): ((64, 4, 3, 2), (64, 4, 3, 2), (64, 4, 3, 2)),
    ("int8", 256, 8): ((64, 4, 3, 2), (64, 4, 3, 1), (64, 4, 3, 2)),
    ("int4", 64, 8): ((64, 2, 3, 8), (64, 2, 3, 8), (64, 2, 3, 8)),
    ("int4", 64, 32): ((64, 4, 3, 3), (64, 4, 3, 3), (64, 4, 3, 2)),
    ("int4", 128, 8): ((64, 2, 3, 6), (64, 2, 3, 5), (64, 2, 3, 6)),
    ("int4", 128, 16): ((64, 4, 3, 3), (64, 4, 3, 3), (64, 4, 3, 3)),
    ("int4", 256, 8): ((64, 4, 3, 2), (64, 4, 3, 2), (64, 4, 3, 2)),
}


def decode_kind(dtype: torch.dtype) -> str:
    """Name that ``dtype`` has in the table of the decode kernel; quantised keys are ``"int8"`` and ``"int4"``."""
    return _DECODE_KINDS[dtype]


def decode_configs() -> dict[tuple[str, int, int, int], DecodeConfig]:
    """Every launch configuration of the decode kernel, by kind, head_dim, query rows and architecture."""
    return {
        (kind, head_dim, rows, arch): DecodeConfig(rows, *entry)
        for (kind, head_dim, rows), entries in _DECODE.items()
        for arch, entry in zip(ARCHITECTURES, entries, strict=True)
    }


@lru_cache
def decode_config(kind: str, head_dim: int, num_rows: int, arch: int) -> DecodeConfig:
    """
    The launch configuration of the decode kernel.

    Parameters
    ----------
    kind : str
        ``"float32"``, ``"16-bit"``, ``"int8"`` or ``"int4"``.
    head_dim : int
        The larger head size of keys and values.
    num_rows : int
        Query rows of a KV head: query heads that share it x tokens.
    arch : int
        One of :data:`ARCHITECTURES`.
    """
    padded = min(size for name, size, _ in _DECODE if name == kind and size >= head_dim)
    tiles = sorted(rows for name, size, rows in _DECODE if (name, size) == (kind, padded))
    rows = next((tile for tile in tiles if tile >= num_rows), tiles[-1])
    return DecodeConfig(rows, *_DECODE[kind, padded, rows][ARCHITECTURES.index(arch)])


@dataclass(frozen=True)
class ReplayConfig:
    """
    How a kernel of the replay is launched.

    Parameters
    ----------
    block_m : int
        Rows (query heads of a KV head x replayed tokens) of a tile.
    block_n : int
        Keys of a tile.
    num_warps, num_stages : int
        Options of the launch.
    blocks_per_sm : int
        Blocks that an SM holds at a time: rows are split until the scores' blocks fill the GPU.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    blocks_per_sm: int


# By kernel, kind and head_dim up to: block_m, block_n, num_warps, num_stages, blocks_per_sm on each of ARCHITECTURES.
# The attention keeps block_m rows and walks over keys, the scores keep block_n keys and walk over rows; with a soft-cap
# or a window, which take registers, the blocks walked over are half as long.
_REPLAY = {
    ("attention", "float32", 64): ((64, 64, 8, 3, 2), (64, 64, 8, 3, 2), (64, 64, 8, 3, 2)),
    ("attention", "float32", 128): ((32, 64, 8, 3, 2), (32, 64, 8, 3, 2), (32, 64, 8, 3, 2)),
    ("attention", "float32", 256): ((64, 32, 8, 2, 1), (64, 32, 8, 2, 1), (64, 32, 8, 2, 1)),
    ("attention", "16-bit", 64): ((128, 64, 4, 3, 2), (128, 64, 4, 3, 2), (128, 128, 8, 3, 1)),
    ("attention", "16-bit", 128): ((128, 64, 8, 3, 1), (128, 32, 8, 3, 1), (128, 128, 8, 3, 1)),
    ("attention", "16-bit", 256): ((64, 64, 8, 2, 1), (64, 32, 8, 2, 1), (128, 32, 8, 3, 1)),
    ("scores", "float32", 64): ((64, 32, 8, 3, 2), (64, 32, 8, 3, 2), (64, 32, 8, 3, 2)),
    ("scores", "float32", 128): ((64, 32, 8, 2, 2), (64, 32, 8, 2, 2), (64, 32, 8, 2, 2)),
    ("scores", "float32", 256): ((64, 32, 8, 2, 2), (64, 32, 8, 2, 2), (64, 32, 8, 2, 2)),
    ("scores", "16-bit", 64): ((64, 128, 4, 3, 2), (64, 128, 8, 2, 2), (128, 128, 4, 3, 2)),
    ("scores", "16-bit", 128): ((64, 128, 4, 3, 2), (64, 128, 8, 2, 1), (128, 128, 4, 2, 2)),
    ("scores", "16-bit", 256): ((64, 128, 8, 3, 1), (64, 64, 8, 2, 1), (128, 128, 8, 2, 1)),
}
REPLAY_CONFIGS = {
    (*key, arch): ReplayConfig(*entry)
    for key, entries in _REPLAY.items()
    for arch, entry in zip(ARCHITECTURES, entries, strict=True)
}


def replay_config(kernel: str, kind: str, head_dim: int, arch: int) -> ReplayConfig:
    """
    The launch configuration of a kernel of the replay, as :data:`REPLAY_CONFIGS` has it now.

    Parameters
    ----------
    kernel : str
        ``"attention"`` or ``"scores"``.
    kind : str
        ``"float32"`` or ``"16-bit"``.
    head_dim : int
        The larger head size of keys and values.
    arch : int
        One of :data:`ARCHITECTURES`.
    """
    padded = min(size for _, _, size, _ in REPLAY_CONFIGS if size >= head_dim)
    return REPLAY_CONFIGS[kernel, kind, padded, arch]
