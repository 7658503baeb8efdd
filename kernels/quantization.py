"""
Packed keys and values in 8 or 4 bits.

A stored code ``u`` stands for ``u * scale + minimum``. Keys take one scale a channel and block of tokens, values one a
token and group of channels (KIVI, arXiv 2402.02750, section 3): keys have channels of very different size, values do
not. Decode kernels read the codes and dequantise in registers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .segments import Segments

BITS = (8, 4)
KEY_BLOCK = 64  # tokens of one segment that share the scales of a key block
VALUE_GROUP = 64  # channels that share a value's scale, where they divide head_dim; otherwise all of them
_SMALLEST_SCALE = 2.0**-24  # smallest positive float16: a constant block gets codes of 0


class _Codes:
    """What both quantised tensors share: they are read by kernels as codes, and here as numbers."""

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    bits: int
    head_dim: int
    dtype: torch.dtype

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
        """Bytes of the storages held: codes, scales and minima."""
        return sum(part.untyped_storage().nbytes() for part in (self.codes, self.scale, self.minimum))

    def _numbers(self) -> torch.Tensor:
        return unpack_codes(self.codes, self.bits).float()


@dataclass(frozen=True)
class QuantizedKeys(_Codes):
    """
    Packed keys with one scale a channel and block of :data:`KEY_BLOCK` tokens; blocks start anew in each segment.

    Parameters
    ----------
    codes : torch.Tensor
        uint8, shape (total, head_dim) in 8 bits, (total, head_dim // 2) in 4 (see :func:`pack_codes`).
    scale, minimum : torch.Tensor
        float16, shape (num_blocks, head_dim).
    block_offsets : torch.Tensor
        First block of each segment, shape (num_segments + 1,), int64, on the CPU.
    bits : int
        8 or 4.
    head_dim : int
        Channels of a key.
    dtype : torch.dtype
        Of the keys that were quantised.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    block_offsets: torch.Tensor
    bits: int
    head_dim: int
    dtype: torch.dtype

    def to(self, device: torch.device | str, non_blocking: bool = False) -> QuantizedKeys:
        """Copy to ``device``; ``block_offsets`` stay on the CPU."""
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in _TENSORS}
        return QuantizedKeys(
            **moved, block_offsets=self.block_offsets, bits=self.bits, head_dim=self.head_dim, dtype=self.dtype
        )

    def dequantize(self, segments: Segments) -> torch.Tensor:
        """The keys as numbers, float32, shape (total, head_dim)."""
        block = _block_of_token(segments, self.block_offsets).to(self.device)
        return self._numbers() * self.scale.float()[block] + self.minimum.float()[block]


