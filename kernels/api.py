"""The kernels' front door: validate, choose a backend, run. An explicitly named backend runs or raises."""

from __future__ import annotations

import torch

from .backends import BACKENDS, REPLAY_BACKENDS, check_backend, decode_module, replay_module
from .decode.torch import accumulation_dtype
from .merge import merge_lse
from .options import REDUCTIONS, ReplayOptions, check_softcap
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
    check_softcap(softcap)
    shape, device = query.shape, query.device
    _check_query(shape)
    _check_packed(shape, device, packed_key, packed_value, segments)
    if tail is not None:
        _check_tail(shape, device, packed_key.dtype, packed_value.shape[1], len(segments), tail, tail_mask)
    quantized = isinstance(packed_key, QuantizedKeys) or isinstance(packed_value, QuantizedValues)
    wide = max(shape[-1], packed_value.shape[1])
    module = decode_module(backend, device, query.dtype, packed_key.dtype, wide, quantized)
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
    dtype = accumulation_dtype(query.dtype)
    # The reference answers in float64
    return (out, lse) if out.dtype == dtype else (out.to(dtype), lse.to(dtype))


def _check_query(shape: torch.Size) -> None:
    if len(shape) != 4 or 0 in shape:
        raise ValueError(
            f"query must have shape (batch_size, num_heads, q_len, head_dim), none of them 0; got {tuple(shape)}"
        )


def _check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype | None
) -> None:
    """``dtype`` None stands for any floating-point type."""
    of_type = tensor.dtype == dtype if dtype is not None else tensor.is_floating_point()
    if tensor.shape != shape or not of_type or tensor.device != device:
        raise ValueError(
            f"{name} must have shape {shape} and be {dtype or 'of a floating-point type'} on {device}; "
            f"got {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"
        )


def _check_packed(
    query_shape: torch.Size,
    device: torch.device,
    packed_key: PackedKeys,
    packed_value: PackedValues,
    segments: Segments,
) -> None:
    for name, packed, quantized in (
        ("packed_key", packed_key, QuantizedKeys),
        ("packed_value", packed_value, QuantizedValues),
    ):
        # Kernels read quantised pairs by address: keys in the place of values would be read beyond their end
        if not isinstance(packed, (quantized, torch.Tensor)):
            raise ValueError(f"{name} must be a tensor or {quantized.__name__}, got {type(packed).__name__}")
        if len(packed.shape) != 2:
            raise ValueError(f"{name} must have shape (total, head_dim), got {tuple(packed.shape)}")
    batch_size, num_heads, _, head_dim = query_shape
    num_segments = len(segments)
    if num_segments % batch_size or num_heads % (num_segments // batch_size):
        raise ValueError(
            f"cu_seqlens describes {num_segments} segments, which don't divide {batch_size} rows x {num_heads} heads"
        )
    if packed_key.shape[1] != head_dim:
        raise ValueError(f"query has head_dim {head_dim}, packed_key {packed_key.shape[1]}")
    if not len(packed_key) == len(packed_value) == segments.total:
        raise ValueError(
            f"packed_key ({len(packed_key)}), packed_value ({len(packed_value)}) and cu_seqlens ({segments.total}) "
            "disagree on the number of pairs"
        )
    if isinstance(packed_key, QuantizedKeys) and not segments.has_bounds(packed_key.cu_seqlens):
        raise ValueError(
            f"packed_key was quantised in segments of {packed_key.cu_seqlens.diff().tolist()} pairs, cu_seqlens "
            f"describes {segments.lengths.tolist()}; quantise with the segments that are attended to"
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
    tail_mask: torch.Tensor | None,
) -> None:
    batch_size, _, _, head_dim = query_shape
    leading = (batch_size, num_segments // batch_size, *tail[0].shape[2:3])
    _check_tensor("the tail's key", tail[0], (*leading, head_dim), device, dtype)
    _check_tensor("the tail's value", tail[1], (*leading, value_dim), device, dtype)
    if tail_mask is None:
        return
    full, shape = (*query_shape[:3], leading[2]), tail_mask.shape
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
    tensors = (query, own_key, own_value, context_key, context_value)
    _check_query(query.shape)
    _check_replay(*tensors, options)
    module = replay_module(backend, query.device, query.dtype, max(query.shape[-1], own_value.shape[-1]))
    # Backends go by strides, but take the channels of a row to lie side by side
    rows = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)
    out, scores = module.replay_attention(*rows, options)
    dtype = accumulation_dtype(query.dtype)
    return out.to(dtype), scores.to(dtype)


def _check_replay(
    query: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    options: ReplayOptions,
) -> None:
    batch_size, num_heads, q_len, head_dim = query.shape
    if context_key.ndim != 4 or not context_key.shape[1] or num_heads % context_key.shape[1]:
        raise ValueError(
            "context_key must have shape (batch_size, num_kv_heads, context_len, head_dim), num_kv_heads dividing "
            f"{num_heads} heads; got {tuple(context_key.shape)}"
        )
    num_kv_heads, context_len = context_key.shape[1:3]
    if options.end > context_len:
        raise ValueError(f"the chunk ends at column {options.end}, the context has {context_len}")
    rows, dims = (batch_size, num_kv_heads), own_value.shape[-1:]
    for name, tensor, shape in (
        ("own_key", own_key, (*rows, q_len, head_dim)),
        ("own_value", own_value, (*rows, q_len, *dims)),
        ("context_key", context_key, (*rows, context_len, head_dim)),
        ("context_value", context_value, (*rows, context_len, *dims)),
    ):
        _check_tensor(name, tensor, shape, query.device, query.dtype)
    group, chunk = num_heads // num_kv_heads, options.end - options.start
    for name, weight, shape in (
        ("row_weight", options.row_weight, (batch_size, q_len)),
        ("column_weight", options.column_weight, (*rows, group, chunk)),
    ):
        if weight is not None:
            _check_tensor(name, weight, shape, query.device, None)
