"""
Packed keys and values in 8 or 4 bits.

A stored code ``u`` stands for ``u * scale + minimum``. Keys take one scale a channel and block of tokens, values one a
token and group of channels (KIVI, arXiv 2402.02750, section 3): keys have channels of very different size, values do
not. Decode kernels read the codes and dequantise in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import torch

from .segments import Segments

BITS = (8, 4)
KEY_BLOCK = 64  # tokens of one segment that share the scales of a key block
VALUE_GROUP = 64  # channels that share a value's scale, where they divide head_dim; otherwise all of them
_SMALLEST = 2.0**-24  # smallest positive float16: the scale of a constant block, whose codes are then 0
_VALUE_ROWS = 1 << 14  # tokens quantised at a time: bounds the float32 copies


@dataclass(frozen=True)
class _Codes:
    """What quantised keys and values share: kernels read them as codes, everything else as numbers."""

    # uint8, shape (total, head_dim) in 8 bits, (total, head_dim // 2) in 4 (see :func:`pack_codes`)
    codes: torch.Tensor
    # scale, minimum: float16: what a code stands for
    scale: torch.Tensor
    minimum: torch.Tensor
    bits: int  # 8 or 4
    head_dim: int  # channels of a key or value
    dtype: torch.dtype  # of what was quantised

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the tensor that was quantised: (total, head_dim)."""
        return len(self.codes), self.head_dim

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held."""
        parts = (getattr(self, part.name) for part in fields(self))
        return sum(part.untyped_storage().nbytes() for part in parts if isinstance(part, torch.Tensor))

    def to(self: C, device: torch.device | str, non_blocking: bool = False) -> C:
        """Copy to ``device``; bounds stay on the CPU."""
        return replace(self, **self._changed(lambda part: part.to(device, non_blocking=non_blocking)))

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        return {name: change(getattr(self, name)) for name in ("codes", "scale", "minimum")}


C = TypeVar("C", bound=_Codes)


@dataclass(frozen=True)
class QuantizedKeys(_Codes):
    """
    Packed keys with one scale a channel and block of :data:`KEY_BLOCK` tokens; blocks start anew in each segment.

    ``scale`` and ``minimum`` are [num_blocks, head_dim].
    """

    cu_seqlens: torch.Tensor  # of the segments they were quantised in: [num_segments + 1], int64, on the CPU
    block_offsets: torch.Tensor = field(init=False, repr=False)  # first block of each segment, as cu_seqlens

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_offsets", Segments(self.cu_seqlens).block_offsets(KEY_BLOCK))

    def select(self, segments: Segments, chosen: Sequence[int]) -> QuantizedKeys:
        """Copy of the segments ``chosen``, in that order, with their codes and scales as they are."""
        blocks = Segments(self.block_offsets)
        selected = self._changed(lambda part: blocks.gather(part, chosen))
        selected["codes"] = segments.gather(self.codes, chosen)
        return replace(self, **selected, cu_seqlens=segments.select(chosen).cu_seqlens)

    def dequantize_segment(self, segments: Segments, index: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The keys of one segment as numbers, shape (n, head_dim)."""
        first, last = segments.bounds[index : index + 2]
        numbers = unpack_codes(self.codes[first:last], self.bits).to(dtype)
        block = int(self.block_offsets[index])
        whole, rest = divmod(last - first, KEY_BLOCK)
        scale, minimum = (part[block : block + whole + 1].to(dtype).unsqueeze(1) for part in (self.scale, self.minimum))
        numbers[: whole * KEY_BLOCK].view(whole, KEY_BLOCK, self.head_dim).mul_(scale[:whole]).add_(minimum[:whole])
        if rest:
            numbers[whole * KEY_BLOCK :].mul_(scale[whole]).add_(minimum[whole])
        return numbers

    def dequantize(self, segments: Segments) -> torch.Tensor:
        """The keys as numbers, float32, shape (total, head_dim)."""
        return torch.cat([self.dequantize_segment(segments, index) for index in range(len(segments))])


