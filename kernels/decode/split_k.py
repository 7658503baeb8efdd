"""Work lists of split-K decoding: ragged segments cut into nearly equal items, once for all steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..storage.quantization import KEY_BLOCK
from ..storage.segments import Segments


@dataclass(frozen=True)
class WorkList:
    """Items of nearly equal length that together cover every segment once."""

    # int32, shape (num_items, 4), in the order of the segments: segment, first pair, end (both counted in the packed
    # tensor) and the key block of the first pair (:data:`~kvzip_press.kernels.storage.quantization.KEY_BLOCK`)
    items: torch.Tensor
    # int32, shape (num_segments + 1,): the items of segment ``i`` are ``offsets[i]:offsets[i + 1]``; an empty segment
    # has none
    offsets: torch.Tensor
    max_length: int  # pairs of the longest item
    max_items: int  # most items that a segment has

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Split:
    """How one call is split and scaled, and where the results of its parts go."""

    work: WorkList  # items of the packed tensors
    # num_kv_heads, num_rows: KV heads, and query rows of a (row, KV head) segment: its query heads x tokens
    num_kv_heads: int
    num_rows: int
    # tail_chunk, tail_splits: keys and number of the further items that the tail of each segment is cut into
    tail_chunk: int
    tail_splits: int
    # normalised outputs, float32, shape (num_partials, num_rows, value_dim): first those of the items, then those of
    # the tail of each segment
    partial: torch.Tensor
    partial_lse: torch.Tensor  # their log-sum-exp to the base 2, float32, shape (num_partials, num_rows)
    factor: float  # factor of the logits: to units of log 2, or with a soft-cap to the exponent of its tanh
    cap: float | None  # the soft-cap, in units of log 2

    @property
    def most_partials(self) -> int:
        """Most partial results that one query row has."""
        return self.work.max_items + self.tail_splits


def work_list(segments: Segments, device: torch.device, *, step: int, limit: int, min_length: int) -> WorkList:
    """
    Cut ``segments`` into items on ``device``; made at the first call with these arguments, kept as long as they.

    Items start at multiples of ``step``, a multiple of ``KEY_BLOCK``, from the start of their segment. There are at
    most ``limit``, unless more segments than that hold pairs, and none is made shorter than ``min_length``, except for
    what a segment leaves.
    """

    def make() -> WorkList:
        items, offsets = _cut(segments, step, limit, min_length)
        max_length = int((items[:, 2] - items[:, 1]).max()) if len(items) else 0
        max_items = int(offsets.diff().max())
        items, offsets = (values.to(device=device, dtype=torch.int32) for values in (items, offsets))
        return WorkList(items, offsets, max_length, max_items)

    return segments.derived(("split_k", device, step, limit, min_length), make)


def _cut(segments: Segments, step: int, limit: int, min_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = (segments.lengths + step - 1) // step
    longest = _smallest_longest(blocks, limit, (min_length + step - 1) // step)
    counts = (blocks + longest - 1) // longest
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    segment = torch.arange(len(segments)).repeat_interleave(counts)
    index = torch.arange(len(segment)) - offsets[segment]
    first, last = (i * blocks[segment] // counts[segment] for i in (index, index + 1))
    start, end = segments.cu_seqlens[segment], segments.cu_seqlens[segment + 1]
    key_block = segments.block_offsets(KEY_BLOCK)[segment] + first * (step // KEY_BLOCK)
    items = torch.stack([segment, start + first * step, torch.minimum(start + last * step, end), key_block], dim=1)
    return items, offsets


def _smallest_longest(blocks: torch.Tensor, limit: int, least: int) -> int:
    """Fewest blocks an item may hold so that at most ``limit`` items are needed."""
    low, high = max(1, least), max(1, least, int(blocks.max()))
    while low < high:
        middle = (low + high) // 2
        if int(((blocks + middle - 1) // middle).sum()) <= limit:
            high = middle
        else:
            low = middle + 1
    return low
