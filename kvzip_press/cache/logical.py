"""Cache layers that are longer than what they hold: logical length, cropping, preallocated buffers."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

_MIN_CAPACITY = 64


def plain_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory that can be written inside and outside of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def _resized(buffer: torch.Tensor, capacity: int, length: int) -> torch.Tensor:
    """Memory for ``capacity`` tokens, the first ``length`` of them copied from ``buffer``."""
    resized = plain_empty((*buffer.shape[:2], capacity, buffer.shape[3]), buffer.dtype, buffer.device)
    resized[:, :, :length] = buffer[:, :, :length]
    return resized


class GrowingStates:
    """
    Keys and values of consecutive tokens in buffers that grow by doubling: no concatenation per decoded token.

    Only the room after the first tokens (batch_size, num_kv_heads, n, head_dim), which may be none, doubles, so that a
    short answer does not double a window. They are copied on the first growth.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.length = self._first_length = keys.shape[2]
        self._buffers = [keys, values]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held, spare capacity included."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append tokens, detached from any graph: shape (batch_size, num_kv_heads, n, head_dim)."""
        length = self.length + keys.shape[2]
        with torch.no_grad():
            for index, new in enumerate((keys, values)):
                buffer = self._buffers[index]
                locked = buffer.is_inference() and not torch.is_inference_mode_enabled()
                if length > buffer.shape[2] or locked:
                    spare = max(_MIN_CAPACITY, 2 * (buffer.shape[2] - self._first_length))
                    capacity = max(length, self._first_length + spare)
                    self._buffers[index] = buffer = _resized(buffer, capacity, self.length)
                buffer[:, :, self.length : length] = new.detach()
        self.length = length

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values held, without a copy."""
        keys, values = self._buffers
        return keys[:, :, : self.length], values[:, :, : self.length]

    def select_rows(self, rows: list[int]) -> None:
        """Keep ``rows``, in that order."""
        self._buffers = [buffer[rows] for buffer in self._buffers]

    def to(self, device: torch.device | str) -> None:
        """Move the buffers."""
        self._buffers = [buffer.to(device, non_blocking=True) for buffer in self._buffers]

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens; down to those of the start, and at 0, spare memory is released."""
        if length == 0:
            self._first_length = 0
        if length <= self._first_length < self._buffers[0].shape[2]:
            self._buffers = [_resized(buffer, self._first_length, self._first_length) for buffer in self._buffers]
        self.length = length


class LogicalStates:
    """
    Keys or values of a compressed layer as their logical shape, without their data.

    kvpress's pipeline removes an answer by ``layer.keys = layer.keys[:, :, :length]``. Slicing the sequence dimension
    gives another ``LogicalStates``; assigning one back crops the layer. Everything else raises.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = device

    def __repr__(self) -> str:
        return f"LogicalStates(shape={tuple(self.shape)}, dtype={self.dtype})"

    def numel(self) -> int:
        """Number of elements of the logical shape."""
        return self.shape.numel()

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As ``torch.Tensor.size``."""
        return self.shape if dim is None else self.shape[dim]

    def __getitem__(self, index: Any) -> LogicalStates:
        whole = torch.empty(self.shape, dtype=self.dtype, device="meta")
        part = whole[index]
        others = part.ndim == 4 and (*part.shape[:2], part.shape[3]) == (*self.shape[:2], self.shape[3])
        if not others or part.storage_offset() or part.stride() != whole.stride():
            raise TypeError(
                "the keys and values of a compressed layer can only be cropped, as in layer.keys[:, :, :length]; "
                "their data is layer.packed_keys and layer.packed_values with layer.cu_seqlens"
            )
        return LogicalStates(part.shape, self.dtype, self.device)


