"""The one place where transformers' attention is routed to ragged and replay layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Features of some attention functions that a routed layer does not compute: silently dropping them would be wrong
_UNSUPPORTED = ("s_aux", "position_bias", "head_mask")


class AttentionLayer(Protocol):
    """A cache layer that computes the attention over what it holds."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **scaling: Any
    ) -> torch.Tensor:
        """
        Attention output, shape and dtype of ``query`` (batch_size, num_heads, q_len, head_dim).

        ``scaling`` are ``softmax_scale`` and ``softcap``, as the kernels take them.
        """
        ...


class RoutedTensor(torch.Tensor):
    """
    Keys or values that belong to a layer which must compute the attention itself.

    Only its shape, dtype and device can be read. Any other operation raises: an attention function that is not routed
    (``eager``, or a function of the model's own) would otherwise silently ignore the compressed context.
    """

    layer: AttentionLayer

    @classmethod
    def wrap(cls, tensor: torch.Tensor, layer: AttentionLayer) -> RoutedTensor:
        """View ``tensor`` as routed to ``layer``."""
        routed: RoutedTensor = tensor.as_subclass(cls)
        routed.layer = layer
        return routed

    def unwrap(self) -> torch.Tensor:
        """The plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _READABLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            "this attention implementation can't read a compressed KV cache; call "
            "model.set_attn_implementation('sdpa') (or 'flash_attention_2') and run again"
        )


_READABLE = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.__len__,
}


class _NoGradient(torch.autograd.Function):
    """The output of a compressed cache, with a backward that raises: keys and values of the past are detached."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError("a compressed KV cache gives no gradients; train with an uncompressed cache")


def _route(function: Callable) -> Callable:
    @functools.wraps(function)
    def routed(
        module: Any, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(key, RoutedTensor):
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
        if unsupported:
            raise NotImplementedError(f"a compressed KV cache does not support attention with {', '.join(unsupported)}")
        if kwargs.get("dropout") or (args and args[0]):
            raise NotImplementedError("a compressed KV cache does not support attention dropout: call model.eval()")
        scaling = kwargs.get("scaling")
        output = key.layer.attend(
            query.detach(),
            key.unwrap(),
            value.unwrap() if isinstance(value, RoutedTensor) else value,
            attention_mask,
            softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=kwargs.get("softcap"),
        )
        if query.requires_grad and torch.is_grad_enabled():
            output = _NoGradient.apply(query, output)
        return output.transpose(1, 2).contiguous(), None

    routed.kvzip_press_routed = True  # type: ignore[attr-defined]
    return routed


def install_routing() -> None:
    """
    Wrap every registered attention function that is not wrapped yet.

    The wrapper passes every tensor that is not a :class:`RoutedTensor` through untouched, holds no state, and is
    idempotent. Called whenever a press is entered or a ragged layer is built, so that functions registered later, or
    wrapped by another package after us, are routed too.
    """
    for name, function in list(ALL_ATTENTION_FUNCTIONS.items()):
        if not getattr(function, "kvzip_press_routed", False):
            ALL_ATTENTION_FUNCTIONS[name] = _route(function)


def check_attention_implementation(implementation: str | None) -> None:
    """
    Refuse, before any work, an attention implementation that can't be routed.

    These are ``eager`` (each model file has its own), ``flex_attention`` (its block masks describe dense keys), paged
    variants, and names that are not registered.
    """
    name = implementation or ""
    routable = name in ALL_ATTENTION_FUNCTIONS and name != "flex_attention" and not name.startswith("paged")
    if not routable:
        raise ValueError(
            f"attention implementation {implementation!r} can't read a compressed KV cache; "
            "call model.set_attn_implementation('sdpa') (or 'flash_attention_2') first"
        )
