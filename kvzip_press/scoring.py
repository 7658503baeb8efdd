"""Scorers: which reduction and weights make a score; the reduction itself runs inside the attention of the replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Scorer:
    """A score of context pairs."""

    reduction: str  # Over the query heads of the group and all replayed tokens: one of `kernels.api.REDUCTIONS`
    normalized: bool = False  # Weight each pair by ||W_O v|| and each replayed token by 1 / ||h||

    def weights(self, module: nn.Module, hidden_states: torch.Tensor, values: torch.Tensor) -> dict[str, Any]:
        """
        Weights of replayed tokens and of context pairs, as the options of a replay name them.

        ``hidden_states`` (batch_size, q_len, hidden_size) are what the attention ``module`` is about to see, ``values``
        (batch_size, num_kv_heads, n, head_dim) those of the scored pairs.
        """
        if not self.normalized:
            return {}
        return {"row_weight": inverse_hidden_norm(hidden_states), "column_weight": value_output_norm(module, values)}


SCORERS = {
    # arXiv 2505.23416, equation 2
    "kvzip": Scorer("max"),
    # kvpress's `kvzip_plus_normalization`
    "kvzip-plus": Scorer("max", normalized=True),
    # arXiv 2505.23416, appendix: softmax-free variant
    "logit": Scorer("logit"),
    # Between the maximum, which finds needles, and the sum, which keeps what is always attended
    "l2": Scorer("sum_of_squares"),
}


def value_output_norm(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """
    ``||W_O v||``: magnitude of what each pair writes into the residual stream, by query head.

    Of values (batch_size, num_kv_heads, n, head_dim), by the module's ``o_proj``: (batch_size, num_kv_heads, group, n),
    float32. A module whose output projection has no floating-point weight (quantised models) is refused.
    """
    weight = getattr(getattr(module, "o_proj", None), "weight", None)
    if weight is None or not weight.is_floating_point():
        raise ValueError("scorer 'kvzip-plus' needs a floating-point o_proj.weight; use scorer='kvzip'")
    num_kv_heads, head_dim = values.shape[1], values.shape[-1]
    per_head = weight.float().view(weight.shape[0], num_kv_heads, -1, head_dim)  # [hidden, kv_head, group, head_dim]
    # ||W v||^2 = v^T (W^T W) v: the Gram matrix is head_dim x head_dim, whatever the hidden size
    gram = torch.einsum("jhgd,jhge->hgde", per_head, per_head)
    values = values.float()
    projected = torch.einsum("bhnd,hgde->bhgne", values, gram)
    return torch.einsum("bhgne,bhne->bhgn", projected, values).clamp_min_(0).sqrt_()


def inverse_hidden_norm(hidden_states: torch.Tensor) -> torch.Tensor:
    """``1 / ||h||`` of each token, shape (batch_size, q_len), float32."""
    return hidden_states.float().norm(dim=-1).reciprocal()
