"""Bounds of ragged segments: validated once, with what kernels derive from them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Segments:
    """
    Where each (row, KV head) lies in a packed tensor: segment ``i`` is ``packed[cu_seqlens[i]:cu_seqlens[i + 1]]``.

    Building one validates the bounds, shape (num_segments + 1,), int32 or int64, and, for bounds on a GPU, copies them
    to the host once. Keep it beside the packed tensors: a decode step that is given one validates nothing again and
    never waits for the device. Segments may be empty. Raises ``ValueError`` if the bounds are not one-dimensional
    integers that start at 0 and never fall.
    """

    def __init__(self, cu_seqlens: torch.Tensor) -> None:
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "cu_seqlens must be int32 or int64 with shape (num_segments + 1,), got "
                f"{cu_seqlens.dtype} with shape {tuple(cu_seqlens.shape)}"
            )
        self.cu_seqlens = cu_seqlens.detach().to(device="cpu", dtype=torch.int64, copy=True)
        lengths = self.lengths
        if self.cu_seqlens[0] != 0 or (lengths < 0).any():
            raise ValueError(f"cu_seqlens must start at 0 and never fall, got {cu_seqlens.tolist()}")
        self._num_segments = len(lengths)
        self.total = int(self.cu_seqlens[-1])
        self.max_length = int(lengths.max())
        self._derived: dict[Hashable, Any] = {}
        self._agreed = self.cu_seqlens

    @classmethod
    def from_lengths(cls, lengths: torch.Tensor) -> Segments:
        """Segments of the given lengths, shape (num_segments,), integers."""
        ends = lengths.to(device="cpu", dtype=torch.int64).cumsum(0)
        return cls(torch.nn.functional.pad(ends, (1, 0)))

    def __len__(self) -> int:
        return self._num_segments

    def __repr__(self) -> str:
        return f"Segments(num_segments={len(self)}, total={self.total}, max_length={self.max_length})"

    def __reduce__(self) -> tuple[type[Segments], tuple[torch.Tensor]]:
        # Copies and pickles carry the bounds; what kernels derived from them is made again where it is used
        return Segments, (self.cu_seqlens,)

    @property
    def lengths(self) -> torch.Tensor:
        """Pairs of each segment, shape (num_segments,), int64, on the CPU."""
        return self.cu_seqlens.diff()

    @cached_property
    def bounds(self) -> list[int]:
        """``cu_seqlens`` as a list."""
        return self.cu_seqlens.tolist()

    def has_bounds(self, cu_seqlens: torch.Tensor) -> bool:
        """Whether ``cu_seqlens``, int64 on the CPU, are these bounds; those that were last asked about are known."""
        if cu_seqlens is not self._agreed:
            if not torch.equal(cu_seqlens, self.cu_seqlens):
                return False
            self._agreed = cu_seqlens
        return True

    def spans(self, chosen: Sequence[int]) -> Iterator[slice]:
        """Where the segments ``chosen`` lie in a packed tensor; neighbours are joined to one slice."""
        bounds = self.bounds
        first = 0
        for index, segment in enumerate(chosen):
            if index + 1 == len(chosen) or chosen[index + 1] != segment + 1:
                yield slice(bounds[chosen[first]], bounds[segment + 1])
                first = index + 1

    def gather(self, packed: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        """Copy of the segments ``chosen`` of a packed tensor, in that order, one after another."""
        return torch.cat([packed[span] for span in self.spans(chosen)])

    def select(self, chosen: Sequence[int]) -> Segments:
        """Bounds of what :meth:`gather` returns."""
        return Segments.from_lengths(self.lengths[list(chosen)])

    def block_offsets(self, block: int) -> torch.Tensor:
        """
        Index of each segment's first block when every segment is cut into blocks of its own, of ``block`` pairs.

        Shape (num_segments + 1,), int64, on the CPU; the last block of a segment may hold fewer pairs.
        """
        return Segments.from_lengths((self.lengths + block - 1) // block).cu_seqlens

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returned at the first call with this ``key``: a kernel's own plan of the segments."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]
