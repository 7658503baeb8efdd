"""A decoder layer of Llama-3.1-8B's shape in a replay: what the cost of scoring is a share of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ..api import replay_attention
from .case import Shape, Variant, randn, replay_backend

if TYPE_CHECKING:
    from .scores import ReplayInput

NAME = "replay layer"
_INTERMEDIATE = 3.5  # sizes of the hidden states
_ATTENTION = "kvzip_press_bench_replay"


def replay_layer(shape: Shape, data: ReplayInput, backend: str) -> Variant:
    """
    A layer of random weights over as many hidden states as tokens are replayed.

    Its attention is :func:`~kvzip_press.kernels.api.replay_attention` over the context of ``data``, so that what is
    timed scores as well.

    Parameters
    ----------
    shape : Shape
        Its hidden size is ``num_heads * head_dim``.
    data : ReplayInput
        Context and columns; type and device of the weights.
    backend : str
        Kernel backend.
    """
    from transformers import AttentionInterface, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    query = data.query
    hidden_size, q_len = shape.num_heads * shape.head_dim, query.shape[2]
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=int(_INTERMEDIATE * hidden_size),
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1 << 17,
        attn_implementation=_ATTENTION,
    )
    AttentionInterface.register(_ATTENTION, _attention)
    torch.manual_seed(0)
    with torch.device(query.device):
        layer = LlamaDecoderLayer(config, layer_idx=0).to(query.dtype).eval()
        rotary = LlamaRotaryEmbedding(config)
    hidden = randn((1, q_len, hidden_size), query.dtype, query.device, seed=6)
    first = data.context_key.shape[2]
    positions = torch.arange(first, first + q_len, device=query.device).unsqueeze(0)

    def forward(module: Any, states: torch.Tensor, replay: Callable) -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = module(states, position_embeddings=rotary(states, positions), replay=replay)
        return output

    context = (data.context_key, data.context_value)
    replay = _replay(context, {**data.options, "backend": backend})

    @cache
    def expected() -> dict[str, torch.Tensor]:
        wide = tuple(states.float() for states in context)
        right = _replay(wide, {**data.options, "backend": "torch"})
        return {"the hidden states": forward(copy.deepcopy(layer).float(), hidden.float(), right)}

    return Variant(
        NAME, lambda: forward(layer, hidden, replay), backend=replay_backend(backend, query), expected=expected
    )


def _replay(context: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Callable:
    def replay(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out, _ = replay_attention(query, key, value, *context, local=True, reduction="max", **options)
        return out

    return replay


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    replay: Callable,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers' registry: ``replay`` comes with the call of the layer."""
    return replay(query, key, value).to(query.dtype).transpose(1, 2).contiguous(), None
