"""KVzip for kvpress: query-agnostic KV cache compression with real eviction."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .cache.measure import cache_nbytes, is_compressed, kept_fraction
    from .context import Answer, CompressedContext
    from .head_scores import HeadScores
    from .press import KVzipPress
    from .pretrained.load import load_model
    from .prompts import PROMPTS, ReplayPrompts

# In a checkout `kernels/` and `eval/` stand beside this folder, where an import from its root would not find them
_CHECKOUT = Path(__file__).parent.parent
if (_CHECKOUT / "kernels").is_dir() and (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT))

# Name -> module. Loaded on first use: torch, transformers and kvpress take seconds to import
_EXPORTS = {
    "Answer": "context",
    "CompressedContext": "context",
    "HeadScores": "head_scores",
    "KVzipPress": "press",
    "PROMPTS": "prompts",
    "ReplayPrompts": "prompts",
    "cache_nbytes": "cache.measure",
    "is_compressed": "cache.measure",
    "kept_fraction": "cache.measure",
    "load_model": "pretrained.load",
}

__all__ = [
    "PROMPTS",
    "Answer",
    "CompressedContext",
    "HeadScores",
    "KVzipPress",
    "ReplayPrompts",
    "__version__",
    "cache_nbytes",
    "is_compressed",
    "kept_fraction",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
