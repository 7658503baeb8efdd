"""The kernel backends, a line each: what each takes, and which one ``auto`` chooses. Imported when they first run."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch

from .storage.quantization import VALUE_GROUP

logger = logging.getLogger(__name__)

_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_HALVES)
_ALL = (torch.float64, *_FLOATS)


@dataclass(frozen=True)
class Backend:
    """
    What a backend takes.

    Its kernels are in the modules of its name: ``decode/<name>.py`` with ``decode_attention(query, packed_key,
    packed_value, segments, *, softmax_scale, softcap, tail, tail_mask)`` and ``replay/<name>.py`` with
    ``replay_attention(query, own_key, own_value, context_key, context_value, options)``, given what
    :mod:`kvzip_press.kernels.api` has validated. The specification alone has both in ``reference.py``.
    """

    dtypes: tuple[torch.dtype, ...] = _FLOATS  # of queries and of packed pairs (quantised ones: of what was quantised)
    device: str | None = None  # type of the device; None for any
    capability: tuple[int, int] | None = None  # lowest compute capability of a GPU
    replays: bool = True  # whether there is a replay; a backend may only decode
    quantized: bool = True  # whether quantised pairs are read
    quantized_dims: Callable[[int], bool] | None = None  # which head sizes quantised pairs may have; None for any
    max_head_dim: int | None = None  # of keys and of values
    package: str | None = None  # what must be installed, and the extra of kvzip-press that installs it
    extra: str | None = None

    def unsupported(
        self, device: torch.device, dtypes: tuple[torch.dtype, ...], head_dim: int, quantized: bool = False
    ) -> str | None:
        """Why this backend can't take an input, None if it can; whether it is installed is another question."""
        interpreted = self.package == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        if self.device not in (None, device.type) and not (interpreted and device.type == "cpu"):
            place = {"cpu": "the CPU", "cuda": "CUDA GPUs"}[self.device]
            return f"runs on {place} only, got tensors on {device}"
        if not set(dtypes) <= set(self.dtypes):
            names = ", ".join(map(dtype_name, self.dtypes))
            return f"takes {names}, got {' and '.join(map(dtype_name, dict.fromkeys(dtypes)))}"
        if quantized and not self.quantized:
            return "reads no quantised keys and values"
        if quantized and self.quantized_dims is not None and not self.quantized_dims(head_dim):
            return f"reads no quantised keys and values of head_dim {head_dim}"
        if self.max_head_dim is not None and head_dim > self.max_head_dim:
            return f"takes a head_dim of at most {self.max_head_dim}, got {head_dim}"
        if self.capability is not None and device.type == "cuda":
            needed, found = self.capability, torch.cuda.get_device_capability(device)
            if found < needed:
                return "needs compute capability {}.{}, {} has {}.{}".format(*needed, device, *found)
        return None

    @property
    def installed(self) -> bool:
        """Whether the package it needs can be found."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


def dtype_name(dtype: torch.dtype) -> str:
    """Name without the module."""
    return str(dtype).removeprefix("torch.")


def _in_whole_words(head_dim: int) -> bool:
    """Whether both halves of a row of 4-bit codes are whole 16-bit words and whole value groups."""
    return head_dim % 4 == 0 and (head_dim % VALUE_GROUP != 0 or head_dim // VALUE_GROUP in (1, 2, 4))


REGISTRY = {
    "reference": Backend(_ALL),
    "torch": Backend(_ALL),
    "cpu": Backend(device="cpu"),
    "triton": Backend(
        device="cuda", capability=(8, 0), quantized_dims=_in_whole_words, max_head_dim=256, package="triton",
        extra="gpu",
    ),
    "flash": Backend(
        _HALVES, device="cuda", capability=(8, 0), replays=False, quantized=False, max_head_dim=256,
        package="flash_attn", extra="flash-attn",
    ),
}  # fmt: skip
BACKENDS = ("auto", *REGISTRY)
REPLAY_BACKENDS = ("auto", *(name for name, backend in REGISTRY.items() if backend.replays))
_FASTEST = {"cpu": "cpu", "cuda": "triton"}


def check_backend(backend: str) -> None:
    """Raise ``ValueError`` unless ``backend`` is one of :data:`BACKENDS`."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


@lru_cache(maxsize=64)
def _log_choice(choice: str, device: str, dtype: torch.dtype) -> None:
    logger.debug("backend 'auto' chose %r for %s on %s", choice, dtype_name(dtype), device)


def _choose(device: torch.device, dtypes: tuple[torch.dtype, ...], head_dim: int, quantized: bool) -> str:
    choice = _FASTEST.get(device.type, "torch")
    fits = REGISTRY[choice].installed and REGISTRY[choice].unsupported(device, dtypes, head_dim, quantized) is None
    # ROCm's devices are named cuda too
    if not fits or (choice == "triton" and torch.version.hip is not None):
        choice = "torch"
    _log_choice(choice, device.type, dtypes[0])
    return choice


def _module(
    operation: str,
    backend: str,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    head_dim: int,
    quantized: bool = False,
) -> ModuleType:
    check_backend(backend)
    name = _choose(device, dtypes, head_dim, quantized) if backend == "auto" else backend
    found = REGISTRY[name]
    reason = found.unsupported(device, dtypes, head_dim, quantized)
    if reason is not None:
        remedy = "" if backend == "auto" else "; use backend='auto' or 'torch'"
        raise ValueError(f"backend {backend!r} {reason}{remedy}")
    if found.package is not None:
        try:
            importlib.import_module(found.package)
        except ImportError as error:
            raise ImportError(
                f"backend {backend!r} needs {found.package}, which can't be imported ({error}); "
                f"run `pip install \"kvzip-press[{found.extra}]\"` or use backend='auto'"
            ) from error
    return importlib.import_module(".reference" if name == "reference" else f".{operation}.{name}", __package__)


@lru_cache(maxsize=256)
def decode_module(
    backend: str,
    device: torch.device,
    query_dtype: torch.dtype,
    packed_dtype: torch.dtype,
    head_dim: int,
    quantized: bool,
) -> ModuleType:
    """
    The module whose ``decode_attention`` runs such an input.

    Raises ``ValueError`` if there is no such backend, or the named one can't take such input, and ``ImportError`` if
    what the named one needs is not installed.
    """
    return _module("decode", backend, device, (query_dtype, packed_dtype), head_dim, quantized)


@lru_cache(maxsize=64)
def replay_module(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> ModuleType:
    """The module whose ``replay_attention`` runs such an input; see :func:`decode_module`."""
    if backend in REGISTRY and not REGISTRY[backend].replays:
        raise ValueError(f"backend {backend!r} only decodes; replay with one of {', '.join(REPLAY_BACKENDS)}")
    return _module("replay", backend, device, (dtype,), head_dim)
