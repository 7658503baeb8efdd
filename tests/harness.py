"""What many tests do: make a press, prefill under it, ask, and look at what a cache holds."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from dense_reference import keep_masks
from tiny_models import build_tokenizer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, DynamicCache, PreTrainedModel

from kvzip_press import KVzipPress
from kvzip_press.cache.ragged import RaggedLayer
from kvzip_press.compressor import PrefilledContext

TOLERANCE = dict(atol=1e-4, rtol=1e-4)


def make_press(**parameters) -> KVzipPress:
    """A press with the tests' tokenizer and small chunks."""
    return KVzipPress(**{"tokenizer": build_tokenizer(), "chunk_size": 32, **parameters})


@torch.no_grad()
def prefill(
    model: PreTrainedModel, ids: torch.Tensor, press: KVzipPress | None = None, cache: Cache | None = None, **kwargs
) -> Cache:
    """Feed a context to a cache, a new one if none is given, under a press if there is one."""
    cache = DynamicCache() if cache is None else cache
    with nullcontext() if press is None else press(model):
        model.model(input_ids=ids, past_key_values=cache, **kwargs)
    return cache


@torch.no_grad()
def follow(model: PreTrainedModel, cache: Cache, question: torch.Tensor, steps: int = 0) -> torch.Tensor:
    """Logits of a question and of ``steps`` greedy tokens after it."""
    logits = [model(input_ids=question, past_key_values=cache).logits]
    for _ in range(steps):
        logits.append(model(input_ids=logits[-1][:, -1:].argmax(-1), past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


def ask(model: PreTrainedModel, cache: Cache, question: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """Logits of a question and of some greedy tokens after it, which then leave the cache."""
    length = cache.get_seq_length()
    logits = follow(model, cache, question, steps)
    cache.crop(length)
    return logits


def context_of(model: PreTrainedModel, ids: torch.Tensor) -> PrefilledContext:
    """One row of ids in a full cache, ready to be scored."""
    return PrefilledContext(prefill(model, ids), ids, None, [0], [ids.shape[1]])


def scores_of(model: PreTrainedModel, ids: torch.Tensor, **parameters) -> torch.Tensor:
    """Scores of one row of ids, under a press of the tests."""
    return make_press(**parameters).compressor(model).score(context_of(model, ids))[0]


def generated(model: PreTrainedModel, ids: torch.Tensor, press: KVzipPress | None = None, **options) -> torch.Tensor:
    """The whole sequences of a greedy generate, under a press if there is one."""
    options = {"max_new_tokens": 8, "eos_token_id": None, **options}
    with nullcontext() if press is None else press(model):
        return model.generate(ids, do_sample=False, **options)


def packed_states(cache: Cache) -> list[torch.Tensor]:
    """Copies of everything the ragged layers hold of their context."""
    return [t.clone() for layer in ragged(cache) for t in (layer.packed_keys, layer.packed_values, layer.cu_seqlens)]


def ragged(cache: Cache) -> list[RaggedLayer]:
    """The layers that are evicted."""
    return [layer for layer in cache.layers if isinstance(layer, RaggedLayer)]


def pad(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of rows of ids (1, n), padded on the left to the length of the first, and its mask."""
    width = rows[0].shape[1]
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    return ids, torch.stack([torch.arange(width) >= width - row.shape[1] for row in rows]).long()


def all_equal(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))


def kept_positions(full: Cache, compressed: Cache, row: int = 0) -> list[list[set[int]]]:
    """Which positions each layer and head of a compressed cache kept, found by their keys in the full cache."""
    masks = keep_masks(full, compressed)
    return [[set(head.nonzero().flatten().tolist()) for head in masks[layer][row]] for layer in sorted(masks)]


class Operations(TorchDispatchMode):
    """Collects the names of the operations that run."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name.split("::")[1])
        return function(*args, **(kwargs or {}))


@contextmanager
def counted_calls(module: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Collect the output shape of every forward of a module, e.g. of ``model.lm_head``; ``()`` if it is no tensor."""
    shapes: list[tuple[int, ...]] = []

    def record(module, args, output):
        shapes.append(tuple(output.shape) if isinstance(output, torch.Tensor) else ())

    handle = module.register_forward_hook(record)
    try:
        yield shapes
    finally:
        handle.remove()


@contextmanager
def refused(model: PreTrainedModel, message: str) -> Iterator[None]:
    """Expect a ValueError with this message, before the model reads any token."""
    with counted_calls(model.get_input_embeddings()) as forwards, pytest.raises(ValueError, match=message):
        yield
    assert forwards == []
