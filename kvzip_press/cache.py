"""RaggedLayer: a transformers cache layer whose context is packed per head, with a dense tail."""

from __future__ import annotations

from typing import Any

import torch

from .attention import RoutedTensor, install_routing
from .kernels.api import decode_attention
from .logical import GrowingStates, LogicalLayer, plain_empty


class RaggedLayer(LogicalLayer):
    """
    A cache layer whose context is packed per (row, KV head) and whose later tokens are a dense tail.

    Its length is logical: the number of tokens seen, kept or not. Masks are sized for the tail alone, since every
    later token sees the whole kept context (but for its window, if it slides).

    Parameters
    ----------
    packed_keys, packed_values : torch.Tensor
        Kept pairs, shape (total, head_dim), in the order of (row, KV head, position).
    cu_seqlens : torch.Tensor
        Bounds of the segments on the CPU, shape (batch_size * num_kv_heads + 1,), int64.
    batch_size : int
        Rows.
    context_length : int
        Logical length of the compressed context, padding included.
    prefix_pairs, context_pairs : list[int]
        For each row, pairs kept outside the budget, and pairs that were subject to it, before eviction.
    positions : torch.Tensor, optional
        Logical column of each kept pair, shape (total,); needed when ``window`` is set.
    window : int, optional
        Sliding window in tokens.
    backend : str
        Decode backend, see :data:`kvzip_press.kernels.api.BACKENDS`.
    """

    def __init__(
        self,
        packed_keys: torch.Tensor,
        packed_values: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *,
        batch_size: int,
        context_length: int,
        prefix_pairs: list[int],
        context_pairs: list[int],
        positions: torch.Tensor | None = None,
        window: int | None = None,
        backend: str = "auto",
    ) -> None:
        install_routing()
        self.packed_keys = packed_keys
        self.packed_values = packed_values
        self.cu_seqlens = cu_seqlens
        self.batch_size = batch_size
        self.num_kv_heads = (len(cu_seqlens) - 1) // batch_size
        self.context_length = context_length
        self.prefix_pairs = prefix_pairs
        self.context_pairs = context_pairs
        self.positions = positions
        self.window = window
        self.backend = backend
        self.is_sliding = window is not None
        self.is_initialized = True
        self.dtype, self.device = packed_keys.dtype, packed_keys.device
        self.head_dims = (packed_keys.shape[-1], packed_values.shape[-1])
        self._tail = GrowingStates(
            *(plain_empty((batch_size, self.num_kv_heads, 0, dim), packed_keys) for dim in self.head_dims)
        )

    def __repr__(self) -> str:
        return (
            f"RaggedLayer(batch_size={self.batch_size}, num_kv_heads={self.num_kv_heads}, "
            f"context_length={self.context_length}, kept={len(self.packed_keys)}, tail_length={self.tail_length})"
        )

    @property
    def head_lengths(self) -> torch.Tensor:
        """Kept pairs of each head, shape (batch_size, num_kv_heads), int64, on the CPU."""
        return self.cu_seqlens.diff().view(self.batch_size, self.num_kv_heads)

    @property
    def kept_pairs(self) -> int:
        """Pairs kept of those that were subject to the budget."""
        return len(self.packed_keys) - sum(self.prefix_pairs)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held: packed context, its bookkeeping and the allocated tail."""
        tensors = [self.packed_keys, self.packed_values, self.cu_seqlens]
        if self.positions is not None:
            tensors.append(self.positions)
        return self._tail.nbytes + sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    @property
    def tail_length(self) -> int:
        """Tokens after the context."""
        return self._tail.length

    def _truncate_tail(self, length: int) -> None:
        self._tail.truncate(length)

    def get_mask_sizes(self, cache_position: torch.Tensor) -> tuple[int, int]:
        """Length and offset of the mask: the tail and the new tokens, after the context."""
        return self.tail_length + cache_position.shape[0], self.context_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Append the new tokens to the tail.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor]
            The tail's keys and values, routed to this layer.

        Raises
        ------
        ValueError
            If the batch size is not the cache's.
        """
        self._check_rows(key_states)
        self._tail.append(key_states, value_states)
        keys, values = self._tail.view()
        return RoutedTensor.wrap(keys, self), RoutedTensor.wrap(values, self)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        softmax_scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention over the kept context and the tail ``key``, ``value``, merged by log-sum-exp."""
        mask = _tail_mask(attention_mask, query, key.shape[2], self.window)
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap, "backend": self.backend}
        if self.window is not None:
            return self._windowed_attention(query, (key, value), mask, options).to(query.dtype)
        out, _ = decode_attention(
            query,
            self.packed_keys,
            self.packed_values,
            self.cu_seqlens,
            tail=(key, value),
            tail_mask=mask,
            **options,
        )
        return out.to(query.dtype)

    def _windowed_attention(
        self,
        query: torch.Tensor,
        tail: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        # Each query of a sliding layer sees a different suffix of every segment
        assert self.positions is not None and self.window is not None
        first_query = self.get_seq_length() - query.shape[2]
        parts = []
        for row in range(query.shape[2]):
            rows = slice(row, row + 1)
            row_mask = mask[..., rows, :] if mask is not None and mask.shape[-2] > 1 else mask
            visible = self.positions > first_query + row - self.window
            counts = torch.cat([visible.new_zeros(1, dtype=torch.int64), visible.cumsum(0)]).cpu()
            out, _ = decode_attention(
                query[:, :, rows],
                self.packed_keys[visible],
                self.packed_values[visible],
                counts[self.cu_seqlens],
                tail=tail,
                tail_mask=row_mask,
                **options,
            )
            parts.append(out)
        return torch.cat(parts, dim=2)

    def _select_rows(self, rows: list[int]) -> None:
        heads, bounds = self.num_kv_heads, self.cu_seqlens.tolist()
        spans = [slice(bounds[row * heads], bounds[(row + 1) * heads]) for row in rows]
        self.packed_keys = torch.cat([self.packed_keys[span] for span in spans])
        self.packed_values = torch.cat([self.packed_values[span] for span in spans])
        if self.positions is not None:
            self.positions = torch.cat([self.positions[span] for span in spans])
        lengths = self.head_lengths[rows].flatten()
        self.cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        self._tail.select_rows(torch.tensor(rows))
        self.prefix_pairs = [self.prefix_pairs[row] for row in rows]
        self.context_pairs = [self.context_pairs[row] for row in rows]

    def reset(self) -> None:
        """Forget everything, context included."""
        self.packed_keys, self.packed_values = self.packed_keys[:0].clone(), self.packed_values[:0].clone()
        self.positions = None if self.positions is None else self.positions[:0].clone()
        self.cu_seqlens = torch.zeros_like(self.cu_seqlens)
        self.prefix_pairs, self.context_pairs = [0] * self.batch_size, [0] * self.batch_size
        self.context_length = 0
        self._tail.clear()

    def _move(self, device: torch.device | str) -> None:
        self._tail.to(device)
        for name in ("packed_keys", "packed_values", "positions"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.to(device, non_blocking=True))

    def offload(self) -> None:
        """Move the data to the CPU."""
        self._move("cpu")

    def prefetch(self) -> None:
        """Move the data back to the layer's device."""
        self._move(self.device)


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
        if bool((mask[visible] != 0).any()):
            raise NotImplementedError("a compressed KV cache does not support an additive attention bias, only masks")
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
