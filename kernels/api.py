"""The kernels' front door: validate, choose a backend, run. An explicitly named backend runs or raises."""

from __future__ import annotations

from typing import Any

import torch

from .backends import BACKENDS, REPLAY_BACKENDS, check_backend, decode_module, replay_module
from .decode.torch import accumulation_dtype
from .merge import merge_lse
from .options import REDUCTIONS, ReplayOptions
from .storage.quantization import PackedKeys, PackedValues, QuantizedKeys, QuantizedValues
from .storage.segments import Segments

__all__ = [
    "BACKENDS",
    "REDUCTIONS",
    "REPLAY_BACKENDS",
    "ReplayOptions",
    "check_backend",
    "decode_attention",
    "merge_lse",
    "replay_attention",
]


def decode_attention(
    query: torch.Tensor,
    packed_key: PackedKeys,
    packed_value: PackedValues,
    cu_seqlens: torch.Tensor | Segments,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    tail: tuple[torch.Tensor, torch.Tensor] | None = None,
    tail_mask: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attention of later tokens over a ragged context that all of them see, and over the dense tail after it.

    Parameters
    ----------
    query : torch.Tensor
        Shape (batch_size, num_heads, q_len, head_dim).
    packed_key, packed_value : torch.Tensor, or QuantizedKeys and QuantizedValues
        Shape (total, head_dim): the kept pairs of (row 0, KV head 0), (row 0, KV head 1), ..., one after another.
    cu_seqlens : torch.Tensor or Segments
        Shape (batch_size * num_kv_heads + 1,), int32 or int64: segment ``i`` is
        ``packed_key[cu_seqlens[i]:cu_seqlens[i + 1]]``. Segments may be empty. A tensor is validated at every call; a
        :class:`~kvzip_press.kernels.storage.segments.Segments` was when it was built, and no call waits for the device.
    softmax_scale : float
        Factor of the logits.
    softcap : float, optional
        ``softcap * tanh(logits / softcap)`` replaces the logits; positive.
    tail : tuple[torch.Tensor, torch.Tensor], optional
        Keys and values after the context, shape (batch_size, num_kv_heads, tail_len, head_dim).
    tail_mask : torch.Tensor, optional
        Boolean, True where a tail key is visible, broadcastable to (batch_size, num_heads, q_len, tail_len).
    backend : str
        One of :data:`BACKENDS`. ``"auto"`` takes ``"cpu"`` for CPU tensors, ``"triton"`` for CUDA tensors where it is
        installed and the GPU's compute capability is 8.0 or higher, and ``"torch"`` for the rest (float64, other
        devices). A named backend runs or raises.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        Output (batch_size, num_heads, q_len, head_dim) and log-sum-exp of the scaled logits (batch_size, num_heads,
        q_len), in float32 (float64 for float64 queries). A row that sees no key has output 0 and log-sum-exp ``-inf``.

    Raises
    ------
    ValueError
        If shapes, types or devices disagree, or the named backend can't take this input.
    ImportError
        If what the named backend needs is not installed.
    """
    segments = cu_seqlens if isinstance(cu_seqlens, Segments) else Segments(cu_seqlens)
    _check_query(query.shape, softcap)
    head_dim, value_dim, dtype, device = query.shape[-1], packed_value.shape[-1], packed_key.dtype, query.device
    _check_packed(query.shape, device, packed_key, packed_value, segments)
    if tail is not None:
        _check_tail(query.shape, device, dtype, value_dim, len(segments), tail)
        if tail_mask is not None:
            _check_tail_mask(query.shape, device, tail[0].shape[2], tail_mask)
    quantized = isinstance(packed_key, QuantizedKeys) or isinstance(packed_value, QuantizedValues)
    module = decode_module(backend, device, query.dtype, dtype, max(head_dim, value_dim), quantized)
    out, lse = module.decode_attention(
        query,
        packed_key,
        packed_value,
        segments,
        softmax_scale=softmax_scale,
        softcap=softcap,
        tail=tail,
        tail_mask=tail_mask,
    )
    wide = accumulation_dtype(query.dtype)
    # The reference answers in float64
    return (out, lse) if out.dtype == wide else (out.to(wide), lse.to(wide))


def _check_query(shape: torch.Size, softcap: float | None) -> None:
    if len(shape) != 4 or 0 in shape:
        raise ValueError(
            f"query must have shape (batch_size, num_heads, q_len, head_dim), none of them 0; got {tuple(shape)}"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no soft-cap; got {softcap}")


def _check_kind(name: str, packed: Any, quantized: type) -> None:
    # Kernels read quantised pairs by address: keys in the place of values would be read beyond their end
    if not isinstance(packed, quantized) and not isinstance(packed, torch.Tensor):
        raise ValueError(f"{name} must be a tensor or {quantized.__name__}, got {type(packed).__name__}")


def _check_packed(
    query_shape: torch.Size,
    device: torch.device,
    packed_key: PackedKeys,
    packed_value: PackedValues,
    segments: Segments,
) -> None:
    _check_kind("packed_key", packed_key, QuantizedKeys)
    _check_kind("packed_value", packed_value, QuantizedValues)
    batch_size, num_heads, _, head_dim = query_shape
    num_segments = len(segments)
    if not batch_size or num_segments % batch_size or num_heads % (num_segments // batch_size):
        raise ValueError(
            f"cu_seqlens describes {num_segments} segments, which don't divide {batch_size} rows x {num_heads} heads"
        )
    total, key_dim = packed_key.shape
    if key_dim != head_dim:
        raise ValueError(f"query has head_dim {head_dim}, packed_key {key_dim}")
    if not total == len(packed_value) == segments.total:
        raise ValueError(
            f"packed_key ({total}), packed_value ({len(packed_value)}) and cu_seqlens ({segments.total})"
            " disagree on the number of pairs"
        )
    if isinstance(packed_key, QuantizedKeys) and len(packed_key.block_offsets) != num_segments + 1:
        raise ValueError(
            f"packed_key was quantised in {len(packed_key.block_offsets) - 1} segments, cu_seqlens describes "
            f"{num_segments}; quantise with the segments that are attended to"
        )
    if packed_key.dtype != packed_value.dtype or not packed_key.device == packed_value.device == device:
        raise ValueError(
            f"packed_key is {packed_key.dtype} on {packed_key.device}, packed_value {packed_value.dtype} on "
            f"{packed_value.device} and query on {device}; they must agree"
        )


def _check_tail(
    query_shape: torch.Size,
    device: torch.device,
    dtype: torch.dtype,
    value_dim: int,
    num_segments: int,
    tail: tuple[torch.Tensor, torch.Tensor],
) -> None:
    key, value = tail
    key_shape, batch_size = key.shape, query_shape[0]
    leading = (batch_size, num_segments // batch_size, key_shape[2])
    if key_shape != (*leading, query_shape[-1]) or value.shape != (*leading, value_dim):
        raise ValueError(
            f"the tail's keys have shape {tuple(key_shape)}, its values {tuple(value.shape)}; expected "
            f"{(*leading, query_shape[-1])} and {(*leading, value_dim)}"
        )
    if not key.dtype == value.dtype == dtype or not key.device == value.device == device:
        raise ValueError(
            f"the tail is {key.dtype} and {value.dtype} on {key.device} and {value.device}, the context {dtype} on "
            f"{device}; they must agree"
        )


def _check_tail_mask(query_shape: torch.Size, device: torch.device, tail_len: int, tail_mask: torch.Tensor) -> None:
    full, shape = (*query_shape[:3], tail_len), tail_mask.shape
    fits = len(shape) == 4 and all(size in (1, whole) for size, whole in zip(shape, full, strict=True))
    if tail_mask.dtype != torch.bool or tail_mask.device != device or not fits:
        raise ValueError(
            f"tail_mask must be boolean, on {device} and broadcastable to {full}, got {tail_mask.dtype} on "
            f"{tail_mask.device} with shape {tuple(shape)}"
        )


def replay_attention(
    query: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    options: ReplayOptions,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attention of replayed tokens, and the score each context pair of the chunk gets from it.

    The replayed tokens stand directly after the context. The score of a pair is taken from the softmax over the anchor
    columns ``[0, anchor)``, the chunk ``[start, end)`` and the replayed tokens' own keys (causal), reduced over the
    query heads of its group and over all replayed tokens (KVzip, arXiv 2505.23416, section 3.2). Scores and output
    share one pass; the whole query x key matrix never exists.

    Parameters
    ----------
    query : torch.Tensor
        Shape (batch_size, num_heads, q_len, head_dim).
    own_key, own_value : torch.Tensor
        Keys and values of the replayed tokens, shape (batch_size, num_kv_heads, q_len, head_dim).
    context_key, context_value : torch.Tensor
        The cached context, shape (batch_size, num_kv_heads, context_len, head_dim).
    options : ReplayOptions
        Columns, masks, and the reduction.
    backend : str
        One of :data:`REPLAY_BACKENDS`, chosen as by :func:`decode_attention`.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        Output (batch_size, num_heads, q_len, head_dim) and scores (batch_size, num_kv_heads, end - start), float32
        (float64 for float64 input).

    Raises
    ------
    ValueError
        If the columns or the reduction are out of range, or the named backend can't take this input.
    ImportError
        If what the named backend needs is not installed.
    """
    _check_query(query.shape, options.softcap)
    _check_replay(context_key, options.anchor, options.start, options.end, options.reduction)
    module = replay_module(backend, query.device, query.dtype, query.shape[-1])
    out, scores = module.replay_attention(query, own_key, own_value, context_key, context_value, **vars(options))
    dtype = accumulation_dtype(query.dtype)
    return out.to(dtype), scores.to(dtype)


def _check_replay(context_key: torch.Tensor, anchor: int, start: int, end: int, reduction: str) -> None:
    context_len = context_key.shape[2]
    if not 0 <= anchor <= start <= end <= context_len:
        raise ValueError(f"need 0 <= anchor <= start <= end <= {context_len}, got {anchor}, {start}, {end}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