def _logical_states(index: int) -> Any:
    """Keys (0) or values (1) of a layer as their logical shape; assigning a shorter one crops the layer."""

    def read(layer: LogicalLayer) -> LogicalStates:
        shape = (layer.batch_size, layer.num_kv_heads, layer.get_seq_length(), layer.head_dims[index])
        return LogicalStates(shape, layer.dtype, layer.device)

    def assign(layer: LogicalLayer, states: Any) -> None:
        if not isinstance(states, LogicalStates):
            raise TypeError(
                f"a compressed layer's keys and values can only be cropped, got {type(states).__name__}; "
                "assign a slice of them, as in layer.keys = layer.keys[:, :, :length]"
            )
        layer.crop(states.shape[2])

    return property(read, assign)


class LogicalLayer(CacheLayerMixin):
    """
    Base of the layers of a compressed cache.

    Their length is logical: the number of tokens seen, kept or not. What comes after the context can be cropped, the
    context itself can't.
    """

    is_compileable = False
    batch_size: int
    num_kv_heads: int
    context_length: int  # Logical, padding included
    head_dims: tuple[int, int]  # Of keys and of values
    window: int | None  # Sliding window in tokens
    dtype: torch.dtype
    device: torch.device
    # The tokens after the context, behind what is held of the context itself in the same buffers
    _tail: GrowingStates
    _held_context = 0

    def __repr__(self) -> str:
        names = ("batch_size", "num_kv_heads", "window", "context_length", "tail_length")
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    @property
    def tail_length(self) -> int:
        """Tokens after the context."""
        return self._tail.length - self._held_context

    keys = _logical_states(0)  # type: ignore[assignment]
    values = _logical_states(1)  # type: ignore[assignment]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the layer is built from a compressed context."""

    def get_seq_length(self) -> int:
        """Tokens seen, kept or not."""
        return self.context_length + self.tail_length

    def get_max_cache_shape(self) -> int:
        """No maximum."""
        return -1

    def crop(self, max_length: int) -> None:
        """
        Keep the first ``max_length`` tokens (all but the last ``-max_length``, if negative).

        What would cut into the compressed context is refused: evicted pairs can't be counted back.
        """
        if max_length < 0:
            max_length += self.get_seq_length()
        if max_length < self.context_length:
            raise ValueError(
                f"can't crop to {max_length} tokens: the first {self.context_length} are a compressed context, "
                "which can only be kept whole; compress a shorter context instead"
            )
        self._tail.truncate(self._held_context + min(self.tail_length, max_length - self.context_length))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new tokens to the tail, and return all that is held densely; another batch size is refused."""
        if key_states.shape[0] != self.batch_size:
            raise ValueError(
                f"the compressed cache holds {self.batch_size} rows, the input has {key_states.shape[0]}; "
                "use cache.batch_repeat_interleave to ask several questions of one context at once"
            )
        self._tail.append(key_states, value_states)
        return self._tail.view()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        self.batch_select_indices(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices``, in that order."""
        selected = torch.as_tensor(indices)
        if selected.dtype == torch.bool:
            selected = selected.nonzero().flatten()
        rows = [int(row) + self.batch_size * (row < 0) for row in selected.tolist()]
        if not rows or not all(0 <= row < self.batch_size for row in rows):
            raise ValueError(f"rows must be some of 0 to {self.batch_size - 1}, got {selected.tolist()}")
        if rows != list(range(self.batch_size)):
            # Tensors made in inference mode could not be written outside of it later
            with torch.inference_mode(False), torch.no_grad():
                self._select_rows(rows)
            self.batch_size = len(rows)

    def _select_rows(self, rows: list[int]) -> None:
        self._tail.select_rows(rows)

    def reset(self) -> None:
        """Forget everything, context included."""
        self._tail.truncate(0)
        self._held_context = self.context_length = 0

    def _move(self, device: torch.device | str) -> None:
        self._tail.to(device)

    def offload(self) -> None:
        """Move the data to the CPU."""
        self._move("cpu")

    def prefetch(self) -> None:
        """Move the data back to the layer's device."""
        self._move(self.device)
