"""Kernels against float64 on small odd shapes of the device, before anything is timed."""

from __future__ import annotations

from typing import Any

import torch
from tqdm import tqdm

from ..api import ReplayOptions, decode_attention, replay_attention
from ..backends import dtype_name
from ..storage.quantization import quantize_keys, quantize_values
from ..storage.segments import Segments
from .case import LSE, Shape, randn
from .measure import verify
from .scores import States, replay_states

_UNEVEN, _LONG = (0, 1, 63, 700), (129, 0, 5000, 64)  # pairs of each (row, KV head)
_F16, _F32 = torch.float16, torch.float32
DECODE_CHECKS: list[dict[str, Any]] = [
    *({"lengths": _UNEVEN, "bits": bits} for bits in (None, 8, 4)),
    *({"lengths": _UNEVEN, "dtype": dtype, "head_dim": 64, "group": 3} for dtype in (_F16, _F32)),
    *({"lengths": _LONG, "bits": bits, "tail": 33} for bits in (None, 8, 4)),
    {"lengths": (111, 70), "q_len": 20, "tail": 29, "softcap": 20.0},
    {"lengths": (111, 70), "bits": 4, "q_len": 20, "tail": 29},
    {"lengths": (3, 0, 129, 64), "batch_size": 2, "head_dim": 96, "tail": 1},
    *({"lengths": (0, 0), "tail": tail} for tail in (0, 5)),
]
REPLAY_CHECKS: list[dict[str, Any]] = [
    *({"local": local} for local in (True, False)),
    {"reduction": "logit"},
    {"reduction": "sum_of_squares", "weighted": True},
    {"softcap": 20.0},
    {"window": 200, "local": False},
    {"window": 150, "reduction": "logit"},
    {"anchor": 0, "start": 0, "end": 300, "q_len": 1},
    {"anchor": 0, "start": 0, "end": 0, "local": False},
    {"dtype": _F16, "reduction": "sum", "group": 1, "head_dim": 64},
    {"dtype": _F32, "group": 3, "head_dim": 64},
    {"dtype": _F32, "reduction": "logit", "group": 3, "head_dim": 64, "weighted": True},
]
Results = tuple[torch.Tensor, torch.Tensor]


def check_device(device: torch.device, backend: str) -> dict[str, float]:
    """Compare decode and replay with the torch form in float64, all on ``device``: the largest error by type."""
    checks = [(_decode, each) for each in DECODE_CHECKS] + [(_replay, each) for each in REPLAY_CHECKS]
    errors: dict[str, float] = {}
    for run, check in tqdm(checks, desc="small odd shapes", leave=False):
        check = {"dtype": torch.bfloat16, **check}
        named = ", ".join(f"{name} {value}" for name, value in check.items())
        results, expected = run(device, backend, **check)
        error = verify(f"{run.__name__[1:]} of {named}", results, expected, check["dtype"])
        dtype = dtype_name(check["dtype"])
        errors[dtype] = max(errors.get(dtype, 0.0), error)
    return errors


def _decode(
    device: torch.device,
    backend: str,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    bits: int | None = None,
    batch_size: int = 1,
    group: int = 4,
    q_len: int = 1,
    head_dim: int = 128,
    tail: int = 0,
    softcap: float | None = None,
) -> tuple[Results, dict[str, torch.Tensor]]:
    segments, num_kv_heads = Segments.from_lengths(torch.tensor(lengths)), len(lengths) // batch_size
    query = randn((batch_size, num_kv_heads * group, q_len, head_dim), dtype, device, seed=1)
    pairs = [randn((segments.total, head_dim), dtype, device, seed) for seed in (2, 3)]
    after = [randn((batch_size, num_kv_heads, tail, head_dim), dtype, device, seed) for seed in (4, 5) if tail]
    packed: Any = pairs
    if bits is not None:
        packed = quantize_keys(pairs[0], segments, bits), quantize_values(pairs[1], bits)
        pairs = [packed[0].dequantize(segments), packed[1].dequantize()]
    visible = torch.ones(q_len, tail, dtype=torch.bool, device=device).tril(tail - q_len)[None, None]
    options: Any = {"softmax_scale": head_dim**-0.5, "softcap": softcap, "tail_mask": visible if q_len > 1 else None}

    def attend(backend: str, query: torch.Tensor, key: Any, value: Any, *after: Any) -> Results:
        return decode_attention(query, key, value, segments, tail=after or None, backend=backend, **options)

    out, lse = attend("torch", *(states.double() for states in (query, *pairs, *after)))
    return attend(backend, query, *packed, *after), {"the output": out, LSE: lse}


def _replay(
    device: torch.device,
    backend: str,
    dtype: torch.dtype,
    q_len: int = 63,
    group: int = 4,
    head_dim: int = 128,
    weighted: bool = False,
    **asked: Any,
) -> tuple[Results, dict[str, torch.Tensor]]:
    states = replay_states(2, Shape(2, group, head_dim), q_len, 300, dtype, device)
    asked = {"anchor": 7, "start": 64, "end": 175, "local": True, "softmax_scale": head_dim**-0.5, **asked}
    if weighted:
        asked["row_weight"] = randn((2, q_len), torch.float32, device, 6).abs()
        asked["column_weight"] = randn((2, 2, group, asked["end"] - asked["start"]), torch.float32, device, 7).abs()
    options = ReplayOptions(**asked)
    out, scores = replay_attention(*States(*(part.double() for part in states)), options, backend="torch")
    return replay_attention(*states, options, backend=backend), {"the output": out, "the scores": scores}
