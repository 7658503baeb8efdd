"""Compressing one prefilled cache: rows, replay, selection, eviction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .cache.eviction import evict
from .cache.measure import is_compressed
from .models import ModelLayout, reachable_columns
from .prompts import EncodedPrompts
from .replay import replay_row
from .replay_plan import RowContext, plan_replay
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
    """A dynamic cache, not compressed, and the tokens that filled it."""

    cache: Cache
    input_ids: torch.Tensor | None  # (batch_size, num_tokens)
    inputs_embeds: torch.Tensor | None  # (batch_size, num_tokens, hidden_size), if ids are not known or not enough
    padding: list[int]  # Left padding of each row
    next_positions: list[int]  # Position id of the token after each row

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

    layout: ModelLayout
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
    forward_hook: Callable  # `KVzipPress.forward_hook`, on the scored layers while a row is replayed

    def score(self, context: PrefilledContext) -> list[torch.Tensor]:
        """
        Scores (num_evicted_layers, num_kv_heads, held), float32, of each row of a context, which is replayed.

        ``held`` are the row's columns that later tokens can see: all of its tokens, or the last window where every
        layer slides.
        """
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
                        self.layout,
                        context.cache,
                        row,
                        plan_replay(row, self.prompts, chunk_size=self.chunk_size, repeat=self.repeat),
                        self.forward_hook,
                        scorer=self.scorer,
                        local=self.local,
                        backend=self.replay_backend,
                        progress=self.progress,
                    )
                scores.append(done[same])
        return scores

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
        Select by a level of :data:`kvzip_press.selection.LEVELS`, and evict in place.

        Pair levels need ``scores``, what :meth:`score` returned, unless everything stays; the head level needs
        ``head_scores`` (num_evicted_layers, num_kv_heads).
        """
        windows, evicted = self.layout.windows, self.layout.evicted
        layer = context.cache.layers[evicted[0]]
        _, num_kv_heads, dense, _ = layer.keys.shape  # type: ignore[union-attr]
        held = reachable_columns(dense, windows[evicted[0]])
        unreachable = layer.get_seq_length() - held
        shape = (len(evicted), len(context.padding), num_kv_heads, held)
        keep = torch.zeros(shape, dtype=torch.bool, device="cpu")
        prefix_pairs, context_pairs = [], []
        for row in context.rows(self.prompts, self.n_sink):
            # Columns of the row's first token, and of its first that is subject to the budget
            first = max(0, row.padding - unreachable)
            begin = min(max(0, row.padding + row.protected - unreachable), held)
            tokens = held - begin
            keep[:, row.row, :, first:begin] = True
            subject = keep[:, row.row, :, begin:]
            if head_scores is not None:
                subject[:] = select_heads(head_scores.cpu(), allowance, max(1, tokens)).unsqueeze(-1)
            elif scores is None:
                subject[:] = True
            elif tokens > 0:
                subject[:] = SELECTORS[level](scores[row.row][..., begin - first :], allowance).cpu()
            prefix_pairs.append(num_kv_heads * (begin - first))
            context_pairs.append(num_kv_heads * tokens)
        kept = dict(zip(evicted, keep, strict=True))
        evict(context.cache, kept, prefix_pairs, context_pairs, windows, self.quantization, self.decode_backend)
