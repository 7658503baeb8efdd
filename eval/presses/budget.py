"""
Let all presses keep equally many KV pairs, though they count their budget in different ways, and count what they kept.

kvzip-press takes its ratio of the pairs behind the chat's first tokens, which stay; kvpress's presses take theirs of
all pairs, or layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import kvpress
import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from ... import KVzipPress
from ...models import ModelLayout
from ...prompts import PROMPTS, encode_prompts

# The default of kvpress's KVzipPress too
N_SINK = KVzipPress.n_sink
# Where kvpress's attention patch looks for the pairs to hide
MASK = "masked_key_indices"


def kept_target(context_length: int, protected_length: int, n_heads: int, ratio: float) -> int:
    """Pairs that kvzip-press keeps: those of the protected tokens, and the fraction `ratio` of all behind them."""
    return n_heads * protected_length + round(ratio * n_heads * (context_length - protected_length))


def ratio_removing(n_removed: int, n: int) -> float:
    """The `compression_ratio` with `int(n * compression_ratio) == n_removed`, as kvpress's KVzip counts."""
    _check_removed(n_removed, n)
    return (n_removed + 0.5) / n if n_removed else 0.0


def ratio_keeping(n_kept: int, n: int) -> float:
    """The `compression_ratio` with `int(n * (1 - compression_ratio)) == n_kept`, as kvpress's scorer presses count."""
    _check_removed(n - n_kept, n)
    return (n - n_kept - 0.5) / n if n_kept < n else 0.0


def _check_removed(n_removed: int, n: int) -> None:
    if not 0 <= n_removed < n:
        raise ValueError(f"0 to {n - 1} of {n} pairs can be removed, got {n_removed}: choose another ratio")


def fit_budget(
    press: kvpress.BasePress | None,
    ratio: float,
    context_length: int,
    protected_length: int,
    num_layers: int,
    num_heads: int,
) -> None:
    """
    Let a press of kvpress keep as many pairs as kvzip-press would keep of this context.

    Its `compression_ratio` is set. KVzip and KVgrad then keep exactly the same number of pairs; a press that gives each
    layer or each of its `num_heads` KV heads the same budget keeps the nearest number it can. Presses of kvzip-press
    are left as they are.
    """
    kept = kept_target(context_length, protected_length, num_layers * num_heads, ratio)
    if isinstance(press, kvpress.PyramidKVPress):
        # Its layers' budgets are rounded one by one around the mean
        press.compression_ratio = 1 - kept / (num_layers * num_heads * context_length)
    elif isinstance(press, kvpress.KVzipPress):
        layers = num_layers if press.layerwise else 1
        n = num_layers * num_heads * context_length // layers
        press.compression_ratio = ratio_removing(n - round(kept / layers), n)
    elif isinstance(press, (kvpress.ScorerPress, kvpress.AdaKVPress)):
        press.compression_ratio = ratio_keeping(round(kept / (num_layers * num_heads)), context_length)


def prefix_length(tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens before the user's text: those of the chat template; without one, the BOS token."""
    return len(encode_prompts(PROMPTS["default"], tokenizer).chat_prefix)


def protected_length(tokenizer: PreTrainedTokenizerBase) -> int:
    """First tokens of a context that kvzip-press keeps outside its budget: the prefix, but at least the sinks."""
    return max(prefix_length(tokenizer), N_SINK)


def masked_indices(model: PreTrainedModel) -> list[tuple[torch.Tensor, ...] | None]:
    """What kvpress's masking presses leave on each attention module: the pairs hidden from it, or None."""
    return [getattr(module, MASK, None) for module in ModelLayout.of(model).attention]


def set_masked_indices(model: PreTrainedModel, masks: Sequence[tuple[torch.Tensor, ...] | None]) -> None:
    """Put back what `masked_indices` returned, for the cache it belongs to."""
    for module, mask in zip(ModelLayout.of(model).attention, masks, strict=True):
        setattr(module, MASK, mask)


def kept_pairs(model: PreTrainedModel, cache: Cache, layers: Sequence[int] | None = None) -> int:
    """
    Count the pairs of a cache, in all or some layers, that attention can see, the prefix's included.

    The model must be in the state in which the press left it.
    """
    kept, masks = 0, masked_indices(model)
    for index in range(len(cache.layers)) if layers is None else layers:
        layer, mask = cache.layers[index], masks[index]
        if hasattr(layer, "head_lengths"):
            kept += int(layer.head_lengths.sum())
        else:
            kept += layer.keys.shape[:3].numel() - (0 if mask is None else len(mask[0]))
    return kept
