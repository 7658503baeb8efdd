"""Greedy decoding from a cache, full or compressed, and how to leave that cache as it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import Cache, PreTrainedModel

from .cache.measure import is_compressed


def end_tokens(model: PreTrainedModel) -> set[int]:
    """Ids that end an answer."""
    ids = model.generation_config.eos_token_id
    return set(ids) if isinstance(ids, list) else {ids} - {None}


@contextmanager
def forgetting(cache: Cache) -> Iterator[None]:
    """Drop at the end of the block, however it ends, what was added to the cache within it."""
    # transformers replaces the tensors of its own layers instead of writing into them
    saved = None if is_compressed(cache) else [dict(vars(layer)) for layer in cache.layers]
    length = cache.get_seq_length()
    try:
        yield
    finally:
        if saved is None:
            cache.crop(length)
        else:
            del cache.layers[len(saved) :]
            for layer, attributes in zip(cache.layers, saved, strict=True):
                vars(layer).clear()
                vars(layer).update(attributes)


@torch.no_grad()
def greedy(
    model: PreTrainedModel,
    cache: Cache,
    input_ids: torch.Tensor,
    position: int,
    max_new_tokens: int,
    *,
    stop_at_first: bool = True,
) -> Iterator[int]:
    """
    Continue a text greedily, and yield each chosen token, an end token included.

    What is read and chosen stays in the cache, see :func:`forgetting`.

    Parameters
    ----------
    input_ids : torch.Tensor
        The text, shape (1, num_tokens).
    position : int
        Of its first token: the tokens of the context before any was evicted.
    stop_at_first : bool
        Whether an end token that comes first ends the answer.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    ends = end_tokens(model)
    ids = input_ids.to(model.device)
    for number in range(max_new_tokens):
        logits = read(model, cache, ids, position, logits_to_keep=1)
        position += ids.shape[1]
        ids = logits[:, -1:].argmax(dim=-1)
        token = int(ids)
        yield token
        if token in ends and (number or stop_at_first):
            return


@torch.no_grad()
def read(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, position: int, logits_to_keep: int = 0
) -> torch.Tensor:
    """Logits, shape (1, num_kept, vocab_size), of tokens fed at a position, which a shortened cache does not tell."""
    positions = torch.arange(position, position + ids.shape[1], device=ids.device).unsqueeze(0)
    logits: torch.Tensor = model(
        input_ids=ids, past_key_values=cache, position_ids=positions, logits_to_keep=logits_to_keep
    ).logits
    return logits


def device_time(device: torch.device) -> float:
    """Seconds of a clock, read when the device has done all it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
