"""Greedy answers from a cache, full or compressed, which afterwards is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from ...cache.measure import is_compressed
from ...models import attention_modules


@contextmanager
def forgetting(cache: Cache) -> Iterator[None]:
    """Drop at the end of the block what was added to the cache within it."""
    # transformers replaces the tensors of its own layers instead of writing into them
    saved = None if is_compressed(cache) else [dict(vars(layer)) for layer in cache.layers]
    length = cache.get_seq_length()
    try:
        yield
    finally:
        if saved is None:
            cache.crop(length)
        else:
            for layer, attributes in zip(cache.layers, saved, strict=True):
                vars(layer).clear()
                vars(layer).update(attributes)


@contextmanager
def masks_of_uneven_layers(model: PreTrainedModel, cache: Cache) -> Iterator[None]:
    """
    Cut the mask, which transformers sizes by the first layer, to each layer's own length.

    PyramidKV keeps fewer tokens in later layers; several tokens fed at once would not fit their mask otherwise.
    """
    lengths = {cache.get_seq_length(index) for index in range(len(cache.layers))}
    if len(lengths) == 1 or is_compressed(cache):
        yield
        return

    def cut(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 4:
            columns = cache.get_seq_length(module.layer_idx) + mask.shape[-2]  # type: ignore[arg-type]
            kwargs["attention_mask"] = mask[..., -columns:]
        return args, kwargs

    handles = [module.register_forward_pre_hook(cut, with_kwargs=True) for module in attention_modules(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def end_tokens(model: PreTrainedModel) -> set[int]:
    """Ids that end an answer."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        return set()
    return set(ids) if isinstance(ids, list) else {ids}


@torch.no_grad()
def greedy_answer(
    model: PreTrainedModel,
    cache: Cache,
    question_ids: torch.Tensor,
    context_length: int,
    max_new_tokens: int,
    *,
    stop_at_first: bool = True,
) -> list[int]:
    """
    Continue a question greedily; question and answer then leave the cache.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    cache : Cache
        Holds a context.
    question_ids : torch.Tensor
        Shape (1, num_question_tokens).
    context_length : int
        Tokens of the context before any was evicted: positions go on from there.
    max_new_tokens : int
        Longest answer.
    stop_at_first : bool
        Whether an end token as the first one ends the answer.

    Returns
    -------
    list[int]
        The answer's tokens, its end token included.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    ends = end_tokens(model)
    answer: list[int] = []
    ids, position = question_ids.to(model.device), context_length
    with forgetting(cache), masks_of_uneven_layers(model, cache):
        while len(answer) < max_new_tokens:
            positions = torch.arange(position, position + ids.shape[1], device=ids.device).unsqueeze(0)
            logits = model(input_ids=ids, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits
            position += ids.shape[1]
            ids = logits[:, -1:].argmax(dim=-1)
            answer.append(int(ids))
            if answer[-1] in ends and (stop_at_first or len(answer) > 1):
                break
    return answer
