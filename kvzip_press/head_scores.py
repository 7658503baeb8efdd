"""Context-independent head scores: replay a sample once, then compress any context without a replay."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .compressor import PrefilledContext
from .files import write_atomically
from .models import ModelLayout
from .press import KVzipPress
from .prompts import context_ids
from .version import __version__

_FORMAT = "kvzip-press head scores 1"


@dataclass(frozen=True, eq=False)
class HeadScores:
    """
    One score for each KV head: the highest score of any position of a long sample (arXiv 2505.23416, section 4.4).

    Parameters
    ----------
    scores : torch.Tensor
        Shape (num_layers, num_kv_heads), float32; the layers are those that are evicted (all layers, or the global
        ones of a hybrid model).
    provenance : dict[str, str]
        Where they come from: model, sample sizes, scorer, version.
    """

    scores: torch.Tensor
    provenance: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scores.ndim != 2 or not self.scores.is_floating_point():
            raise ValueError(
                f"head scores must be floats of shape (num_layers, num_kv_heads), got {tuple(self.scores.shape)} "
                f"{self.scores.dtype}"
            )
        if not torch.isfinite(self.scores).all():
            raise ValueError("head scores must be finite")
        object.__setattr__(self, "scores", self.scores.detach().float().cpu())

    def check_model(self, model: PreTrainedModel) -> None:
        """
        Refuse scores of another model's shape.

        Raises
        ------
        ValueError
            If the shape is not (evicted layers, KV heads) of ``model``.
        """
        layout = ModelLayout.of(model)
        expected = (len(layout.evicted), layout.num_kv_heads)
        if tuple(self.scores.shape) != expected:
            raise ValueError(
                f"head scores have shape {tuple(self.scores.shape)}, but {type(model).__name__} needs {expected}; "
                "compute them with HeadScores.from_text(model, tokenizer, text)"
            )

    @classmethod
    def from_text(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        texts: str | Sequence[str],
        *,
        scorer: str = "kvzip",
        replay: str = "local",
        chunk_size: int = 512,
        progress: bool = False,
    ) -> HeadScores:
        """
        Replay one or more samples; the elementwise maximum over them is the score.

        Parameters
        ----------
        model : PreTrainedModel
            A decoder-only model.
        tokenizer : PreTrainedTokenizerBase
            Its tokenizer.
        texts : str or sequence of str
            Samples, each within the model's window. The paper uses one English book of 88K tokens, and a code sample
            too for tasks with code.
        scorer, replay, chunk_size
            As in :class:`kvzip_press.KVzipPress`.
        progress : bool
            Show a progress bar.

        Raises
        ------
        ValueError
            If there is no text, or one has no token.
        """
        samples = [texts] if isinstance(texts, str) else list(texts)
        if not samples or not all(sample.strip() for sample in samples):
            raise ValueError("head scores need at least one text, and none may be empty")
        press = KVzipPress(scorer=scorer, replay=replay, chunk_size=chunk_size, tokenizer=tokenizer, progress=progress)
        compressor = press.compressor(model)
        decoder = compressor.layout.decoder
        tables = []
        contexts = [context_ids(tokenizer, sample).to(model.device) for sample in samples]
        for ids in contexts:
            cache = DynamicCache(config=decoder.config)
            with torch.no_grad():
                decoder(input_ids=ids, past_key_values=cache)
            scores = compressor.score(PrefilledContext(cache, ids, None, [0], [ids.shape[1]]))[0]
            tables.append(scores.amax(dim=-1).cpu())
            if not torch.isfinite(tables[-1]).all():
                raise ValueError(f"the text of {ids.shape[1]} tokens has none behind the chat prefix; use a longer one")
        provenance = {
            "model": str(model.config.name_or_path),
            "scorer": scorer,
            "replay": replay,
            "chunk_size": str(chunk_size),
            "sample_tokens": json.dumps([ids.shape[1] for ids in contexts]),
            "kvzip_press": __version__,
        }
        return cls(torch.stack(tables).amax(dim=0), provenance)

    @staticmethod
    def check_target(path: str | os.PathLike) -> Path:
        """
        Refuse, before any work, a path that :meth:`save` can't or should not write to.

        Raises
        ------
        ValueError
            If the folder is missing or not writable, the path is no regular file, or it ends in ``.pt``.
        """
        target = Path(path)
        if not target.parent.is_dir():
            raise ValueError(f"folder {str(target.parent)!r} does not exist; create it first")
        if not target.name or (target.exists() and not target.is_file()):
            raise ValueError(f"{str(path)!r} is not a file; name a file such as heads.safetensors")
        if target.suffix == ".pt":
            raise ValueError(
                f"{str(path)!r} would be taken for a file of the original code; use the ending .safetensors"
            )
        if not os.access(target.parent, os.W_OK):
            raise ValueError(f"folder {str(target.parent)!r} is not writable; choose another")
        return target

    def save(self, path: str | os.PathLike) -> None:
        """Write safetensors with the provenance as metadata, atomically."""
        metadata = {**self.provenance, "format": _FORMAT}
        write_atomically(self.check_target(path), save({"scores": self.scores.contiguous()}, metadata))

    @classmethod
    def load(cls, path: str | os.PathLike) -> HeadScores:
        """
        Read what :meth:`save` wrote, or a ``.pt`` file of the original code.

        Nothing is unpickled but tensors.

        Raises
        ------
        ValueError
            If the file is missing, or holds no head scores.
        """
        source = Path(path)
        if not source.is_file():
            raise ValueError(f"no head scores at {str(source)!r}; compute them with `kvzip-press heads score`")
        if source.suffix == ".pt":
            return cls(_load_original(source), {"source": source.name})
        try:
            with safe_open(source, framework="pt") as file:
                metadata: dict[str, Any] = file.metadata() or {}
                if metadata.pop("format", None) != _FORMAT:
                    raise ValueError(f"{str(source)!r} holds no head scores (format is not {_FORMAT!r})")
                return cls(file.get_tensor("scores"), metadata)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{str(source)!r} is not a safetensors file of head scores: {error}") from error


def _load_original(path: Path) -> torch.Tensor:
    """
    Read head scores of the original code, shape [num_layers, num_kv_heads], saved on any device.

    Files with a sample or batch dimension of one in front are accepted too.
    """
    try:
        scores = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{str(path)!r} is not a tensor file: {error}") from error
    if isinstance(scores, list | tuple):
        try:
            scores = torch.stack(list(scores))
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"{str(path)!r} holds no tensors of one shape: {error}") from error
    if not isinstance(scores, torch.Tensor):
        raise ValueError(f"{str(path)!r} holds a {type(scores).__name__}, not a tensor of head scores")
    while scores.ndim > 2 and 1 in scores.shape:
        scores = scores.squeeze(scores.shape.index(1))
    return scores
