"""Watching a prefill: which tokens filled which cache, seen by hooks that leave with their handles."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from .cache.measure import is_compressed
from .compressor import PrefilledContext, check_cache
from .replay import find_replay


def _left_padding(mask: torch.Tensor, num_tokens: int) -> list[int]:
    """Left padding of each row of a 2-D attention mask; other padding, and an empty row, are refused."""
    if mask.shape[1] != num_tokens:
        raise ValueError(
            f"the last prefill call had an attention_mask of {mask.shape[1]} columns for {num_tokens} tokens; "
            "pass the mask of all tokens seen so far"
        )
    visible = mask.bool()
    counts = visible.sum(dim=1)
    padding = num_tokens - counts
    columns = torch.arange(num_tokens, device=mask.device)
    if not torch.equal(visible, columns >= padding.unsqueeze(1)):
        raise ValueError("only left padding can be compressed, but attention_mask has zeros elsewhere; pad on the left")
    if (counts == 0).any():
        raise ValueError("a row of attention_mask is empty; remove the row")
    return list(padding.tolist())


class _Recording:
    """The tokens that filled one cache."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.ids: list[torch.Tensor | None] = []
        self.embeds: list[torch.Tensor | None] = []
        self.mask: torch.Tensor | None = None
        self.last_positions: torch.Tensor | None = None

    def add(self, arguments: dict[str, Any], outer: dict[str, Any]) -> None:
        """Note one call: the decoder's arguments, and those with which the modules around it were entered."""
        embeds = arguments.get("inputs_embeds")
        ids = arguments.get("input_ids")
        self.ids.append(outer.get("input_ids") if ids is None else ids)
        self.embeds.append(None if embeds is None else embeds.detach())
        # An image-text model prepares masks for its decoder; padding shows in what it was given itself
        mask = arguments.get("attention_mask")
        if not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            mask = outer.get("attention_mask", mask)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            self.mask = mask
        elif mask is not None:
            raise ValueError("padding can't be read from a prepared attention mask; pass a 2-D attention_mask, or none")
        positions = arguments.get("position_ids")
        self.last_positions = None if positions is None else positions[..., -1]

    def context(self) -> PrefilledContext:
        """Describe the filled cache; one changed since, or filled by ids and by embeddings, is refused."""
        length = self.cache.get_seq_length()
        ids, embeds = (
            torch.cat(parts, dim=1) if all(part is not None for part in parts) else None  # type: ignore[arg-type]
            for parts in (self.ids, self.embeds)
        )
        if embeds is None and any(part is not None for part in self.embeds):
            raise ValueError("a prefill in several calls must use input_ids in all of them, or inputs_embeds in all")
        tokens = ids if ids is not None else embeds
        assert tokens is not None
        batch_size, num_tokens = tokens.shape[:2]
        if length != num_tokens:
            raise ValueError(
                f"the cache holds {length} tokens but {num_tokens} were fed under the press: it was cropped or filled "
                "elsewhere; prefill one cache under the press and change it afterwards"
            )
        padding = [0] * batch_size if self.mask is None else _left_padding(self.mask, num_tokens)
        if self.last_positions is None:
            next_positions = [num_tokens] * batch_size
        else:
            last = self.last_positions.flatten().tolist()
            next_positions = [position + 1 for position in (last if len(last) == batch_size else last * batch_size)]
        return PrefilledContext(self.cache, ids, embeds, padding, next_positions)


# Blocks on one model may overlap in any way, in one thread or several: the first puts the hook on, the last off
_HOOK_LOCK = threading.Lock()


