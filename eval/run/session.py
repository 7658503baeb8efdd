"""A model loaded for an evaluation, and a grid measured with it into a results folder."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from ... import HeadScores, load_model
from ...kernels.backends import check_backend
from ..presses.registry import FULL
from ..results.folder import SampleLog, note_run
from ..results.record import Record, provenance
from ..tasks.base import Task
from ..tasks.registry import TASKS, get_tasks
from .engine_local import LocalEngine
from .engine_ray import RayEngine
from .identity import Identifier, RunIdentity, model_name
from .runner import Engine, Grid, Outcome, run_grids


@dataclass(frozen=True)
class ModelOptions:
    """
    A model and how it is used.

    Parameters
    ----------
    model : str, optional
        Folder or hub name; the packaged SmolLM2 by default.
    dtype : str
        ``"auto"``: bfloat16 on a GPU, else float32.
    device : str
        ``"auto"``: a GPU if there is one.
    attention : str
        transformers' implementation.
    threads, window : int, optional
        CPU threads; tokens that the model can take, if not what its configuration says.
    head_scores : str, optional
        File of head scores.
    backend, budget, scorer : str
        See :class:`kvzip_press.eval.run.identity.RunIdentity`.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "sdpa"
    threads: int | None = None
    window: int | None = None
    head_scores: str | None = None
    backend: str = "auto"
    budget: str = "equal"
    scorer: str = "paper"

    def load(self) -> LocalEngine:
        """
        Load the model and make an engine of it.

        Raises
        ------
        ValueError
            If there is no such backend, or the model, its device or its head scores can't be had.
        """
        check_backend(self.backend)
        logging.getLogger("kvpress").setLevel(logging.ERROR)
        transformers_logging.disable_progress_bar()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = self.dtype
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        head_scores = None if self.head_scores is None else HeadScores.load(self.head_scores)
        model, tokenizer = load_model(
            self.model, dtype=getattr(torch, dtype), device=device, attn_implementation=self.attention
        )
        if head_scores is not None:
            head_scores.check_model(model)
        identity = RunIdentity.of(
            model,
            model_name(self.model),
            backend=self.backend,
            budget=self.budget,
            scorer=self.scorer,
            window=self.window,
        )
        commit = provenance(model, argparse.Namespace())["commit"]
        return LocalEngine(model, tokenizer, identity, head_scores=head_scores, commit=commit)


def find_tasks(names: Iterable[str]) -> list[tuple[Task, bool]]:
    """
    Return tasks by name, and whether each was named itself and not by its family.

    Hyphens and underscores, upper and lower case are alike.
    """
    plain = [name if name in TASKS else name.lower().replace("-", "_") for name in names]
    named = set(plain)
    return [(task, task.name in named) for task in get_tasks(plain)]


class Session:
    """
    Measures grids into a results folder, and notes where its records come from.

    Parameters
    ----------
    engine : Engine
        Measures.
    identifier : Identifier
        Knows the records.
    provenance : dict
        Written to the folder.
    folder : Path
        Of the results.
    progress : bool
        Show progress bars.
    """

    def __init__(
        self, engine: Engine, identifier: Identifier, provenance: Record, folder: Path, *, progress: bool = True
    ) -> None:
        self.engine = engine
        self.identifier = identifier
        self.provenance = provenance
        self.log = SampleLog(folder)
        self.progress = progress
        self._noted: dict[str, int] = {}

    @classmethod
    def local(
        cls, options: ModelOptions, folder: Path, arguments: argparse.Namespace, *, progress: bool = True
    ) -> Session:
        """Load a model into this process."""
        engine = options.load()
        identifier = Identifier(engine.identity, engine.tokenizer, engine.head_scores)
        origin = provenance(engine.model, arguments) | {"model": engine.identity.model["name"]}
        return cls(engine, identifier, origin, folder, progress=progress)

    @classmethod
    def ray(
        cls,
        options: ModelOptions,
        folder: Path,
        arguments: argparse.Namespace,
        *,
        address: str | None = None,
        workers: int | None = None,
        progress: bool = True,
    ) -> Session:
        """Let the workers of a Ray cluster load the model."""
        engine = RayEngine(options, address=address, workers=workers)
        identifier = Identifier(engine.identity, engine.tokenizer, engine.head_scores)
        origin = engine.provenance | {"model": engine.identity.model["name"], "arguments": vars(arguments)}
        return cls(engine, identifier, origin, folder, progress=progress)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    def measure(self, *wanted: tuple[Sequence[tuple[Task, bool]], Grid]) -> Outcome:
        """Measure what of some grids is not finished; what the sweep saved is noted with each record."""
        names = dict.fromkeys(name for _, grid in wanted for name in grid.presses if name != FULL)
        self.engine.check(list(names))
        outcome = run_grids(
            wanted,
            self.log,
            self.identifier,
            self.engine,
            planned=self._note_plan,
            after=self._note_effort,
            progress=self.progress,
        )
        self._note_effort(outcome.left_out)
        return outcome

    def _note_plan(self, cells: int) -> None:
        self.provenance["planned cells"] = cells
        self._note_effort()

    def _note_effort(self, left_out: dict[str, str] | None = None) -> None:
        now = self.engine.effort.as_dict()
        done = {name: now[name] - self._noted.get(name, 0) for name in now}
        note_run(self.log.folder, self.provenance, done, left_out)
        self._noted = now


def plain_arguments(arguments: argparse.Namespace) -> argparse.Namespace:
    """Arguments as JSON can hold them."""
    kept: dict[str, Any] = {}
    for name, value in vars(arguments).items():
        if not callable(value):
            kept[name] = str(value) if isinstance(value, Path) else value
    return argparse.Namespace(**kept)
