"""What differs between model families: where the layers are, and which of them attend globally."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvpress.presses.base_press import SUPPORTED_MODELS
from torch import nn
from transformers import Gemma3ForCausalLM, PreTrainedModel

logger = logging.getLogger(__name__)

TESTED_MODELS: tuple[type[PreTrainedModel], ...] = (*SUPPORTED_MODELS, Gemma3ForCausalLM)


@lru_cache(maxsize=64)
def _warn_untested(class_name: str) -> None:
    names = ", ".join(tested.__name__ for tested in TESTED_MODELS)
    logger.warning("KVzipPress is not tested with %s; tested: %s", class_name, names)


def language_model(model: PreTrainedModel) -> Any:
    """
    The decoder that owns the layers and the KV cache: the text model of an image-text model, or the model itself.

    Raises
    ------
    ValueError
        If the model has no decoder layers with attention.
    """
    inner = getattr(model, "model", model)
    inner = getattr(inner, "language_model", inner)
    layers = getattr(inner, "layers", None)
    if layers is None or not all(hasattr(layer, "self_attn") for layer in layers):
        raise ValueError(
            f"{type(model).__name__} has no decoder layers with self-attention at model.layers; "
            "KVzip compresses decoder-only attention models"
        )
    if not isinstance(model, TESTED_MODELS):
        _warn_untested(type(model).__name__)
    return inner


def reachable_columns(held: int, window: int | None) -> int:
    """How many of a layer's ``held`` last context columns some later token can still see."""
    return held if window is None else min(held, window - 1)


@dataclass(frozen=True)
class ModelLayout:
    """Where a model's layers are and how they attend, resolved once for all that is done with it."""

    decoder: Any  # See `language_model`
    attention: list[nn.Module]  # The attention module of each layer
    windows: list[int | None]  # Sliding window of each layer in tokens, None where attention is global
    evicted: list[int]  # Layers whose pairs are scored and evicted
    num_kv_heads: int
    head_dim: int  # Channels of a key

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelLayout:
        """
        Resolve a model.

        In hybrid models the global layers are evicted: sliding layers are small already. A model whose layers all slide
        is evicted within its windows.

        Raises
        ------
        ValueError
            If it has no decoder layers with attention, or one that attends neither globally nor by a sliding window.
        """
        decoder = language_model(model)
        config = decoder.config
        window = getattr(config, "sliding_window", None)
        windows = [window] * config.num_hidden_layers
        if (types := getattr(config, "layer_types", None)) is not None:
            if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
                names = ", ".join(unknown)
                raise ValueError(f"layers of type {names} can't be compressed; only full and sliding attention")
            windows = [window if layer_type == "sliding_attention" else None for layer_type in types]
        return cls(
            decoder,
            attention=[layer.self_attn for layer in decoder.layers],
            windows=windows,
            evicted=[index for index, window in enumerate(windows) if window is None] or list(range(len(windows))),
            num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )
