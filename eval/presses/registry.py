"""Presses to measure, by name: kvpress's as baselines, and those of kvzip-press."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

import kvpress
from kvpress.presses.duo_attention_press import PATTERNS_DICT
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ... import HeadScores, KVzipPress
from ...cache.eviction import QUANTIZATIONS
from ...scoring import SCORERS
from ...selection import HEAD_LEVEL, LEVELS

FULL = "full"
# A press and the fraction of the pairs that it keeps
Variant = tuple[str, float]
# Amounts and handles, which are no parameters of a method
_NOT_DESCRIBED = {"compression_ratio", "ratio", "budget", "tokenizer", "progress", "head_compression_ratio"}


@dataclass(frozen=True)
class PressKind:
    """A press under a name."""

    # given the kept fraction and the options of :func:`make_press`, the press; None compresses nothing
    make: Callable[..., kvpress.BasePress | None]
    about: str  # what it is, in a line
    eager: bool = False  # whether it needs attention weights, and so eager attention


def _theirs(press_class: type, about: str, *, eager: bool = False, **parameters: Any) -> PressKind:
    return PressKind(lambda ratio, **options: press_class(compression_ratio=1 - ratio, **parameters), about, eager)


def _adakv(press_class: type[kvpress.ScorerPress], about: str, **parameters: Any) -> PressKind:
    inner = _theirs(press_class, about, **parameters)
    return PressKind(lambda ratio, **options: kvpress.AdaKVPress(inner.make(ratio)), f"AdaKV with {about}")


def _ours(about: str, **parameters: Any) -> PressKind:
    def make(ratio: float, *, head_scores: HeadScores | None, **options: Any) -> kvpress.BasePress:
        if parameters.get("level") == HEAD_LEVEL:
            if head_scores is None:
                raise ValueError(
                    "kvzip-head needs head scores: give --head-scores FILE, made with `kvzip-press heads score`"
                )
            options["head_scores"] = head_scores
        return KVzipPress(ratio=ratio, **options, **parameters)

    return PressKind(make, about)


def _our_presses() -> dict[str, PressKind]:
    """Every scorer at every pair level, whole heads, and variants of the replay."""
    presses = {}
    for scorer in SCORERS:
        for level in LEVELS:
            if level != HEAD_LEVEL:
                short = scorer.removeprefix("kvzip").removeprefix("-")
                name = "-".join(part for part in ("kvzip", short, level) if part not in ("", "pair"))
                presses[name] = _ours(f"scorer {scorer}, level {level}, local replay", scorer=scorer, level=level)
    presses["kvzip-head"] = _ours("whole heads by --head-scores, without a replay", level=HEAD_LEVEL)
    for replay in ("full", "local"):
        for chunk_size in (2048, 512, 256):
            about = f"{replay} replay in chunks of {chunk_size}"
            paper = " (the paper)" if (replay, chunk_size) == ("full", 2048) else ""
            presses[f"kvzip-{replay}-{chunk_size}"] = _ours(about + paper, replay=replay, chunk_size=chunk_size)
    for quantization in QUANTIZATIONS:
        about = f"kept pairs stored in {quantization[3:]} bits a number"
        presses[f"kvzip-{quantization}"] = _ours(about, quantization=quantization)
    for part in ("first", "last", "prompt"):
        about = "replays the prompt alone" if part == "prompt" else f"replays the {part} tenth of the context"
        presses[f"kvzip-repeat-{part}"] = _ours(f"{about} (paper, section 6.1)", replay="full", repeat=part)
    return presses


SNAPKV: dict[str, Any] = {"window_size": 32, "kernel_size": 7}

# A press to compare with is a line here
PRESSES: dict[str, PressKind] = {
    FULL: PressKind(lambda ratio, **options: None, "the full cache"),
    **_our_presses(),
    "observed-attention": _theirs(kvpress.ObservedAttentionPress, "in H2O's place; eager attention", eager=True),
    "snapkv": _theirs(kvpress.SnapKVPress, "SnapKV, window 32, kernel 7", **SNAPKV),
    "pyramidkv": _theirs(kvpress.PyramidKVPress, "PyramidKV, window 32, kernel 7", **SNAPKV),
    "expected-attention": _theirs(kvpress.ExpectedAttentionPress, "ExpectedAttention"),
    "tova": _theirs(kvpress.TOVAPress, "TOVA"),
    "keydiff": _theirs(kvpress.KeyDiffPress, "KeyDiff"),
    "knorm": _theirs(kvpress.KnormPress, "Knorm"),
    "streaming-llm": _theirs(kvpress.StreamingLLMPress, "StreamingLLM: first and last tokens"),
    "random": _theirs(kvpress.RandomPress, "random pairs, seed 42", seed=42),
    "adakv-snapkv": _adakv(kvpress.SnapKVPress, "SnapKV, window 32, kernel 7", **SNAPKV),
    "adakv-expected-attention": _adakv(kvpress.ExpectedAttentionPress, "ExpectedAttention, epsilon 0.01", epsilon=0.01),
    "adakv-tova": _adakv(kvpress.TOVAPress, "TOVA"),
    "adakv-keydiff": _adakv(kvpress.KeyDiffPress, "KeyDiff"),
    "adakv-knorm": _adakv(kvpress.KnormPress, "Knorm"),
    "duo-attention": PressKind(
        lambda ratio, **options: kvpress.DuoAttentionPress(head_compression_ratio=1 - ratio),
        "DuoAttention; downloads the patterns of the models it knows",
    ),
    "kvpress-kvzip": _theirs(kvpress.KVzipPress, "kvpress's own KVzip"),
    "kvpress-kvzip-layerwise": _theirs(kvpress.KVzipPress, "kvpress's own KVzip, layer by layer", layerwise=True),
    "kvpress-kvzip-plus": _theirs(kvpress.KVzipPress, "kvpress's own KVzip+", kvzip_plus_normalization=True),
    "kvpress-kvgrad": _theirs(kvpress.KVgradPress, "kvpress's KVgrad"),
}


def make_press(
    name: str,
    ratio: float,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    head_scores: HeadScores | None = None,
    backend: str = "auto",
) -> kvpress.BasePress | None:
    """
    Make a press by its name in `PRESSES`, which keeps a fraction of the pairs; None for `full`.

    Presses load the tokenizer by the model's name where none is given, those of kvpress always. ValueError if there is
    no such press or ratio, or if it evicts whole heads and has no head scores.
    """
    check_name(name)
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be in (0, 1], got {ratio}")
    return PRESSES[name].make(ratio, tokenizer=tokenizer, head_scores=head_scores, backend=backend)


def is_ours(name: str) -> bool:
    """Whether a press is one of kvzip-press."""
    return name.startswith("kvzip")


def check_name(name: str) -> str:
    """Return the name if there is such a press, else raise ValueError with near names."""
    if name not in PRESSES:
        near = get_close_matches(name.lower(), PRESSES) or sorted(PRESSES)
        raise ValueError(f"unknown press {name!r}: did you mean {', '.join(near)}?")
    return name


def check_press(press: kvpress.BasePress | None, model: PreTrainedModel) -> None:
    """Refuse, before any work, a press that can't run on this model: ValueError with the remedy."""
    if isinstance(press, KVzipPress):
        press.compressor(model)
    if isinstance(press, kvpress.DuoAttentionPress) and model.config.name_or_path not in PATTERNS_DICT:
        raise ValueError(
            f"duo-attention has no pattern for the model {model.config.name_or_path!r}, only for "
            f"{', '.join(PATTERNS_DICT)}; leave it out"
        )


def press_parameters(press: kvpress.BasePress | None) -> dict[str, Any]:
    """All that decides what a press keeps, but for how much: class and parameters, inner press included, for JSON."""
    if press is None:
        return {}
    described: dict[str, Any] = {"class": type(press).__name__}
    assert is_dataclass(press)
    for field in fields(press):
        if field.init and field.name not in _NOT_DESCRIBED:
            described[field.name] = _plain(getattr(press, field.name))
    return described


def _plain(value: Any) -> Any:
    if isinstance(value, kvpress.BasePress):
        return press_parameters(value)
    if isinstance(value, HeadScores):
        return hashlib.sha256(value.scores.numpy().tobytes()).hexdigest()[:16]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def variants(names: Iterable[str], ratios: Iterable[float]) -> list[Variant]:
    """Each name with each ratio, `full` once with 1.0, in the order given."""
    pairs = [(name, ratio) for name in names for ratio in ([1.0] if name == FULL else ratios)]
    return list(dict.fromkeys(pairs))
