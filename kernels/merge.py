"""Joining attention over disjoint sets of keys by their log-sum-exp."""

from __future__ import annotations

import torch


def merge_lse(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Merge two attention results over disjoint keys into the attention over their union.

    Parameters
    ----------
    out_a, out_b : torch.Tensor
        Normalised outputs, shape (..., head_dim).
    lse_a, lse_b : torch.Tensor
        Log-sum-exp of the scaled logits of each part, shape (...). ``-inf`` marks a part without keys; its output
        is ignored, whatever it holds.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        The merged output (zero where both parts are empty) and its log-sum-exp.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # -inf - -inf is NaN: rows without any key get weight 0 from both parts
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    weight_a = torch.exp(lse_a - finite).unsqueeze(-1)
    weight_b = torch.exp(lse_b - finite).unsqueeze(-1)
    out = torch.where(weight_a > 0, out_a * weight_a, 0.0) + torch.where(weight_b > 0, out_b * weight_b, 0.0)
    return out, lse
