"""RaggedLayer: a transformers cache layer whose context is packed per head, with a dense tail."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from ..kernels.api import decode_attention
from ..kernels.storage.quantization import PackedKeys, PackedValues
from ..kernels.storage.segments import Segments
from ..routing import RoutedTensor, install_routing
from .logical import GrowingStates, LogicalLayer, plain_empty


@dataclass(eq=False, repr=False)
class RaggedLayer(LogicalLayer):
    """
    A cache layer whose context is packed per (row, KV head) and whose later tokens are a dense tail.

    Its length is logical: the number of tokens seen, kept or not. Masks are sized for the tail alone, since every
    later token sees the whole kept context (but for its window, if it slides).
    """

    packed_keys: PackedKeys  # Of the kept pairs (total, head_dim), in the order of (row, KV head, position)
    packed_values: PackedValues
    segments: Segments  # Where each of the batch_size * num_kv_heads (row, KV head) lies in them
    _: KW_ONLY
    batch_size: int
    context_length: int  # Logical, padding included
    prefix_pairs: list[int]  # For each row, pairs kept outside the budget
    context_pairs: list[int]  # For each row, pairs that were subject to the budget, before eviction
    positions: torch.Tensor | None = None  # Logical column of each kept pair (total,); needed when `window` is set
    window: int | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        install_routing()
        self.num_kv_heads = len(self.segments) // self.batch_size
        self.is_sliding = self.window is not None
        self.is_initialized = True
        self.dtype, self.device = self.packed_keys.dtype, self.packed_keys.device
        self.head_dims = (self.packed_keys.shape[-1], self.packed_values.shape[-1])
        shape = (self.batch_size, self.num_kv_heads, 0)
        self._tail = GrowingStates(*(plain_empty((*shape, dim), self.dtype, self.device) for dim in self.head_dims))

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, kept={len(self.packed_keys)})"

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Bounds of the segments, shape (batch_size * num_kv_heads + 1,), int64, on the CPU."""
        return self.segments.cu_seqlens

    @property
    def head_lengths(self) -> torch.Tensor:
        """Kept pairs of each head, shape (batch_size, num_kv_heads), int64, on the CPU."""
        return self.segments.lengths.view(self.batch_size, self.num_kv_heads)

    @property
    def kept_pairs(self) -> int:
        """Pairs kept of those that were subject to the budget."""
        return len(self.packed_keys) - sum(self.prefix_pairs)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held: packed context, its bookkeeping and the allocated tail."""
        held = [self.packed_keys, self.packed_values, self.cu_seqlens, self.positions]
        return self._tail.nbytes + sum(_nbytes(part) for part in held if part is not None)

    def get_mask_sizes(self, cache_position: torch.Tensor) -> tuple[int, int]:
        """Length and offset of the mask: the tail and the new tokens, after the context."""
        return self.tail_length + cache_position.shape[0], self.context_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of every compressed layer; the tail's keys and values are routed to this one."""
        keys, values = super().update(key_states, value_states)
        return RoutedTensor.wrap(keys, self), RoutedTensor.wrap(values, self)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **scaling: Any
    ) -> torch.Tensor:
        """Attention over the kept context and the tail ``key``, ``value``, merged by log-sum-exp."""
        mask = _tail_mask(mask, query, key.shape[2], self.window)
        options: dict[str, Any] = {"tail": (key, value), "backend": self.backend, **scaling}
        if self.window is None:
            packed = self.packed_keys, self.packed_values, self.segments
            return decode_attention(query, *packed, tail_mask=mask, **options)[0].to(query.dtype)
        # Each query of a sliding layer sees a different suffix of every segment
        assert self.positions is not None
        keys, values = (
            packed if isinstance(packed, torch.Tensor) else packed.dequantize(self.segments).to(self.dtype)
            for packed in (self.packed_keys, self.packed_values)
        )
        first_query = self.get_seq_length() - query.shape[2]
        parts = []
        for row in range(query.shape[2]):
            rows = slice(row, row + 1)
            row_mask = mask[..., rows, :] if mask is not None and mask.shape[-2] > 1 else mask
            visible = self.positions > first_query + row - self.window
            counts = torch.cat([visible.new_zeros(1, dtype=torch.int64), visible.cumsum(0)]).cpu()
            seen = keys[visible], values[visible], counts[self.cu_seqlens]
            parts.append(decode_attention(query[:, :, rows], *seen, tail_mask=row_mask, **options)[0])
        return torch.cat(parts, dim=2).to(query.dtype)

    def _select_rows(self, rows: list[int]) -> None:
        heads = self.num_kv_heads
        chosen = [row * heads + head for row in rows for head in range(heads)]
        for name in ("packed_keys", "packed_values", "positions"):
            packed = getattr(self, name)
            if isinstance(packed, torch.Tensor):
                setattr(self, name, self.segments.gather(packed, chosen))
            elif packed is not None:
                setattr(self, name, packed.select(self.segments, chosen))
        self.segments = self.segments.select(chosen)
        super()._select_rows(rows)
        self.prefix_pairs = [self.prefix_pairs[row] for row in rows]
        self.context_pairs = [self.context_pairs[row] for row in rows]

    def reset(self) -> None:
        """Forget everything, context included."""
        device = self.packed_keys.device
        self.packed_keys, self.packed_values = (plain_empty((0, dim), self.dtype, device) for dim in self.head_dims)
        self.positions = None if self.positions is None else plain_empty((0,), torch.int32, device)
        self.segments = Segments(torch.zeros_like(self.cu_seqlens))
        self.prefix_pairs, self.context_pairs = [0] * self.batch_size, [0] * self.batch_size
        super().reset()

    def _move(self, device: torch.device | str) -> None:
        super()._move(device)
        for name in ("packed_keys", "packed_values", "positions"):
            packed = getattr(self, name)
            if packed is not None:
                setattr(self, name, packed.to(device, non_blocking=True))