class _GeneratePrefill:
    """A model's ``_prefill`` while at least one press watches it: the original, then what the presses do after it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.listeners: list[Callable[[Cache], Any]] = []
        self._attributes = model.__dict__
        self._prefill = model._prefill
        self._own = "_prefill" in self._attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._prefill(*args, **kwargs)
        with _HOOK_LOCK:
            # The innermost block first, as when blocks end
            listeners = self.listeners[::-1]
        for listener in listeners:
            listener(outputs.past_key_values)
        return outputs

    def restore(self) -> None:
        """Leave the model as it was."""
        if self._own:
            self._attributes["_prefill"] = self._prefill
        else:
            del self._attributes["_prefill"]


@contextmanager
def _listening(model: PreTrainedModel, listener: Callable[[Cache], Any]) -> Iterator[None]:
    """Hook the one place where ``generate`` tells a prefill, chunked or not, from a decode step."""
    with _HOOK_LOCK:
        hook = model.__dict__.get("_prefill")
        if not isinstance(hook, _GeneratePrefill):
            hook = model.__dict__["_prefill"] = _GeneratePrefill(model)
        hook.listeners.append(listener)
    try:
        yield
    finally:
        with _HOOK_LOCK:
            hook.listeners.remove(listener)
            if not hook.listeners:
                hook.restore()


class PrefillRecorder:
    """
    Records every cache that the entering thread fills, until it is taken.

    Caches that are compressed already, replays, and caches of other threads are left alone. ``decoder`` is the model's
    part that owns the layers, see :func:`kvzip_press.models.language_model`.
    """

    def __init__(self, model: PreTrainedModel, decoder: nn.Module) -> None:
        self._decoder = decoder
        self._outer = model
        # An image-text model turns ids into embeddings between its modules; kvpress's pipeline enters at model.model
        around = {id(module): module for module in (model, getattr(model, "model", model))}
        self._outers = [module for module in around.values() if module is not self._decoder]
        self._thread = threading.get_ident()
        self._recordings: list[_Recording] = []
        self._outer_arguments: dict[str, Any] = {}
        self._parameters = inspect.signature(self._decoder.forward)

    def _mine(self, args: tuple = (), kwargs: dict[str, Any] | None = None) -> bool:
        """Whether a call concerns the press: one of its own thread, and no replay."""
        return threading.get_ident() == self._thread and find_replay(args, kwargs or {}) is None

    def _arguments(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._parameters.bind_partial(*args, **kwargs).arguments
        return {**bound.pop("kwargs", {}), **bound}

    def _find(self, cache: Any) -> _Recording | None:
        return next((recording for recording in self._recordings if recording.cache is cache), None)

    # While a hook is put on or taken off, torch may call it in another thread without the keyword arguments
    def _before_outer(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is None or not self._mine():
            return
        if module is self._outer:
            self._outer_arguments = {}
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, torch.Tensor):
            self._outer_arguments["input_ids"] = ids
        if kwargs.get("attention_mask") is not None or "attention_mask" not in self._outer_arguments:
            self._outer_arguments["attention_mask"] = kwargs.get("attention_mask")

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is None or not self._mine(args, kwargs):
            return
        arguments = self._arguments(args, kwargs)
        cache = arguments.get("past_key_values")
        if cache is None:
            if arguments.get("use_cache") is False:
                raise ValueError("nothing to compress: the model was called with use_cache=False; pass use_cache=True")
            return
        check_cache(cache)
        length = cache.get_seq_length()
        if length > 0 and not is_compressed(cache) and self._find(cache) is None:
            raise ValueError(
                f"the cache already holds {length} tokens that were not fed under the press, so they can't be "
                "replayed; prefill the whole context under the press"
            )

    def _after(self, module: nn.Module, args: tuple, *rest: Any) -> None:
        if len(rest) < 2 or not self._mine(args, rest[0]):
            return
        kwargs, output = rest
        arguments = self._arguments(args, kwargs)
        outer, self._outer_arguments = self._outer_arguments, {}
        cache = arguments.get("past_key_values")
        if cache is None:
            values = output.values() if hasattr(output, "values") else output
            cache = next((value for value in values if isinstance(value, Cache)), None)
        if cache is None:
            raise ValueError("nothing to compress: the model returned no cache; call it with use_cache=True")
        if is_compressed(cache):
            return
        recording = self._find(cache)
        if recording is None:
            check_cache(cache)
            recording = _Recording(cache)
            self._recordings.append(recording)
        recording.add(arguments, outer)

    @contextmanager
    def watch(self, after_prefill: Callable[[Cache], Any]) -> Iterator[None]:
        """
        Record until the end of the block.

        Inside ``model.generate``, ``after_prefill`` is called with the cache between prefill and first decode step.
        """
        with ExitStack() as block:
            handles = [
                self._decoder.register_forward_pre_hook(self._before, with_kwargs=True),
                self._decoder.register_forward_hook(self._after, with_kwargs=True),
                *(outer.register_forward_pre_hook(self._before_outer, with_kwargs=True) for outer in self._outers),
            ]
            for handle in handles:
                block.callback(handle.remove)
            if hasattr(self._outer, "_prefill"):
                block.enter_context(_listening(self._outer, lambda cache: self._mine() and after_prefill(cache)))
            yield

    def take(self, cache: Cache | None = None) -> list[PrefilledContext]:
        """Return the contexts recorded since the last call, of one cache or of all, and forget them."""
        taken = [recording for recording in self._recordings if cache is None or recording.cache is cache]
        self._recordings = [recording for recording in self._recordings if recording not in taken]
        return [recording.context() for recording in taken if not is_compressed(recording.cache)]
