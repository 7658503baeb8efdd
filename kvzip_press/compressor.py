"""Compressing one prefilled cache: rows, replay, selection, eviction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .cache.eviction import evict
from .cache.measure import is_compressed
from .models import evicted_layers, layer_windows, reachable_columns
from .prompts import EncodedPrompts
from .replay import ReplayPass, RowContext, plan_replay, replay_row
from .scoring import Scorer
from .selection import SELECTORS, Allowance, select_heads

_SUPPORTED_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


def check_cache(cache: Cache) -> None:
    """
    Refuse, before any work, a cache whose layers can't be read and replaced.

    Raises
    ------
    ValueError
        For static, quantised, offloaded and encoder-decoder caches.
    """
    layers = getattr(cache, "layers", None)
    kind = type(cache).__name__
    if layers is None or getattr(cache, "offloading", False):
        reason = "offloads its layers" if layers is not None else "has no list of layers"
        raise ValueError(f"{kind} {reason} and can't be compressed; use past_key_values=DynamicCache()")
    if is_compressed(cache):
        return
    replicated = getattr(cache, "layer_class_to_replicate", None)
    kinds = {type(layer) for layer in layers} | ({replicated} if replicated is not None else set())
    foreign = sorted(layer_class.__name__ for layer_class in kinds - set(_SUPPORTED_LAYERS))
    if foreign:
        raise ValueError(
            f"{kind} with layers {', '.join(foreign)} can't be compressed: its storage is fixed or quantised; "
            "use past_key_values=DynamicCache()"
        )


@dataclass(frozen=True)
class PrefilledContext:
    """
    A cache and the tokens that filled it.

    Parameters
    ----------
    cache : Cache
        Dynamic cache, not compressed.
    input_ids : torch.Tensor, optional
        Shape (batch_size, num_tokens).
    inputs_embeds : torch.Tensor, optional
        Shape (batch_size, num_tokens, hidden_size), if ids are not known or not enough.
    padding : list[int]
        Left padding of each row.
    next_positions : list[int]
        Position id of the token after each row.
    """

    cache: Cache
    input_ids: torch.Tensor | None
    inputs_embeds: torch.Tensor | None
    padding: list[int]
    next_positions: list[int]

    def rows(self, prompts: EncodedPrompts, n_sink: int) -> list[RowContext]:
        """Describe each row, its chat prefix found in its own token ids."""
        contexts = []
        for row, (padding, next_position) in enumerate(zip(self.padding, self.next_positions, strict=True)):
            ids = None if self.input_ids is None else self.input_ids[row, padding:].tolist()
            embeds = None if self.inputs_embeds is None else self.inputs_embeds[row, padding:]
            num_tokens = len(ids) if ids is not None else len(embeds)  # type: ignore[arg-type]
            prefix = prompts.find_prefix(ids) if ids is not None else min(prompts.prefix_length or 0, num_tokens)
            protected = max(prefix, min(n_sink, num_tokens))
            contexts.append(RowContext(row, padding, num_tokens, ids, embeds, next_position, prefix, protected))
        return contexts


@dataclass(frozen=True)
class Compressor:
    """
    The parameters of one compression, resolved; see :class:`kvzip_press.KVzipPress`.

    What scores, what selects and what evicts stay apart: :meth:`score` can serve many calls of :meth:`evict`.
    """

    model: PreTrainedModel
    prompts: EncodedPrompts
    scorer: Scorer
    chunk_size: int
    local: bool
    repeat: str
    n_sink: int
    quantization: str | None
    decode_backend: str
    replay_backend: str
    progress: bool

    def score(self, context: PrefilledContext) -> list[torch.Tensor]:
        """
        Replay each row of a context.

        Returns
        -------
        list[torch.Tensor]
            For each row, scores (num_evicted_layers, num_kv_heads, held), float32. ``held`` are the row's columns that
            later tokens can see: all of its tokens, or the last window where every layer slides.
        """
        windows = layer_windows(self.model)
        evicted = evicted_layers(windows)
        done: dict[tuple, torch.Tensor] = {}
        scores = []
        # Tensors made in inference mode could not be used outside of it later
        with torch.inference_mode(False), torch.no_grad():
            for row in context.rows(self.prompts, self.n_sink):
                # Beams and repeated rows hold the same context: replay it once. Images don't show in the ids
                known = row.input_ids is not None and row.inputs_embeds is None
                same = (tuple(row.input_ids or ()), row.next_position) if known else (row.row,)
                if same not in done:
                    done[same] = replay_row(
                        self.model,
                        context.cache.layers,
                        windows,
                        evicted,
                        row,
                        self._plan(row),
                        self.scorer,
                        local=self.local,
                        backend=self.replay_backend,
                        progress=self.progress,
                    )
                scores.append(done[same])
        return scores

    def _plan(self, row: RowContext) -> list[ReplayPass]:
        return plan_replay(
            row.input_ids,
            row.num_tokens,
            row.protected,
            row.prefix_length,
            self.prompts,
            chunk_size=self.chunk_size,
            repeat=self.repeat,
        )

    def evict(
        self,
        context: PrefilledContext,
        allowance: Allowance,
        *,
        level: str,
        scores: list[torch.Tensor] | None = None,
        head_scores: torch.Tensor | None = None,
    ) -> None:
        """
        Select and evict, in place.

        Parameters
        ----------
        context : PrefilledContext
            The context; its cache is compressed in place.
        allowance : Allowance
            How much stays.
        level : str
            See :data:`kvzip_press.selection.LEVELS`.
        scores : list[torch.Tensor], optional
            What :meth:`score` returned; needed by pair levels unless everything stays.
        head_scores : torch.Tensor, optional
            Shape (num_evicted_layers, num_kv_heads); needed by the head level.
        """
        windows = layer_windows(self.model)
        evicted = evicted_layers(windows)
        layers = context.cache.layers
        _, num_kv_heads, dense, _ = layers[evicted[0]].keys.shape  # type: ignore[union-attr]
        held = reachable_columns(dense, windows[evicted[0]])
        length = layers[evicted[0]].get_seq_length()
        shape = (len(evicted), len(context.padding), num_kv_heads, held)
        keep = torch.zeros(shape, dtype=torch.bool)
        prefix_pairs, context_pairs = [], []
        for row in context.rows(self.prompts, self.n_sink):
            first = max(0, row.padding - (length - held))
            protected = min(max(0, row.padding + row.protected - (length - held)) - first, held - first)
            tokens = held - first - protected
            keep[:, row.row, :, first : first + protected] = True
            if head_scores is not None:
                heads = select_heads(head_scores.cpu(), allowance, max(1, tokens))
                keep[:, row.row, :, first + protected :] = heads.unsqueeze(-1)
            elif scores is None:
                keep[:, row.row, :, first + protected :] = True
            elif tokens > 0:
                selected = SELECTORS[level](scores[row.row][..., protected:], allowance)
                keep[:, row.row, :, first + protected :] = selected.cpu()
            prefix_pairs.append(num_kv_heads * protected)
            context_pairs.append(num_kv_heads * tokens)
        evict(
            context.cache,
            {layer: keep[index] for index, layer in enumerate(evicted)},
            {layer: list(prefix_pairs) for layer in evicted},
            {layer: list(context_pairs) for layer in evicted},
            windows,
            self.quantization,
            self.decode_backend,
        )
