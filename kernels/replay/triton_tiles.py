# mypy: disable-error-code="no-untyped-def"
"""What the two Triton kernels of the replay share: loading tiles of vectors, and their products."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..options import ReplayOptions
from ..triton_config import INTERPRETED, LaunchConfig, Strided

LOG2_E = math.log2(math.e)


class Shape(NamedTuple):
    """What a kernel of the replay is compiled for."""

    group: int  # query heads of a KV head
    head_dim: int
    block_m: int  # rows (query heads of a KV head x replayed tokens) of a tile
    block_n: int  # keys of a tile
    block_d: int  # channels of a tile: head_dim, or the next power of two
    block_c: int  # channels that a product takes at a time
    has_softcap: bool
    has_window: bool
    upcast: bool  # the interpreter multiplies 16-bit numbers wrongly: it is given float32


def kernel_shape(query: torch.Tensor, group: int, options: ReplayOptions, config: LaunchConfig) -> Shape:
    """What a kernel is compiled for with these inputs and these tiles."""
    block_d = block_dim(query.shape[-1])
    return Shape(
        group=group,
        head_dim=query.shape[-1],
        block_m=config.block_m,
        block_n=config.block_n,
        block_d=block_d,
        # A product in float32 holds its operands in registers
        block_c=min(block_d, 32) if query.dtype == torch.float32 else block_d,
        has_softcap=options.softcap is not None,
        has_window=options.window is not None,
        upcast=INTERPRETED and query.dtype != torch.float32,
    )


def block_dim(head_dim: int) -> int:
    """Channels of a tile: a power of two, at least the smallest depth of a matrix product."""
    return max(16, triton.next_power_of_2(head_dim))


def strided(tensor: torch.Tensor) -> Strided:
    """A tensor as the kernels of the replay take it; they are compiled for the distance of its tokens."""
    batch, head, token, _ = tensor.stride()
    return Strided(tensor, batch, head, tl.constexpr(token))


@triton.jit
def of_head(tensor, batch_row, head):
    """Where the vectors of a head begin."""
    return tensor.pointer + batch_row * tensor.batch + head * tensor.head


@triton.jit
def softcapped(logits, scale, softcap):
    """``softcap * tanh(logits * scale / softcap)``; ``scale`` and ``softcap`` in the same units."""
    growth = tl.exp2(logits * (scale / softcap * 2.8853900817779268))  # exp(2 x)
    return softcap - 2.0 * softcap / (growth + 1.0)


@triton.jit
def load_rows(
    rows,  # pointer, offsets [BLOCK_ROWS], number of rows that there are
    channel,
    HEAD_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """A tile [BLOCK_ROWS, BLOCK_C] of rows of contiguous channels, from ``channel`` on; zeros beyond either end."""
    pointer, offset, num_rows = rows
    row, channels = tl.arange(0, offset.shape[0]), channel + tl.arange(0, BLOCK_C)
    pointers = pointer + offset[:, None] + channels[None, :]
    MASK_CHANNELS: tl.constexpr = HEAD_DIM % BLOCK_C != 0
    if MASK_ROWS and MASK_CHANNELS:
        return tl.load(pointers, mask=(row < num_rows)[:, None] & (channels < HEAD_DIM)[None, :], other=0.0)
    if MASK_ROWS:
        return tl.load(pointers, mask=(row < num_rows)[:, None], other=0.0)
    if MASK_CHANNELS:
        return tl.load(pointers, mask=(channels < HEAD_DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def whole_rows(rows, SHAPE: tl.constexpr):
    """All channels of ``rows``, for :func:`products`: [BLOCK_ROWS, BLOCK_D]."""
    tile = load_rows(rows, 0, SHAPE.head_dim, SHAPE.block_d, True)
    if SHAPE.upcast:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def products(
    tile,  # [BLOCK_ROWS, BLOCK_D], the rows; not used with channels in blocks
    rows,  # as load_rows takes them, like the others
    others,
    MASK_OTHERS: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Products of all ``rows`` with all ``others``: [BLOCK_ROWS, BLOCK_OTHERS], float32."""
    if SHAPE.block_c == SHAPE.block_d:
        other = load_rows(others, 0, SHAPE.head_dim, SHAPE.block_d, MASK_OTHERS)
        if SHAPE.upcast:
            other = other.to(tl.float32)
        return tl.dot(tile, tl.trans(other), input_precision="ieee")
    product = tl.zeros([rows[1].shape[0], others[1].shape[0]], tl.float32)
    for channel in tl.range(0, SHAPE.head_dim, SHAPE.block_c):
        part = load_rows(rows, channel, SHAPE.head_dim, SHAPE.block_c, True)
        other = load_rows(others, channel, SHAPE.head_dim, SHAPE.block_c, MASK_OTHERS)
        product = tl.dot(part, tl.trans(other), product, input_precision="ieee")
    return product
