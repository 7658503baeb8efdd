"""
Running a replay: the model repeats its context from the cache, and each pair of the context is scored.

The scored layers of the replay's cache compute their attention themselves: one softmax gives the output and the scores
of the chunk that is repeated. Hooks on the attention modules, which live as long as the replay, collect those scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from .kernels.api import ReplayOptions, replay_attention
from .models import ModelLayout, reachable_columns
from .replay_plan import ReplayPass, RowContext
from .routing import RoutedTensor
from .scoring import Scorer


class _ReplayLayer(DynamicLayer):
    """A layer of the replay's cache: the context of one row, to which nothing is added."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, context_length: int) -> None:
        self.keys, self.values = keys, values
        self.context_length = context_length
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.context_length


class _SlidingLayer(_ReplayLayer):
    """The sliding layer of a hybrid model: seen by position, not scored."""

    is_sliding = True

    def get_mask_sizes(self, cache_position: torch.Tensor) -> tuple[int, int]:
        held = self.keys.shape[2]
        return held + cache_position.shape[0], self.context_length - held

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)


class _ScoredLayer(_ReplayLayer):
    """
    Replayed tokens see the context, score it, and leave no trace.

    Only the columns held by the cache are scored: a sliding layer may have dropped the first ones.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        context_length: int,
        window: int | None,
        scorer: Scorer,
        local: bool,
        backend: str,
    ) -> None:
        super().__init__(keys, values, context_length)
        self.is_sliding = window is not None
        self.window, self.scorer, self.local, self.backend = window, scorer, local, backend
        self.scores = torch.full(keys.shape[:3], -torch.inf, dtype=torch.float32, device=keys.device)
        self.chunk_scores: torch.Tensor | None = None
        self.weights: dict[str, Any] = {}

    def begin_pass(self, protected: int, scored: tuple[int, int]) -> None:
        """Turn to the next chunk."""
        first = self.context_length - self.keys.shape[2]
        self.anchor, self.start, self.end = (max(0, column - first) for column in (protected, *scored))

    def get_mask_sizes(self, cache_position: torch.Tensor) -> tuple[int, int]:
        return cache_position.shape[0], self.context_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return RoutedTensor.wrap(key_states, self), RoutedTensor.wrap(value_states, self)

    def weigh(self, module: nn.Module, hidden_states: torch.Tensor) -> None:
        """Note what the scorer multiplies attention weights by, before the attention of a pass."""
        self.weights = self.scorer.weights(module, hidden_states, self.values[:, :, self.start : self.end])

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **scaling: Any
    ) -> torch.Tensor:
        """Attention of the replayed tokens; the scores of the chunk are left for the forward hook."""
        options = ReplayOptions(
            anchor=self.anchor,
            start=self.start,
            end=self.end,
            local=self.local,
            window=self.window,
            reduction=self.scorer.reduction,
            **self.weights,
            **scaling,
        )
        out, self.chunk_scores = replay_attention(
            query, key, value, self.keys, self.values, options, backend=self.backend
        )
        return out.to(query.dtype)


class ReplayCache(Cache):
    """The cache of one replay: the context of one row, and the scores that its pairs have got so far."""

    layers: list[_ReplayLayer]  # type: ignore[assignment]

    @property
    def scored(self) -> list[_ScoredLayer]:
        """The layers whose pairs are scored."""
        return [layer for layer in self.layers if isinstance(layer, _ScoredLayer)]

    def collect(self, layer_idx: int) -> None:
        """Keep the scores that the attention of a layer has just computed."""
        layer = self.layers[layer_idx]
        assert isinstance(layer, _ScoredLayer) and layer.chunk_scores is not None
        layer.scores[:, :, layer.start : layer.end] = layer.chunk_scores
        layer.chunk_scores = None


def find_replay(args: Iterable[Any], kwargs: dict[str, Any]) -> ReplayCache | None:
    """The replay that a module is called in, by the cache among its arguments; None if it is called in no replay."""
    return next((value for value in (*kwargs.values(), *args) if isinstance(value, ReplayCache)), None)


@contextmanager
def _hooked(layout: ModelLayout, replay: ReplayCache, forward_hook: Callable) -> Iterator[None]:
    """
    Hooks on the attention of the scored layers, for this replay alone: other threads may run the same modules.

    While a hook is put on or taken off, torch may call it in such a thread without the keyword arguments.
    """

    def before(module: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is not None and find_replay(args, kwargs) is replay:
            layer = replay.layers[module.layer_idx]
            assert isinstance(layer, _ScoredLayer)
            layer.weigh(module, args[0] if args else kwargs["hidden_states"])

    def after(module: nn.Module, args: tuple, *rest: Any) -> Any:
        if len(rest) == 2 and find_replay(args, rest[0]) is replay:
            return forward_hook(module, args, *rest)
        return None

    handles = []
    try:
        for module in (layout.attention[index] for index in layout.evicted):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _rotary_state_kept(decoder: nn.Module) -> Iterator[None]:
    """
    Restore the rotary embeddings afterwards.

    Replayed tokens stand behind the context. Where that is past the model's window, rotary embeddings of the dynamic
    kinds rescale themselves, and would stay so.
    """
    modules = [module for module in decoder.modules() if "inv_freq" in module._buffers]
    saved = [(dict(vars(module)), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, (attributes, buffers) in zip(modules, saved, strict=True):
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def _fed_inputs(decoder: nn.Module, context: RowContext, step: ReplayPass, device: torch.device) -> dict[str, Any]:
    prompt = torch.tensor([step.prompt], dtype=torch.long, device=device)
    if context.inputs_embeds is not None:
        chunk = context.inputs_embeds[None, slice(*step.fed)].to(device)
        prompt_embeds = decoder.get_input_embeddings()(prompt)  # type: ignore[operator]
        return {"inputs_embeds": torch.cat([prompt_embeds, chunk], dim=1)}
    assert context.input_ids is not None
    chunk = torch.tensor([context.input_ids[slice(*step.fed)]], dtype=torch.long, device=device)
    return {"input_ids": torch.cat([prompt, chunk], dim=1)}


def replay_row(
    layout: ModelLayout,
    cache: Cache,
    context: RowContext,
    passes: list[ReplayPass],
    forward_hook: Callable,
    *,
    scorer: Scorer,
    local: bool,
    backend: str,
    progress: bool,
) -> torch.Tensor:
    """
    Replay one row and score its pairs.

    Replayed tokens never enter the caller's cache, no logits are computed, and the cached context is read in place.
    Their position ids continue after the context, in local replay too.

    ``forward_hook`` is called after the attention of each scored layer in each pass, as a hook of ``nn.Module`` with
    keyword arguments, and has the scores collected (:meth:`ReplayCache.collect`). The options are those of
    :class:`kvzip_press.KVzipPress`.

    Returns
    -------
    torch.Tensor
        Scores (num_evicted_layers, num_kv_heads, held), float32, for the last columns of the row, those that later
        tokens can see; ``-inf`` where no pass scored.
    """
    rows: list[_ReplayLayer] = []
    for index, (layer, window) in enumerate(zip(cache.layers, layout.windows, strict=True)):
        assert layer.keys is not None and layer.values is not None
        held = min(reachable_columns(layer.keys.shape[2], window), context.num_tokens)
        columns = slice(context.row, context.row + 1), slice(None), slice(layer.keys.shape[2] - held, None)
        states = layer.keys[columns], layer.values[columns], context.num_tokens
        scored = index in layout.evicted
        rows.append(_ScoredLayer(*states, window, scorer, local, backend) if scored else _SlidingLayer(*states))
    replay = ReplayCache(layers=rows)
    device = rows[0].keys.device
    with _hooked(layout, replay, forward_hook), _rotary_state_kept(layout.decoder):
        for step in tqdm(passes, desc="replay", unit="chunk", disable=not progress, leave=False):
            for layer in replay.scored:
                layer.begin_pass(context.protected, step.scored)
            inputs = _fed_inputs(layout.decoder, context, step, device)
            steps = torch.arange(next(iter(inputs.values())).shape[1], device=device)
            layout.decoder(
                **inputs,
                position_ids=(steps + context.next_position).unsqueeze(0),
                cache_position=steps + context.num_tokens,
                past_key_values=replay,
                use_cache=True,
            )
    if any(layer.chunk_scores is not None for layer in replay.scored):
        raise RuntimeError(
            "forward_hook did not collect the scores of the replay; have it call KVzipPress.forward_hook"
        )
    # Layers may live on several devices
    return torch.cat([layer.scores.to(device) for layer in replay.scored])
