"""What is fed in the replay and how: chunks and prompts, against the cache, without a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from .kernels.api import ReplayOptions, replay_attention
from .models import attention_modules, language_model, reachable_columns
from .prompts import EncodedPrompts
from .routing import RoutedTensor
from .scoring import Scorer, inverse_hidden_norm, value_output_norm

REPLAYS = ("local", "full")
REPEATS = ("context", "first", "last", "prompt")

# arXiv 2505.23416, section 6.1: the replay of a part of the context feeds a tenth of it
_PARTIAL_REPEAT = 10


@dataclass(frozen=True)
class ReplayPass:
    """
    One forward pass of the replay.

    Parameters
    ----------
    prompt : list[int]
        Token ids fed first.
    fed : tuple[int, int]
        Tokens of the context fed after them.
    scored : tuple[int, int]
        Tokens of the context whose pairs are scored.
    """

    prompt: list[int]
    fed: tuple[int, int]
    scored: tuple[int, int]


def plan_replay(
    input_ids: list[int] | None,
    num_tokens: int,
    protected: int,
    prefix_length: int,
    prompts: EncodedPrompts,
    *,
    chunk_size: int,
    repeat: str = "context",
) -> list[ReplayPass]:
    """
    Cut the context into chunks and put a prompt before each.

    Parameters
    ----------
    input_ids : list[int], optional
        The context's token ids; None if only its embeddings are known (then later prompts have no anchor tokens).
    num_tokens : int
        Tokens of the context.
    protected : int
        Leading tokens that are always kept and not replayed.
    prefix_length : int
        Those of them that belong to the chat template.
    prompts : EncodedPrompts
        Wording.
    chunk_size : int
        Context tokens a pass.
    repeat : str
        ``"context"`` replays all of it. The ablations of the paper's section 6.1 replay the ``"first"`` or ``"last"``
        tenth, or the ``"prompt"`` alone, in one pass that scores everything.
    """
    suffix = prompts.suffix(prefix_length)
    if repeat != "context":
        part = max(1, (num_tokens - protected) // _PARTIAL_REPEAT)
        fed = {
            "first": (protected, min(protected + part, num_tokens)),
            "last": (max(protected, num_tokens - part), num_tokens),
            "prompt": (num_tokens, num_tokens),
        }[repeat]
        if not prompts.first + suffix and fed[0] == fed[1]:
            raise ValueError(f"repeat={repeat!r} with an empty prompt feeds nothing; give prompts.first some text")
        return [ReplayPass(prompts.first + suffix, fed, (protected, num_tokens))]
    passes = []
    for start in range(protected, num_tokens, chunk_size):
        end = min(start + chunk_size, num_tokens)
        if start == protected:
            prompt = prompts.first
        else:
            anchor_start = max(protected, start - prompts.anchor_tokens)
            anchor = [] if input_ids is None else input_ids[anchor_start:start]
            prompt = prompts.later + anchor + prompts.after_anchor
        passes.append(ReplayPass(prompt + suffix, (start, end), (start, end)))
    return passes


class _ReadOnlyLayer(CacheLayerMixin):
    """A layer of the replay's cache: the context of one row, to which nothing is added."""

    is_compileable = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, context_length: int) -> None:
        self.keys, self.values = keys, values
        self.context_length = context_length
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def get_seq_length(self) -> int:
        return self.context_length

    def get_max_cache_shape(self) -> int:
        return -1


class _ReplayLayer(_ReadOnlyLayer):
    """
    Replayed tokens see the context, are scored, and leave no trace.

    Only the columns held by the cache are scored: a sliding layer may have dropped the first ones.
    """

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, context_length: int, *, window: int | None, run: _ReplayRun
    ) -> None:
        super().__init__(keys, values, context_length)
        self.is_sliding = window is not None
        self.window = window
        self.first_column = context_length - keys.shape[2]
        self.run = run
        self.module: nn.Module | None = None
        self.row_weight: torch.Tensor | None = None
        self.scores = torch.full(keys.shape[:3], -torch.inf, dtype=torch.float32, device=keys.device)

    def get_mask_sizes(self, cache_position: torch.Tensor) -> tuple[int, int]:
        return cache_position.shape[0], self.context_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return RoutedTensor.wrap(key_states, self), RoutedTensor.wrap(value_states, self)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        softmax_scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        scorer = self.run.scorer
        anchor, start, end = (max(0, column - self.first_column) for column in self.run.columns)
        column_weight = None
        if scorer.normalized:
            assert self.module is not None
            column_weight = value_output_norm(self.module, self.values[:, :, start:end])
        options = ReplayOptions(
            anchor=anchor,
            start=start,
            end=end,
            local=self.run.local,
            softmax_scale=softmax_scale,
            softcap=softcap,
            window=self.window,
            reduction=scorer.reduction,
            row_weight=self.row_weight if scorer.normalized else None,
            column_weight=column_weight,
        )
        out, scores = replay_attention(query, key, value, self.keys, self.values, options, backend=self.run.backend)
        self.scores[:, :, start:end] = scores
        return out.to(query.dtype)


class _SlidingReplayLayer(_ReadOnlyLayer):
    """The sliding layer of a hybrid model in the replay: seen by position, not scored."""

    is_sliding = True

    def get_mask_sizes(self, cache_position: torch.Tensor) -> tuple[int, int]:
        held = self.keys.shape[2]
        return held + cache_position.shape[0], self.context_length - held

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)


