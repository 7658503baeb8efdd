"""All that decides an answer, which a record is found again by: another model, press or question is another record."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ... import HeadScores, KVzipPress, __version__
from ...pretrained.load import PACKAGED_NAME
from ..presses.registry import FULL, PRESSES, Variant, make_press, press_parameters
from ..results.folder import sha256
from .grid import Unit

OF_UNIT = ("task", "task_version", "source", "length", "seed", "protocol", "prompt")
_FINGERPRINT_NUMBERS = 8


def model_name(argument: str | None) -> str:
    """Name of a model in results: of a folder only its last part."""
    if argument is None or argument == PACKAGED_NAME:
        return "SmolLM2-135M-Instruct"
    path = Path(argument).expanduser()
    return path.resolve().name if path.is_dir() else argument


def model_identity(model: PreTrainedModel, name: str) -> dict[str, Any]:
    """Name, revision, and hashes of configuration and of some of each weight, which tell fine-tuned models apart."""
    config = model.config.to_diff_dict()
    for part in ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(part, None)
    weights = hashlib.sha256()
    for parameter_name, parameter in model.named_parameters():
        weights.update(f"{parameter_name} {tuple(parameter.shape)}".encode())
        if parameter.device.type != "meta":
            weights.update(parameter.detach().flatten()[:_FINGERPRINT_NUMBERS].double().cpu().numpy().tobytes())
    return {
        "name": name,
        "revision": getattr(model.config, "_commit_hash", None),
        "config": sha256(_plain(config))[:16],
        "weights": weights.hexdigest()[:16],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


@dataclass(frozen=True)
class RunIdentity:
    """What the cells of a run have in common: this package, the model (see :func:`model_identity`), how it is used."""

    model: dict[str, Any]
    dtype: str
    attention: str
    device: str
    # backend, budget, scorer: see :class:`kvzip_press.eval.run.sweep.ContextSweep` and
    # :func:`kvzip_press.eval.metrics.registry.metric_of`
    backend: str
    budget: str
    scorer: str
    window: int | None = None  # tokens that the model can take, if not what its configuration says
    version: str = __version__

    @classmethod
    def of(cls, model: PreTrainedModel, name: str, **used: Any) -> RunIdentity:
        """Describe a loaded model and how it is `used`: its backend, budget, scorer and window."""
        dtype, attention = str(model.dtype).removeprefix("torch."), model.config._attn_implementation
        return cls(model_identity(model, name), dtype, attention, model.device.type, **used)


class Identifier:
    """Gives each cell of a run its identity; head scores are those of the presses that need some."""

    def __init__(self, run: RunIdentity, head_scores: HeadScores | None = None) -> None:
        self.run = run
        self.head_scores = head_scores
        self._presses: dict[str, dict[str, Any]] = {}

    def identity(self, unit: Unit, variant: Variant) -> dict[str, Any]:
        """All that decides the answers of one press at one ratio to the questions of one sample."""
        name, ratio = variant
        questions = unit.sample.questions
        return {
            **asdict(self.run),
            **{name: getattr(unit, name) for name in OF_UNIT},
            "sample": unit.sample.id,
            "context_sha256": sha256(unit.sample.context),
            "questions_sha256": sha256([_plain(asdict(question)) for question in questions]),
            "instruction": unit.instruction if unit.prompt == "paper" else None,
            "max_new_tokens": [question.max_new_tokens for question in questions],
            "press": name,
            "ratio": ratio,
            **self._press(name),
        }

    def _press(self, name: str) -> dict[str, Any]:
        if name not in self._presses:
            press = make_press(name, 0.5, None, head_scores=self.head_scores)
            described: dict[str, Any] = {"parameters": press_parameters(press)}
            if PRESSES[name].eager:
                described["press_attention"] = "eager"
            if name != FULL and not isinstance(press, KVzipPress):
                described["kvpress"] = version("kvpress")
            self._presses[name] = described
        return self._presses[name]