@dataclass(frozen=True)
class QuantizedValues(_Codes):
    """
    Packed values with one scale a token and group of channels.

    ``scale`` and ``minimum`` are [total, num_groups]: channel ``d`` belongs to group ``d // (head_dim // num_groups)``.
    """

    def select(self, segments: Segments, chosen: Sequence[int]) -> QuantizedValues:
        """Copy of the segments ``chosen``, in that order, with their codes and scales as they are."""
        return replace(self, **self._changed(lambda part: segments.gather(part, chosen)))

    def dequantize_segment(self, segments: Segments, index: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values of one segment as numbers, shape (n, head_dim)."""
        return self._numbers(slice(*segments.bounds[index : index + 2]), dtype)

    def dequantize(self, segments: Segments | None = None) -> torch.Tensor:
        """The values as numbers, float32, shape (total, head_dim)."""
        return self._numbers(slice(None), torch.float32)

    def _numbers(self, span: slice, dtype: torch.dtype) -> torch.Tensor:
        numbers = unpack_codes(self.codes[span], self.bits).to(dtype)
        groups = self.scale.shape[1]
        scale, minimum = (part[span].to(dtype).unsqueeze(-1) for part in (self.scale, self.minimum))
        numbers.view(len(numbers), groups, self.head_dim // groups).mul_(scale).add_(minimum)
        return numbers


PackedKeys: TypeAlias = torch.Tensor | QuantizedKeys
PackedValues: TypeAlias = torch.Tensor | QuantizedValues


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """
    Codes (total, head_dim), each below ``2 ** bits``, as they are stored: uint8, (total, head_dim * bits // 8).

    In 4 bits, byte ``j`` holds channel ``j`` in its low half and ``j + head_dim // 2`` in its high half, so that both
    halves unpack to contiguous channels.
    """
    if bits == 8:
        return codes.contiguous()
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Invert :func:`pack_codes`."""
    return packed if bits == 8 else torch.cat([packed & 15, packed >> 4], dim=-1)


def quantize_keys(packed_key: torch.Tensor, segments: Segments, bits: int) -> QuantizedKeys:
    """
    Quantise packed keys, [total, head_dim], by channel and block of tokens, in 8 or 4 bits.

    Raises ``ValueError`` if there are no such bits, head_dim is odd in 4 bits, the number of pairs is not that of the
    segments, or a number is not finite or too large for float16 scales.
    """
    head_dim = packed_key.shape[-1]
    check_bits(bits, head_dim)
    if len(packed_key) != segments.total:
        raise ValueError(f"packed_key holds {len(packed_key)} pairs, the segments {segments.total}")
    parts = []
    for first, last in pairwise(segments.bounds):
        numbers = packed_key[first:last].float()
        # Repeating the last key fills its block and changes neither end of a channel's range
        filling = numbers[-1:].expand(-(last - first) % KEY_BLOCK, head_dim)
        blocks = torch.cat([numbers, filling]).view(-1, KEY_BLOCK, head_dim)
        codes, *scales = _encode(blocks, 1, bits)
        parts.append((pack_codes(codes.view(-1, head_dim)[: last - first], bits), *scales))
    return QuantizedKeys(*_joined(parts), bits, head_dim, packed_key.dtype, segments.cu_seqlens)


def quantize_values(packed_value: torch.Tensor, bits: int) -> QuantizedValues:
    """
    Quantise packed values, [total, head_dim], by token, in groups of :data:`VALUE_GROUP` channels, in 8 or 4 bits.

    Raises ``ValueError`` if there are no such bits, head_dim is odd in 4 bits, or a number is not finite or too large
    for float16 scales.
    """
    head_dim = packed_value.shape[-1]
    check_bits(bits, head_dim)
    groups = head_dim // VALUE_GROUP if head_dim % VALUE_GROUP == 0 else 1
    parts = []
    for rows in packed_value.split(_VALUE_ROWS):
        codes, *scales = _encode(rows.float().view(len(rows), groups, head_dim // groups), 2, bits)
        parts.append((pack_codes(codes.view(len(rows), head_dim), bits), *scales))
    return QuantizedValues(*_joined(parts), bits, head_dim, packed_value.dtype)


def check_bits(bits: int, head_dim: int) -> None:
    """Raise ``ValueError`` unless numbers of ``head_dim`` channels can be stored in ``bits`` bits."""
    if bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, got {bits}")
    if bits == 4 and head_dim % 2:
        raise ValueError(f"4 bits need an even head_dim, got {head_dim}; use 8 bits")


def _half_below(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers in float16, none above what it stands for."""
    nearest = numbers.half()
    below = (numbers - numbers.abs() * 2.0**-10 - _SMALLEST).half()
    return torch.where(nearest.float() > numbers, below, nearest)


def _encode(numbers: torch.Tensor, dim: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes in the shape of ``numbers``, scale and minimum in float16, shared along ``dim``."""
    # Rounded outwards, so that the codes reach both ends of the range: no number is further off than half a step
    minimum = _half_below(numbers.amin(dim, keepdim=True))
    steps = (numbers.amax(dim, keepdim=True) - minimum.float()) / (2**bits - 1)
    scale = -_half_below(-steps.clamp_min(_SMALLEST))
    codes = ((numbers - minimum.float()) / scale.float()).round_()
    return codes.clamp_(0, 2**bits - 1).to(torch.uint8), scale.squeeze(dim), minimum.squeeze(dim)


def _joined(parts: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scale, minimum = map(torch.cat, zip(*parts, strict=True))
    if not (torch.isfinite(scale).all() and torch.isfinite(minimum).all()):
        raise ValueError("keys and values must be finite and below 65,504 to be quantised; keep this cache unquantised")
    return codes, scale, minimum