@dataclass
class _ReplayRun:
    """What the layers of a replay need to know of the current pass."""

    scorer: Scorer
    local: bool
    backend: str
    columns: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class RowContext:
    """
    One row of a prefilled cache.

    Parameters
    ----------
    row : int
        Row of the cache.
    padding : int
        Left padding: columns of the cache before the row's first token.
    num_tokens : int
        Tokens of the row.
    input_ids : list[int], optional
        Their ids.
    inputs_embeds : torch.Tensor, optional
        Their embeddings, shape (num_tokens, hidden_size), where ids are not known or not enough (images).
    next_position : int
        Position id of the token after the context.
    prefix_length : int
        Leading tokens of the chat template.
    protected : int
        Leading tokens that are always kept.
    """

    row: int
    padding: int
    num_tokens: int
    input_ids: list[int] | None
    inputs_embeds: torch.Tensor | None
    next_position: int
    prefix_length: int
    protected: int


def _fed_inputs(decoder: nn.Module, context: RowContext, step: ReplayPass, device: torch.device) -> dict[str, Any]:
    prompt = torch.tensor([step.prompt], dtype=torch.long, device=device)
    if context.inputs_embeds is not None:
        chunk = context.inputs_embeds[None, step.fed[0] : step.fed[1]].to(device)
        prompt_embeds = decoder.get_input_embeddings()(prompt)  # type: ignore[operator]
        return {"inputs_embeds": torch.cat([prompt_embeds, chunk], dim=1)}
    assert context.input_ids is not None
    chunk = torch.tensor([context.input_ids[step.fed[0] : step.fed[1]]], dtype=torch.long, device=device)
    return {"input_ids": torch.cat([prompt, chunk], dim=1)}


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


@contextmanager
def _hidden_norm_hooks(modules: list[nn.Module], cache: Cache, scorer: Scorer) -> Iterator[None]:
    """Tell each replay layer its attention module and the norms of the hidden states it is about to see."""
    handles = []
    try:
        for module, layer in zip(modules, cache.layers, strict=True):
            if scorer.normalized and isinstance(layer, _ReplayLayer):
                layer.module = module

                def record(module: nn.Module, args: tuple, kwargs: dict[str, Any], layer: _ReplayLayer = layer) -> None:
                    if kwargs.get("past_key_values") is cache:
                        hidden_states = args[0] if args else kwargs["hidden_states"]
                        layer.row_weight = inverse_hidden_norm(hidden_states)

                handles.append(module.register_forward_pre_hook(record, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def replay_row(
    model: PreTrainedModel,
    layers: list[CacheLayerMixin],
    windows: list[int | None],
    evicted: list[int],
    context: RowContext,
    passes: list[ReplayPass],
    scorer: Scorer,
    *,
    local: bool,
    backend: str = "auto",
    progress: bool = False,
) -> torch.Tensor:
    """
    Replay one row and score its pairs.

    Replayed tokens never enter the caller's cache, no logits are computed, and the cached context is read in place.
    Their position ids continue after the context, in local replay too.

    Parameters
    ----------
    model : PreTrainedModel
        The model that filled the cache.
    layers : list[CacheLayerMixin]
        The cache's layers, with ``keys`` and ``values`` of shape (batch_size, num_kv_heads, held, head_dim).
    windows : list[int | None]
        Sliding window of each layer.
    evicted : list[int]
        Layers to score.
    context : RowContext
        The row.
    passes : list[ReplayPass]
        The plan.
    scorer : Scorer
        The score.
    local : bool
        Attend to prefix, chunk and replayed tokens alone in the scored layers.
    backend : str
        Kernel backend.
    progress : bool
        Show a progress bar.

    Returns
    -------
    torch.Tensor
        Scores (num_evicted_layers, num_kv_heads, held), float32, for the last columns of the row, those that later
        tokens can see; ``-inf`` where no pass scored.
    """
    decoder = language_model(model)
    run = _ReplayRun(scorer, local, backend)
    rows: list[CacheLayerMixin] = []
    for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
        assert layer.keys is not None and layer.values is not None
        held = min(reachable_columns(layer.keys.shape[2], window), context.num_tokens)
        first = layer.keys.shape[2] - held
        keys = layer.keys[context.row : context.row + 1, :, first:]
        values = layer.values[context.row : context.row + 1, :, first:]
        if index in evicted:
            rows.append(_ReplayLayer(keys, values, context.num_tokens, window=window, run=run))
        else:
            rows.append(_SlidingReplayLayer(keys, values, context.num_tokens))
    cache = Cache(layers=rows)
    device = rows[0].keys.device  # type: ignore[union-attr]
    run_passes = tqdm(passes, desc="replay", unit="chunk", disable=not progress, leave=False)
    with _hidden_norm_hooks(attention_modules(model), cache, scorer), _rotary_state_kept(decoder):
        for step in run_passes:
            run.columns = (context.protected, *step.scored)
            inputs = _fed_inputs(decoder, context, step, device)
            fed = next(iter(inputs.values())).shape[1]
            steps = torch.arange(fed, device=device)
            decoder(
                **inputs,
                position_ids=(steps + context.next_position).unsqueeze(0),
                cache_position=steps + context.num_tokens,
                past_key_values=cache,
                use_cache=True,
            )
    # Layers may live on several devices
    return torch.cat([layer.scores.to(device) for layer in rows if isinstance(layer, _ReplayLayer)])