@dataclass(frozen=True)
class QuantizedValues(_Codes):
    """
    Packed values with one scale a token and group of channels.

    Parameters
    ----------
    codes : torch.Tensor
        uint8, shape (total, head_dim) in 8 bits, (total, head_dim // 2) in 4 (see :func:`pack_codes`).
    scale, minimum : torch.Tensor
        float16, shape (total, num_groups): channel ``d`` belongs to group ``d // (head_dim // num_groups)``.
    bits : int
        8 or 4.
    head_dim : int
        Channels of a value.
    dtype : torch.dtype
        Of the values that were quantised.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    bits: int
    head_dim: int
    dtype: torch.dtype

    def to(self, device: torch.device | str, non_blocking: bool = False) -> QuantizedValues:
        """Copy to ``device``."""
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in _TENSORS}
        return QuantizedValues(**moved, bits=self.bits, head_dim=self.head_dim, dtype=self.dtype)

    def dequantize(self, segments: Segments | None = None) -> torch.Tensor:
        """The values as numbers, float32, shape (total, head_dim)."""
        groups = self.scale.shape[1]
        grouped = self._numbers().view(len(self), groups, self.head_dim // groups)
        return (grouped * self.scale.float().unsqueeze(-1) + self.minimum.float().unsqueeze(-1)).view(self.shape)


_TENSORS = ("codes", "scale", "minimum")
assert all({*_TENSORS} <= {field.name for field in fields(kind)} for kind in (QuantizedKeys, QuantizedValues))


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """
    Codes as they are stored.

    Parameters
    ----------
    codes : torch.Tensor
        uint8, shape (total, head_dim), each below ``2 ** bits``.
    bits : int
        8 or 4. In 4 bits, byte ``j`` holds channel ``j`` in its low half and ``j + head_dim // 2`` in its high half, so
        that both halves unpack to contiguous channels.

    Returns
    -------
    torch.Tensor
        uint8, shape (total, head_dim * bits // 8).
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
    Quantise packed keys by channel and block of tokens.

    Parameters
    ----------
    packed_key : torch.Tensor
        Shape (total, head_dim).
    segments : Segments
        Bounds of the segments.
    bits : int
        8 or 4.

    Raises
    ------
    ValueError
        If ``bits`` is not 8 or 4, head_dim is odd in 4 bits, the number of pairs is not that of the segments, or a
        number is not finite or too large for float16 scales.
    """
    _check(packed_key, bits)
    if len(packed_key) != segments.total:
        raise ValueError(f"packed_key holds {len(packed_key)} pairs, the segments {segments.total}")
    numbers = packed_key.float()
    offsets = segments.block_offsets(KEY_BLOCK)
    block = _block_of_token(segments, offsets).to(packed_key.device)
    index = block.unsqueeze(-1).expand_as(numbers)
    empty = numbers.new_zeros(int(offsets[-1]), packed_key.shape[-1])
    minimum = empty.scatter_reduce(0, index, numbers, "amin", include_self=False)
    maximum = empty.scatter_reduce(0, index, numbers, "amax", include_self=False)
    scale, minimum = _scales(minimum, maximum, bits)
    codes = _encode(numbers, scale[block], minimum[block], bits)
    return QuantizedKeys(
        pack_codes(codes, bits), scale, minimum, offsets, bits, packed_key.shape[-1], packed_key.dtype
    )


def quantize_values(packed_value: torch.Tensor, bits: int) -> QuantizedValues:
    """
    Quantise packed values by token, in groups of :data:`VALUE_GROUP` channels.

    Parameters
    ----------
    packed_value : torch.Tensor
        Shape (total, head_dim).
    bits : int
        8 or 4.

    Raises
    ------
    ValueError
        If ``bits`` is not 8 or 4, head_dim is odd in 4 bits, or a number is not finite or too large for float16 scales.
    """
    _check(packed_value, bits)
    head_dim = packed_value.shape[-1]
    groups = head_dim // VALUE_GROUP if head_dim % VALUE_GROUP == 0 else 1
    numbers = packed_value.float().view(len(packed_value), groups, head_dim // groups)
    scale, minimum = _scales(numbers.amin(dim=-1), numbers.amax(dim=-1), bits)
    codes = _encode(numbers, scale.unsqueeze(-1), minimum.unsqueeze(-1), bits).view(len(packed_value), head_dim)
    return QuantizedValues(pack_codes(codes, bits), scale, minimum, bits, head_dim, packed_value.dtype)


def _check(packed: torch.Tensor, bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, got {bits}")
    if bits == 4 and packed.shape[-1] % 2:
        raise ValueError(f"4 bits need an even head_dim, got {packed.shape[-1]}; use 8 bits")


def _scales(minimum: torch.Tensor, maximum: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    minimum = minimum.half()
    # From the minimum as it is stored, so that the codes reach the maximum
    scale = ((maximum - minimum.float()) / (2**bits - 1)).clamp_min(_SMALLEST_SCALE).half()
    if not (torch.isfinite(scale).all() and torch.isfinite(minimum).all()):
        raise ValueError("keys and values must be finite and below 65,504 to be quantised; keep this cache unquantised")
    return scale, minimum


def _encode(numbers: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bits: int) -> torch.Tensor:
    # The scales as they are stored, so that rounding them costs no accuracy twice
    codes = ((numbers - minimum.float()) / scale.float()).round_()
    return codes.clamp_(0, 2**bits - 1).to(torch.uint8)


def _block_of_token(segments: Segments, block_offsets: torch.Tensor) -> torch.Tensor:
    """Key block of each packed token, shape (total,)."""
    starts = segments.cu_seqlens[:-1].repeat_interleave(segments.lengths)
    within = (torch.arange(segments.total) - starts) // KEY_BLOCK
    return block_offsets[:-1].repeat_interleave(segments.lengths) + within
