"""The kernels' front door: validate, choose a backend, run. An explicitly named backend runs or raises."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from . import cpu_decode, reference, torch_decode, torch_replay
from .merge import merge_lse

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "torch", "cpu")
REDUCTIONS = ("max", "sum_of_squares", "sum", "logit")

# Above this many query rows a KV head, matrix products beat the row-by-row CPU kernel
_CPU_MAX_ROWS = 16
_CPU_DTYPES = (torch.float32, torch.bfloat16)


def check_backend(backend: str) -> None:
    """Raise ``ValueError`` unless ``backend`` is one of :data:`BACKENDS`."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


@lru_cache(maxsize=16)
def _log_choice(choice: str, device: str, dtype: torch.dtype) -> None:
    logger.debug("backend 'auto' chose %r for %s on %s", choice, dtype, device)


def _choose_decode_backend(packed_key: torch.Tensor, rows: int, softcap: float | None) -> str:
    fits = packed_key.device.type == "cpu" and packed_key.dtype in _CPU_DTYPES and softcap is None
    choice = "cpu" if fits and rows <= _CPU_MAX_ROWS else "torch"
    _log_choice(choice, packed_key.device.type, packed_key.dtype)
    return choice


def decode_attention(
    query: torch.Tensor,
    packed_key: torch.Tensor,
    packed_value: torch.Tensor,
    cu_seqlens: torch.Tensor,
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
    packed_key, packed_value : torch.Tensor
        Shape (total, head_dim): the kept pairs of (row 0, KV head 0), (row 0, KV head 1), ..., one after another.
    cu_seqlens : torch.Tensor
        Shape (batch_size * num_kv_heads + 1,), int32 or int64, on the CPU: segment ``i`` is
        ``packed_key[cu_seqlens[i]:cu_seqlens[i + 1]]``. Segments may be empty.
    softmax_scale : float
        Factor of the logits.
    softcap : float, optional
        ``softcap * tanh(logits / softcap)`` replaces the logits.
    tail : tuple[torch.Tensor, torch.Tensor], optional
        Keys and values after the context, shape (batch_size, num_kv_heads, tail_len, head_dim).
    tail_mask : torch.Tensor, optional
        Boolean, True where a tail key is visible, broadcastable to (batch_size, num_heads, q_len, tail_len).
    backend : str
        ``"auto"``, or one of :data:`BACKENDS`, which then runs or raises.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        Output (batch_size, num_heads, q_len, head_dim) and log-sum-exp of the scaled logits (batch_size, num_heads,
        q_len), in float32 (float64 for float64 input). Without a tail, an empty segment gives output 0 and log-sum-exp
        ``-inf``.

    Raises
    ------
    ValueError
        If shapes disagree, or the named backend can't take this input.
    """
    check_backend(backend)
    batch_size, num_heads, q_len, head_dim = query.shape
    num_segments = len(cu_seqlens) - 1
    if num_segments < 1 or batch_size * num_heads % num_segments:
        raise ValueError(
            f"cu_seqlens describes {num_segments} segments, which don't divide {batch_size} rows x {num_heads} heads"
        )
    if packed_key.shape[-1] != head_dim:
        raise ValueError(f"query has head_dim {head_dim}, packed_key {packed_key.shape[-1]}")
    if len(packed_key) != len(packed_value) or len(packed_key) != int(cu_seqlens[-1]):
        raise ValueError(
            f"packed_key ({len(packed_key)}), packed_value ({len(packed_value)}) and cu_seqlens ({int(cu_seqlens[-1])})"
            " disagree on the number of pairs"
        )
    if packed_key.dtype != packed_value.dtype or packed_key.device != packed_value.device:
        raise ValueError(
            f"packed_key is {packed_key.dtype} on {packed_key.device}, packed_value {packed_value.dtype} on "
            f"{packed_value.device}; they must agree"
        )
    bounds = cu_seqlens.numpy()
    if bounds[0] != 0 or (bounds[1:] < bounds[:-1]).any():
        raise ValueError(f"cu_seqlens must start at 0 and never fall, got {cu_seqlens.tolist()}")
    if backend == "auto":
        backend = _choose_decode_backend(packed_key, batch_size * num_heads // num_segments * q_len, softcap)
    fused_tail = tail if backend == "cpu" and tail_mask is None else None
    out, lse = _decode_context(query, packed_key, packed_value, cu_seqlens, softmax_scale, softcap, fused_tail, backend)
    if tail is None or fused_tail is not None:
        return out, lse
    tail_out, tail_lse = torch_decode.dense_attention(
        query, *tail, softmax_scale=softmax_scale, softcap=softcap, mask=tail_mask
    )
    return merge_lse(out, lse, tail_out, tail_lse)


def _decode_context(
    query: torch.Tensor,
    packed_key: torch.Tensor,
    packed_value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    softmax_scale: float,
    softcap: float | None,
    fused_tail: tuple[torch.Tensor, torch.Tensor] | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend == "reference":
        out, lse = reference.decode_attention(
            query, packed_key, packed_value, cu_seqlens, softmax_scale=softmax_scale, softcap=softcap
        )
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        return out.to(dtype), lse.to(dtype)
    if backend == "cpu":
        if packed_key.device.type != "cpu" or packed_key.dtype not in _CPU_DTYPES:
            raise ValueError(
                f"backend 'cpu' takes float32 or bfloat16 on the CPU, got {packed_key.dtype} on {packed_key.device}; "
                "use backend='torch'"
            )
        if softcap is not None:
            raise ValueError("backend 'cpu' has no soft-cap; use backend='torch'")
        return cpu_decode.decode_attention(
            query, packed_key, packed_value, cu_seqlens, softmax_scale=softmax_scale, tail=fused_tail
        )
    return torch_decode.decode_attention(
        query, packed_key, packed_value, cu_seqlens, softmax_scale=softmax_scale, softcap=softcap
    )


def replay_attention(
    query: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    *,
    anchor: int,
    start: int,
    end: int,
    local: bool,
    softmax_scale: float,
    softcap: float | None = None,
    window: int | None = None,
    reduction: str = "max",
    row_weight: torch.Tensor | None = None,
    column_weight: torch.Tensor | None = None,
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
    anchor : int
        Number of leading context columns in the softmax of the score (chat prefix and sinks), at most ``start``.
    start, end : int
        Scored columns of the context.
    local : bool
        Attend to the anchor, the chunk and the own keys alone; otherwise to the whole context.
    softmax_scale : float
        Factor of the logits.
    softcap : float, optional
        ``softcap * tanh(logits / softcap)`` replaces the logits.
    window : int, optional
        Sliding window: a token sees the last ``window`` tokens, itself included.
    reduction : str
        ``"max"``, ``"sum_of_squares"`` or ``"sum"`` of the softmax weights, or ``"logit"``: maximum of the scaled
        logits.
    row_weight : torch.Tensor, optional
        Factor of each replayed token's weights before the reduction, shape (batch_size, q_len).
    column_weight : torch.Tensor, optional
        Non-negative factor of each pair, shape (batch_size, num_kv_heads, group, end - start).
    backend : str
        ``"auto"``, ``"torch"`` or ``"reference"``; ``"cpu"`` has no kernel of its own for this and runs the blocked
        torch form.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        Output (batch_size, num_heads, q_len, head_dim) and scores (batch_size, num_kv_heads, end - start), float32
        (float64 for float64 input).

    Raises
    ------
    ValueError
        If the columns or the reduction are out of range.
    """
    check_backend(backend)
    context_len = context_key.shape[2]
    if not 0 <= anchor <= start <= end <= context_len:
        raise ValueError(f"need 0 <= anchor <= start <= end <= {context_len}, got {anchor}, {start}, {end}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    replay = reference.replay_attention if backend == "reference" else torch_replay.replay_attention
    return replay(
        query,
        own_key,
        own_value,
        context_key,
        context_value,
        anchor=anchor,
        start=start,
        end=end,
        local=local,
        softmax_scale=softmax_scale,
        softcap=softcap,
        window=window,
        reduction=reduction,
        row_weight=row_weight,
        column_weight=column_weight,
    )
