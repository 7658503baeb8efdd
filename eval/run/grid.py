"""What is to be measured: a grid of tasks, presses, ratios and protocols, cut into units: contexts with all presses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from ..choices import PROTOCOLS, STYLES
from ..metrics.registry import metric_of
from ..presses.registry import Variant, check_name, variants
from ..tasks.base import GENERATED, Request, Sample, Task
from ..tasks.fidelity import METRIC as FIDELITY
from ..tasks.registry import TASKS, get_tasks


@dataclass(frozen=True)
class Grid:
    """What is to be measured."""

    # tasks, and whether each was asked for by its own name rather than by its family's, see :func:`find_tasks`
    tasks: Sequence[tuple[Task, bool]]
    presses: Sequence[str]  # names in :data:`kvzip_press.eval.presses.registry.PRESSES`
    ratios: Sequence[float]  # kept fractions; the full cache is measured once
    protocols: Sequence[str] = ("agnostic",)  # see :class:`Unit`
    prompt: str = "paper"  # see :class:`kvzip_press.eval.run.chat.Chat`
    # source, corpus, limit, seed: see :class:`kvzip_press.eval.tasks.base.Request`
    source: str = GENERATED
    corpus: str | None = None
    lengths: Sequence[int | None] = (None,)  # context lengths; None is the task's own
    limit: int | None = None
    seed: int = 42
    max_new_tokens: int | None = None  # answers are cut there, if the task would let them be longer
    shard: tuple[int, int] = (1, 1)  # part and number of parts: of the samples, each n-th

    def __post_init__(self) -> None:
        for name in self.presses:
            check_name(name)
        for ratio in self.ratios:
            if not 0 < ratio <= 1:
                raise ValueError(f"ratios are kept fractions in (0, 1], got {ratio}")
        for protocol in self.protocols:
            if protocol not in PROTOCOLS:
                raise ValueError(f"protocols are {', '.join(PROTOCOLS)}, got {protocol!r}")
        if self.prompt not in STYLES:
            raise ValueError(f"the prompt style must be one of {', '.join(STYLES)}, got {self.prompt!r}")
        for name in ("limit", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        part, parts = self.shard
        if not 1 <= part <= parts:
            raise ValueError(f"the shard must be one of 1/{parts} to {parts}/{parts}, got {part}/{parts}")


@dataclass(frozen=True)
class Unit:
    """One sample in one protocol, and the presses and ratios to measure on it: what prefills can be shared by."""

    # task, family, task_version, imitation, instruction: of the task; the metrics' names are in the questions
    task: str
    family: str
    task_version: int
    imitation: bool
    instruction: str
    # source, length, seed: of the request
    source: str
    length: int | None
    seed: int
    sample: Sample  # context and questions
    # ``"agnostic"``: no question is seen by the press. ``"aware"``: each question is part of what is compressed.
    # ``"reuse"``: the first question is, and the others are asked of that cache (paper, figure 2).
    protocol: str
    prompt: str  # see :class:`kvzip_press.eval.run.chat.Chat`
    variants: tuple[Variant, ...]  # presses with their ratios


def find_tasks(names: Iterable[str]) -> list[tuple[Task, bool]]:
    """Tasks by name, in any case and with hyphens or underscores, and whether each was named, not just its family."""
    plain = [name if name in TASKS else name.lower().replace("-", "_") for name in names]
    return [(task, task.name in plain) for task in get_tasks(plain)]


def load_samples(
    grid: Grid, tokenizer: Any, *, progress: bool = True
) -> tuple[list[tuple[Task, int | None, Sample]], dict[str, str]]:
    """
    Load the samples of all tasks at all lengths, measured by a tokenizer where they are generated.

    Return them with their task and length, and the tasks of a family whose data could not be had, with the reason.
    ValueError or FileNotFoundError if those of a task named itself can't be had, or a question can't be judged.
    """
    samples: list[tuple[Task, int | None, Sample]] = []
    left_out = {}
    wanted = [(task, named, length) for task, named in grid.tasks for length in grid.lengths]
    for task, named, length in tqdm(wanted, desc="samples", unit="task", leave=False, disable=not progress):
        request = Request(grid.source, grid.limit, length, grid.seed, tokenizer, grid.corpus)
        try:
            loaded = task.load(request)
        except (ValueError, FileNotFoundError) as error:
            if named:
                raise
            left_out[task.name] = str(error).removeprefix(f"{task.name}: ")
            continue
        for sample in loaded:
            _check_questions(sample, task)
        samples += [(task, length, sample) for sample in loaded]
    return samples, left_out


def _check_questions(sample: Sample, task: Task) -> None:
    """Refuse before any work what can't be judged after it."""
    for question in sample.questions:
        try:
            if question.metric != FIDELITY:
                metric_of(question.metric).check(question)
        except ValueError as error:
            raise ValueError(f"sample {sample.id} of {task.name}: {error}") from error


def make_units(samples: Iterable[tuple[Task, int | None, Sample]], grid: Grid) -> list[Unit]:
    """Return the units of a shard, with all presses and ratios."""
    part, parts = grid.shard
    return [
        Unit(
            task=task.name,
            family=task.family,
            task_version=task.version,
            imitation=task.imitation and grid.source == GENERATED,
            instruction=task.instruction,
            source=grid.source,
            length=length,
            seed=grid.seed,
            sample=_shortened(sample, grid.max_new_tokens),
            protocol=protocol,
            prompt=grid.prompt,
            variants=tuple(variants(grid.presses, grid.ratios)),
        )
        for index, (task, length, sample) in enumerate(samples)
        if index % parts == part - 1
        for protocol in grid.protocols
    ]


def _shortened(sample: Sample, most: int | None) -> Sample:
    if most is None:
        return sample
    cut = (replace(question, max_new_tokens=min(question.max_new_tokens, most)) for question in sample.questions)
    return replace(sample, questions=tuple(cut))