def _nbytes(packed: PackedKeys | PackedValues) -> int:
    return packed.untyped_storage().nbytes() if isinstance(packed, torch.Tensor) else packed.nbytes


def _tail_mask(
    attention_mask: torch.Tensor | None, query: torch.Tensor, kv_len: int, window: int | None
) -> torch.Tensor | None:
    """
    Boolean mask of the tail, broadcastable to (batch_size, num_heads, q_len, kv_len); None if all is visible.

    The mask that transformers hands over may be wider than the tail (sized from a layer that is not compressed), 4-D
    boolean or additive, 2-D (flash attention), or missing, which means causal.
    """
    q_len = query.shape[2]
    if attention_mask is not None and attention_mask.ndim == 4:
        mask = attention_mask[..., -kv_len:]
        if mask.dtype == torch.bool:
            return mask
        visible = mask > torch.finfo(mask.dtype).min / 2
        # The device is asked once for all layers that share the mask; the answer holds until its numbers change
        state = (kv_len, None if attention_mask.is_inference() else attention_mask._version)
        if getattr(attention_mask, "kvzip_press_unbiased", None) != state:
            if bool(((mask != 0) & visible).any()):
                raise NotImplementedError(
                    "a compressed KV cache does not support an additive attention bias, only masks"
                )
            attention_mask.kvzip_press_unbiased = state  # type: ignore[attr-defined]
        return visible
    causal = None
    if q_len > 1 or window is not None:
        columns = torch.arange(kv_len, device=query.device)
        rows = torch.arange(kv_len - q_len, kv_len, device=query.device).unsqueeze(-1)
        causal = columns <= rows
        if window is not None:
            causal &= columns > rows - window
        causal = causal[None, None]
    if attention_mask is None:
        return causal
    padding = attention_mask[:, None, None, -kv_len:].bool()
    return padding if causal is None else padding & causal
