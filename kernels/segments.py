"""Bounds of ragged segments: validated once, with what kernels derive from them."""

from __future__ import annotations

from functools import cached_property

import torch


class Segments:
    """
    Where each (row, KV head) lies in a packed tensor.

    Building one validates the bounds and, for bounds on a GPU, copies them to the host once. Keep it beside the packed
    tensors: a decode step that is given one validates nothing again and never waits for the device.

    Parameters
    ----------
    cu_seqlens : torch.Tensor
        Shape (num_segments + 1,), int32 or int64: segment ``i`` is ``packed[cu_seqlens[i]:cu_seqlens[i + 1]]``.
        Segments may be empty.

    Raises
    ------
    ValueError
        If the bounds are not one-dimensional integers that start at 0 and never fall.
    """

    def __init__(self, cu_seqlens: torch.Tensor) -> None:
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "cu_seqlens must be int32 or int64 with shape (num_segments + 1,), got "
                f"{cu_seqlens.dtype} with shape {tuple(cu_seqlens.shape)}"
            )
        self.cu_seqlens = cu_seqlens.detach().to(device="cpu", dtype=torch.int64, copy=True)
        self.lengths = self.cu_seqlens.diff()
        if self.cu_seqlens[0] != 0 or (self.lengths < 0).any():
            raise ValueError(f"cu_seqlens must start at 0 and never fall, got {cu_seqlens.tolist()}")
        self.total = int(self.cu_seqlens[-1])
        self.max_length = int(self.lengths.max())
        self._on_device: dict[tuple[str, torch.device], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"Segments(num_segments={len(self)}, total={self.total}, max_length={self.max_length})"

    @cached_property
    def bounds(self) -> list[int]:
        """``cu_seqlens`` as a list."""
        return self.cu_seqlens.tolist()

    def block_offsets(self, block: int) -> torch.Tensor:
        """
        Index of each segment's first block when every segment is cut into blocks of its own.

        Parameters
        ----------
        block : int
            Pairs a block; the last block of a segment may hold fewer.

        Returns
        -------
        torch.Tensor
            Shape (num_segments + 1,), int64, on the CPU.
        """
        blocks = (self.lengths + block - 1) // block
        return torch.cat([blocks.new_zeros(1), blocks.cumsum(0)])

    def on_device(self, name: str, device: torch.device, values: torch.Tensor) -> torch.Tensor:
        """The int32 copy of ``values`` on ``device``, made at the first call with this ``name`` and kept."""
        key = (name, device)
        if key not in self._on_device:
            self._on_device[key] = values.to(device=device, dtype=torch.int32)
        return self._on_device[key]
