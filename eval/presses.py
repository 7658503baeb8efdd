"""Presses to measure, by name: kvpress's as baselines, and those of kvzip-press."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import kvpress
from transformers import PreTrainedTokenizerBase

PressFactory = Callable[[float, PreTrainedTokenizerBase], kvpress.BasePress | None]


def _scorer(press_class: type[kvpress.ScorerPress], **options: Any) -> PressFactory:
    return lambda ratio, tokenizer: press_class(compression_ratio=1 - ratio, **options)


def _adakv(press_class: type[kvpress.ScorerPress], **options: Any) -> PressFactory:
    return lambda ratio, tokenizer: kvpress.AdaKVPress(press_class(compression_ratio=1 - ratio, **options))


def _theirs(press_class: type[kvpress.KVzipPress], **options: Any) -> PressFactory:
    return lambda ratio, tokenizer: press_class(compression_ratio=1 - ratio, **options)


def _ours(**options: Any) -> PressFactory:
    def make(ratio: float, tokenizer: PreTrainedTokenizerBase) -> kvpress.BasePress:
        from kvzip_press import KVzipPress

        return KVzipPress(ratio=ratio, tokenizer=tokenizer, **options)

    return make


SNAPKV = {"window_size": 32, "kernel_size": 7}

PRESSES: dict[str, PressFactory] = {
    "full": lambda ratio, tokenizer: None,
    "knorm": _scorer(kvpress.KnormPress),
    "snapkv": _scorer(kvpress.SnapKVPress, **SNAPKV),
    "adakv-snapkv": _adakv(kvpress.SnapKVPress, **SNAPKV),
    "expected-attention": _scorer(kvpress.ExpectedAttentionPress),
    "adakv-expected-attention": _adakv(kvpress.ExpectedAttentionPress, epsilon=1e-2),
    "kvpress-kvzip": _theirs(kvpress.KVzipPress),
    "kvpress-kvzip-layerwise": _theirs(kvpress.KVzipPress, layerwise=True),
    "kvpress-kvzip-plus": _theirs(kvpress.KVzipPress, kvzip_plus_normalization=True),
    "kvpress-kvgrad": _theirs(kvpress.KVgradPress),
    "kvzip": _ours(),
    "kvzip-full-2048": _ours(replay="full", chunk_size=2048),
    "kvzip-full-512": _ours(replay="full", chunk_size=512),
    "kvzip-full-256": _ours(replay="full", chunk_size=256),
    "kvzip-local-2048": _ours(replay="local", chunk_size=2048),
    "kvzip-local-512": _ours(replay="local", chunk_size=512),
    "kvzip-local-256": _ours(replay="local", chunk_size=256),
    "kvzip-l2": _ours(scorer="l2"),
    "kvzip-logit": _ours(scorer="logit"),
    "kvzip-plus": _ours(scorer="kvzip-plus"),
    "kvzip-pair-layer": _ours(level="pair-layer"),
    "kvzip-pair-uniform": _ours(level="pair-uniform"),
}


def make_press(name: str, ratio: float, tokenizer: PreTrainedTokenizerBase) -> kvpress.BasePress | None:
    """Make a press by its name.

    Parameters
    ----------
    name : str
        A name in `PRESSES`.
    ratio : float
        Kept fraction of the KV pairs.
    tokenizer : PreTrainedTokenizerBase
        The model's tokenizer. kvpress's own KVzip and KVgrad load theirs again from `model.config.name_or_path`.

    Returns
    -------
    kvpress.BasePress or None
        The press; None for `full`, which compresses nothing.
    """
    check_name(name)
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be in (0, 1], got {ratio}")
    return PRESSES[name](ratio, tokenizer)


def check_name(name: str) -> str:
    """Return the name if there is such a press, else raise ValueError with near names."""
    if name not in PRESSES:
        near = get_close_matches(name, PRESSES) or sorted(PRESSES)
        raise ValueError(f"unknown press {name!r}: did you mean {', '.join(near)}?")
    return name


def variants(names: list[str], ratios: list[float]) -> list[tuple[str, float]]:
    """Each name with each ratio, `full` once with 1.0, in the order given."""
    pairs = [(name, ratio) for name in names for ratio in ([1.0] if name == "full" else ratios)]
    return list(dict.fromkeys(pairs))
