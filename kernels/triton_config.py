"""
How the Triton kernels are launched: on which GPU, and with tiles of which size.

The sizes are a fixed table: nothing is timed or chosen on the user's machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

# Kernels imported in this process run in Triton's interpreter, on CPU tensors
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETER_MULTIPROCESSORS = 4
_MAX_HEAD_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Strided(NamedTuple):
    """A tensor (batch_size, num_heads, num_tokens, channels) as a kernel takes it; its last stride is 1."""

    pointer: Any
    batch: int
    head: int
    token: Any  # a number, or a constant that the kernel is compiled for


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is launched."""

    block_m: int  # query rows (query heads of a KV head x tokens) of a tile
    block_n: int  # keys of a tile
    # num_warps, num_stages: options of the launch
    num_warps: int
    num_stages: int
    blocks_per_sm: int  # blocks that an SM holds at a time: work is split until the GPU has that many

    @property
    def options(self) -> dict[str, int]:
        """What Triton itself is told."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# Architectures with columns of their own: A100; consumer and inference cards (99 KiB of shared memory a block); H100
ARCHITECTURES = (80, 86, 90)
# Kernel, type, head_dim up to, and the fields of LaunchConfig for each of the architectures. Decoding has tiles for few
# rows and for many. The replay's attention keeps block_m rows and walks over keys, its scores keep block_n keys and
# walk over rows; with a soft-cap or a window, which take registers, what is walked over comes in halves of these.
_TABLE = (
    ("decode", "float32", 64, (8, 32, 8, 2, 4), (8, 32, 8, 2, 4), (8, 32, 8, 2, 4)),
    ("decode", "float32", 64, (16, 32, 8, 3, 4), (16, 32, 8, 3, 2), (16, 32, 8, 3, 4)),
    ("decode", "float32", 128, (8, 32, 8, 2, 4), (8, 32, 8, 2, 2), (8, 32, 8, 2, 4)),
    ("decode", "float32", 128, (16, 32, 8, 3, 2), (16, 32, 8, 3, 1), (16, 32, 8, 3, 3)),
    ("decode", "float32", 256, (8, 16, 8, 2, 3), (8, 16, 8, 2, 2), (8, 16, 8, 2, 3)),
    ("decode", "float32", 256, (16, 16, 8, 2, 3), (16, 16, 8, 2, 1), (16, 16, 8, 2, 3)),
    ("decode", "16-bit", 64, (16, 64, 4, 3, 4), (16, 64, 4, 3, 2), (16, 64, 4, 3, 6)),
    ("decode", "16-bit", 64, (64, 64, 4, 3, 2), (64, 64, 4, 3, 2), (64, 64, 4, 3, 3)),
    ("decode", "16-bit", 128, (16, 64, 4, 3, 2), (16, 64, 4, 2, 2), (16, 64, 4, 3, 3)),
    ("decode", "16-bit", 128, (64, 64, 4, 2, 2), (64, 64, 8, 2, 1), (64, 64, 4, 3, 2)),
    ("decode", "16-bit", 256, (16, 32, 4, 3, 2), (16, 32, 4, 2, 2), (16, 32, 4, 3, 3)),
    ("decode", "16-bit", 256, (64, 32, 8, 2, 1), (64, 32, 8, 2, 1), (64, 32, 8, 2, 1)),
    ("decode", "int8", 64, (8, 64, 2, 3, 8), (8, 64, 2, 3, 5), (8, 64, 2, 3, 8)),
    ("decode", "int8", 64, (32, 64, 4, 3, 2), (32, 64, 4, 3, 2), (32, 64, 4, 3, 2)),
    ("decode", "int8", 128, (8, 64, 2, 3, 4), (8, 64, 2, 3, 2), (8, 64, 2, 3, 4)),
    ("decode", "int8", 128, (16, 64, 4, 3, 2), (16, 64, 4, 3, 2), (16, 64, 4, 3, 2)),
    ("decode", "int8", 256, (8, 64, 4, 3, 2), (8, 64, 4, 3, 1), (8, 64, 4, 3, 2)),
    ("decode", "int4", 64, (8, 64, 2, 3, 8), (8, 64, 2, 3, 8), (8, 64, 2, 3, 8)),
    ("decode", "int4", 64, (32, 64, 4, 3, 3), (32, 64, 4, 3, 3), (32, 64, 4, 3, 2)),
    ("decode", "int4", 128, (8, 64, 2, 3, 6), (8, 64, 2, 3, 5), (8, 64, 2, 3, 6)),
    ("decode", "int4", 128, (16, 64, 4, 3, 3), (16, 64, 4, 3, 3), (16, 64, 4, 3, 3)),
    ("decode", "int4", 256, (8, 64, 4, 3, 2), (8, 64, 4, 3, 2), (8, 64, 4, 3, 2)),
    ("attention", "float32", 64, (64, 64, 8, 3, 2), (64, 64, 8, 3, 2), (64, 64, 8, 3, 2)),
    ("attention", "float32", 128, (32, 64, 8, 3, 2), (32, 64, 8, 3, 2), (32, 64, 8, 3, 2)),
    ("attention", "float32", 256, (64, 32, 8, 2, 1), (64, 32, 8, 2, 1), (64, 32, 8, 2, 1)),
    ("attention", "16-bit", 64, (128, 64, 4, 3, 2), (128, 64, 4, 3, 2), (128, 128, 8, 3, 1)),
    ("attention", "16-bit", 128, (128, 64, 8, 3, 1), (128, 32, 8, 3, 1), (128, 128, 8, 3, 1)),
    ("attention", "16-bit", 256, (64, 64, 8, 2, 1), (64, 32, 8, 2, 1), (128, 32, 8, 3, 1)),
    ("scores", "float32", 64, (64, 32, 8, 3, 2), (64, 32, 8, 3, 2), (64, 32, 8, 3, 2)),
    ("scores", "float32", 128, (64, 32, 8, 2, 2), (64, 32, 8, 2, 2), (64, 32, 8, 2, 2)),
    ("scores", "float32", 256, (64, 32, 8, 2, 2), (64, 32, 8, 2, 2), (64, 32, 8, 2, 2)),
    ("scores", "16-bit", 64, (64, 128, 4, 3, 2), (64, 128, 8, 2, 2), (128, 128, 4, 3, 2)),
    ("scores", "16-bit", 128, (64, 128, 4, 3, 2), (64, 128, 8, 2, 1), (128, 128, 4, 2, 2)),
    ("scores", "16-bit", 256, (64, 128, 8, 3, 1), (64, 64, 8, 2, 1), (128, 128, 8, 2, 1)),
)


def launch_configs() -> list[tuple[str, str, int, int, LaunchConfig]]:
    """Every entry of the table: kernel, kind, largest head_dim, architecture, configuration."""
    return [
        (kernel, kind, head_dim, arch, LaunchConfig(*fields))
        for kernel, kind, head_dim, *columns in _TABLE
        for arch, fields in zip(ARCHITECTURES, columns, strict=True)
    ]


@lru_cache
def launch_config(kernel: str, kind: str, head_dim: int, arch: int, num_rows: int = 1) -> LaunchConfig:
    """
    The configuration for a kernel (``"decode"``, or of a replay ``"attention"`` or ``"scores"``) and an input.

    ``kind`` is that of :func:`kind_of`, or ``"int8"`` or ``"int4"``; ``head_dim`` the larger head size of keys and
    values; ``arch`` one of :data:`ARCHITECTURES`. The smallest tile that holds ``num_rows`` query rows is taken, or the
    largest.
    """
    fitting = [
        (size, config)
        for of, form, size, column, config in launch_configs()
        if (of, form, column) == (kernel, kind, arch) and size >= head_dim
    ]
    padded = min(size for size, _ in fitting)
    tiles = [config for size, config in fitting if size == padded]  # smaller ones first, as in the table
    return next((tile for tile in tiles if tile.block_m >= num_rows), tiles[-1])


def kind_of(dtype: torch.dtype) -> str:
    """Name that products in ``dtype`` have in the table; quantised keys are ``"int8"`` and ``"int4"``."""
    return "float32" if dtype == torch.float32 else "16-bit"


@lru_cache
def architecture(device: torch.device) -> int:
    """
    The member of :data:`ARCHITECTURES` whose column of the table serves ``device``.

    Raises ``ValueError`` if the GPU is older than compute capability 8.0, or not NVIDIA's.
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


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch on the GPU that holds the first argument, a tensor: Triton itself takes the current one."""
    if 0 in grid:
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **constants)


def check_input(device: torch.device, dtypes: Iterable[torch.dtype], head_dim: int) -> None:
    """Raise ``ValueError`` if tensors are not on a GPU, or of a type or head size that no Triton kernel has."""
    if not (INTERPRETED or device.type == "cuda"):
        raise ValueError(f"backend 'triton' takes tensors on a GPU, got {device}; use backend='auto' or 'torch'")
    for dtype in dtypes:
        if dtype not in _DTYPES:
            raise ValueError(f"backend 'triton' takes float32, bfloat16 and float16, got {dtype}; use backend='torch'")
    if head_dim > _MAX_HEAD_DIM:
        raise ValueError(
            f"backend 'triton' takes head sizes up to {_MAX_HEAD_DIM}, got {head_dim}; use backend='torch'"
        )
