"""Kernels against float64 on small odd shapes of the device, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..api import decode_attention, replay_attention, replay_scores
from ..storage.quantization import PackedKeys, PackedValues, quantize_keys, quantize_values
from ..storage.segments import Segments
from .case import dtype_name, randn
from .verify import LSE, verify_results

_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class DecodeCheck:
    """
    A decode input.

    Parameters
    ----------
    lengths : tuple[int, ...]
        Kept pairs of each (row, KV head).
    dtype : torch.dtype
        Of query and cache.
    storage : str
        ``""``, ``"int8"`` or ``"int4"``.
    batch_size, group, q_len, head_dim : int
        Sizes.
    tail : int
        Tokens after the context, the query's own among them; 0 for none.
    softcap : float, optional
        Soft-cap of the logits.
    """

    lengths: tuple[int, ...]
    dtype: torch.dtype
    storage: str = ""
    batch_size: int = 1
    group: int = 4
    q_len: int = 1
    head_dim: int = 128
    tail: int = 0
    softcap: float | None = None


@dataclass(frozen=True)
class ReplayCheck:
    """
    A replay input.

    Parameters
    ----------
    dtype : torch.dtype
        Of all states.
    reduction : str
        Of the weights.
    q_len, context, anchor, start, end : int
        Replayed tokens, context and columns.
    group, head_dim : int
        Sizes.
    local : bool
        Attend to anchor, chunk and own keys alone.
    softcap : float, optional
        Soft-cap of the logits.
    window : int, optional
        Sliding window.
    weighted : bool
        Weights of rows and columns.
    """

    dtype: torch.dtype
    reduction: str = "max"
    q_len: int = 63
    context: int = 300
    anchor: int = 7
    start: int = 64
    end: int = 175
    group: int = 4
    head_dim: int = 128
    local: bool = True
    softcap: float | None = None
    window: int | None = None
    weighted: bool = False


_UNEVEN = (0, 1, 63, 700)
_BF16, _F16, _F32 = torch.bfloat16, torch.float16, torch.float32
DECODE_CHECKS = (
    DecodeCheck(_UNEVEN, _BF16),
    DecodeCheck(_UNEVEN, _BF16, "int8"),
    DecodeCheck(_UNEVEN, _BF16, "int4"),
    DecodeCheck(_UNEVEN, _F16, head_dim=64, group=3),
    DecodeCheck(_UNEVEN, _F32, head_dim=64, group=3),
    DecodeCheck((129, 0, 5000, 64), _BF16, tail=33),
    DecodeCheck((129, 0, 5000, 64), _BF16, "int8", tail=33),
    DecodeCheck((129, 0, 5000, 64), _BF16, "int4", tail=33),
    DecodeCheck((111, 70), _BF16, q_len=20, tail=29, softcap=20.0),
    DecodeCheck((111, 70), _BF16, "int4", q_len=20, tail=29),
    DecodeCheck((3, 0, 129, 64), _BF16, batch_size=2, head_dim=96, tail=1),
    DecodeCheck((0, 0), _BF16),
    DecodeCheck((0, 0), _BF16, tail=5),
)
REPLAY_CHECKS = (
    ReplayCheck(_BF16),
    ReplayCheck(_BF16, "logit"),
    ReplayCheck(_BF16, local=False),
    ReplayCheck(_BF16, "sum_of_squares", weighted=True),
    ReplayCheck(_BF16, softcap=20.0),
    ReplayCheck(_BF16, window=200, local=False),
    ReplayCheck(_BF16, "logit", window=150),
    ReplayCheck(_BF16, anchor=0, start=0, end=300, q_len=1),
    ReplayCheck(_F16, "sum", group=1, head_dim=64),
    ReplayCheck(_F32, group=3, head_dim=64),
    ReplayCheck(_F32, "logit", group=3, head_dim=64, weighted=True),
)


def check_device(device: torch.device, backend: str, stage: Callable[[str], Any]) -> dict[str, float]:
    """
    Compare decode and replay with the torch form in float64, all on ``device``.

    Parameters
    ----------
    device : torch.device
        Where the kernels run.
    backend : str
        Kernel backend.
    stage : callable
        Told what is compared.

    Returns
    -------
    dict[str, float]
        The largest error by type, see :func:`~kvzip_press.kernels.bench.verify.row_error`.

    Raises
    ------
    WrongOutputError
        If one is wrong; the message names it.
    """
    errors: dict[str, float] = {}
    for check in (*DECODE_CHECKS, *REPLAY_CHECKS):
        stage(f"checking {check}")
        error = (
            _check_decode(check, device, backend)
            if isinstance(check, DecodeCheck)
            else _check_replay(check, device, backend)
        )
        name = dtype_name(check.dtype)
        errors[name] = max(errors.get(name, 0.0), error)
    return errors


def _check_decode(check: DecodeCheck, device: torch.device, backend: str) -> float:
    segments = Segments.from_lengths(torch.tensor(check.lengths))
    num_kv_heads = len(segments) // check.batch_size
    head_dim, dtype = check.head_dim, check.dtype

    def states(*shape: int, seed: int) -> torch.Tensor:
        return randn(shape, dtype, device, seed)

    query = states(check.batch_size, num_kv_heads * check.group, check.q_len, head_dim, seed=1)
    plain_key, plain_value = states(segments.total, head_dim, seed=2), states(segments.total, head_dim, seed=3)
    key: PackedKeys = plain_key
    value: PackedValues = plain_value
    if check.storage:
        bits = _BITS[check.storage]
        key, value = quantize_keys(plain_key, segments, bits), quantize_values(plain_value, bits)
        plain_key, plain_value = key.dequantize(segments), value.dequantize()
    options: dict[str, Any] = {"softmax_scale": head_dim**-0.5, "softcap": check.softcap}
    tail, mask = None, None
    if check.tail:
        sizes = (check.batch_size, num_kv_heads, check.tail, head_dim)
        tail = states(*sizes, seed=4), states(*sizes, seed=5)
        if check.q_len > 1:
            mask = torch.ones(check.q_len, check.tail, dtype=torch.bool, device=device)
            mask = mask.tril(check.tail - check.q_len)[None, None]
    results = decode_attention(query, key, value, segments, tail=tail, tail_mask=mask, backend=backend, **options)
    wide = None if tail is None else (tail[0].double(), tail[1].double())
    exact = (query.double(), plain_key.double(), plain_value.double())
    out, lse = decode_attention(*exact, segments, tail=wide, tail_mask=mask, backend="torch", **options)
    return verify_results(str(check), results, {"the output": out, LSE: lse}, dtype)


def _check_replay(check: ReplayCheck, device: torch.device, backend: str) -> float:
    num_kv_heads, batch_size = 2, 2

    def states(heads: int, tokens: int, seed: int) -> torch.Tensor:
        return randn((batch_size, heads, tokens, check.head_dim), check.dtype, device, seed)

    query = states(num_kv_heads * check.group, check.q_len, 1)
    own_key, own_value = states(num_kv_heads, check.q_len, 2), states(num_kv_heads, check.q_len, 3)
    context_key, context_value = states(num_kv_heads, check.context, 4), states(num_kv_heads, check.context, 5)
    options: dict[str, Any] = {"anchor": check.anchor, "start": check.start, "end": check.end}
    options |= {"softmax_scale": check.head_dim**-0.5, "softcap": check.softcap, "window": check.window}
    options["reduction"] = check.reduction
    if check.weighted:
        columns = (batch_size, num_kv_heads, check.group, check.end - check.start)
        options["row_weight"] = randn((batch_size, check.q_len), torch.float32, device, 6).abs()
        options["column_weight"] = randn(columns, torch.float32, device, 7).abs()
    everything = (query, own_key, own_value, context_key, context_value)
    out, scores = replay_attention(*everything, local=check.local, backend=backend, **options)
    alone = replay_scores(query, own_key, context_key, backend=backend, **options)
    wide = [part.double() for part in everything]
    right_out, right = replay_attention(*wide, local=check.local, backend="torch", **options)
    expected = {"the output": right_out, "the scores": right, "the scores without output": right}
    return verify_results(str(check), (out, scores, alone), expected, check.dtype)
