"""WindowLayer: the sliding layer of a compressed hybrid cache."""

from __future__ import annotations

import torch

from .logical import GrowingStates, LogicalLayer


class WindowLayer(LogicalLayer):
    """
    The context's last window, dense, then the later tokens.

    Unlike transformers' sliding layer it can be cropped back to the end of the context, so that several questions can
    be asked of one context. transformers attends to it as usual, with a mask sized for what it holds.

    Keys and values (batch_size, num_kv_heads, n, head_dim) are the last columns of the context. A token sees the last
    ``window`` tokens, itself included.
    """

    is_sliding = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, *, context_length: int, window: int) -> None:
        self.window = window
        self.context_length = context_length
        self.batch_size, self.num_kv_heads = keys.shape[:2]
        self.head_dims = (keys.shape[-1], values.shape[-1])
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._held_context = keys.shape[2]
        self._tail = GrowingStates(keys, values)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held."""
        return self._tail.nbytes

    def get_mask_sizes(self, cache_position: torch.Tensor) -> tuple[int, int]:
        """Length and offset of the mask: all that is held and the new tokens."""
        return self._tail.length + cache_position.shape[0], self.context_length - self._held_context
