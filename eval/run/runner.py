"""A grid of tasks, presses, ratios and protocols: what of it is still to be measured, in units that share prefills."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tqdm import tqdm

from ..metrics.registry import SCORERS, metric_of
from ..presses.registry import check_name, variants
from ..results.folder import SampleLog
from ..results.record import Record
from ..results.records import failed, rescored
from ..tasks.base import GENERATED, Request, Sample, Task
from ..tasks.fidelity import METRIC as FIDELITY
from .chat import STYLES
from .identity import PROTOCOLS, Identifier, Unit, key_of
from .sweep import Effort

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grid:
    """
    What is to be measured.

    Parameters
    ----------
    presses : tuple[str, ...]
        Names in :data:`kvzip_press.eval.presses.registry.PRESSES`.
    ratios : tuple[float, ...]
        Kept fractions; the full cache is measured once.
    protocols : tuple[str, ...]
        See :class:`kvzip_press.eval.run.identity.Unit`.
    prompt : str
        See :class:`kvzip_press.eval.run.chat.Chat`.
    source, corpus, limit, seed
        See :class:`kvzip_press.eval.tasks.base.Request`.
    lengths : tuple[int | None, ...]
        Context lengths; None is the task's own.
    max_new_tokens : int, optional
        Answers are cut there, if the task would let them be longer.
    shard : tuple[int, int]
        Part and number of parts: of the samples, each n-th.
    """

    presses: tuple[str, ...]
    ratios: tuple[float, ...]
    protocols: tuple[str, ...] = ("agnostic",)
    prompt: str = "paper"
    source: str = GENERATED
    corpus: str | None = None
    lengths: tuple[int | None, ...] = (None,)
    limit: int | None = None
    seed: int = 42
    max_new_tokens: int | None = None
    shard: tuple[int, int] = (1, 1)

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


class Engine(Protocol):
    """What measures units."""

    effort: Effort

    def check(self, names: Sequence[str]) -> None:
        """Refuse presses that can't run."""

    def close(self) -> None:
        """Stop what was started."""

    def run(self, units: Iterable[Unit]) -> Iterator[Record]:
        """Yield each record when it is finished."""


@dataclass(frozen=True)
class Outcome:
    """
    What a run has done.

    Parameters
    ----------
    records : list
        All records of the grid, those found finished included.
    measured, found, rescored : int
        Cells measured now, finished before, and judged anew from saved answers.
    left_out : dict
        Tasks of a family that could not be had, with the reason.
    """

    records: list[Record]
    measured: int
    found: int
    rescored: int
    left_out: dict[str, str]


def load_samples(
    tasks: Iterable[tuple[Task, bool]], grid: Grid, tokenizer: Any, *, progress: bool = True
) -> tuple[list[tuple[Task, int | None, Sample]], dict[str, str]]:
    """
    Load the samples of all tasks at all lengths.

    Parameters
    ----------
    tasks : iterable of tuple
        Tasks, and whether each was asked for by its own name rather than by its family's.
    grid : Grid
        Which samples are wanted.
    tokenizer : PreTrainedTokenizerBase
        Measures generated contexts.
    progress : bool
        Show a progress bar.

    Returns
    -------
    tuple
        Samples with their task and length, and tasks of a family whose data could not be had, with the reason.

    Raises
    ------
    ValueError, FileNotFoundError
        If the data of a task asked for by its own name can't be had.
    """
    samples: list[tuple[Task, int | None, Sample]] = []
    left_out = {}
    wanted = [(task, named, length) for task, named in tasks for length in grid.lengths]
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
        if question.metric != FIDELITY:
            try:
                metric_of(question.metric).check(question)
            except ValueError as error:
                raise ValueError(f"sample {sample.id} of {task.name}: {error}") from error


def make_units(samples: Iterable[tuple[Task, int | None, Sample]], grid: Grid) -> list[Unit]:
    """Return the units of a shard, with all presses and ratios."""
    part, parts = grid.shard
    chosen = tuple(variants(list(grid.presses), list(grid.ratios)))
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
            variants=chosen,
        )
        for index, (task, length, sample) in enumerate(samples)
        if index % parts == part - 1
        for protocol in grid.protocols
    ]


def _shortened(sample: Sample, max_new_tokens: int | None) -> Sample:
    if max_new_tokens is None:
        return sample
    questions = (
        replace(question, max_new_tokens=min(question.max_new_tokens, max_new_tokens)) for question in sample.questions
    )
    return replace(sample, questions=tuple(questions))


def run_grids(
    wanted: Sequence[tuple[Sequence[tuple[Task, bool]], Grid]],
    log: SampleLog,
    identifier: Identifier,
    engine: Engine,
    *,
    planned: Callable[[int], None] = lambda cells: None,
    after: Callable[[], None] = lambda: None,
    progress: bool = True,
) -> Outcome:
    """
    Measure what of some grids is not finished yet.

    Parameters
    ----------
    wanted : sequence of tuple
        Tasks, as for :func:`load_samples`, each with their grid.
    log : SampleLog
        Where records are found and appended.
    identifier : Identifier
        Knows the records of this run.
    engine : Engine
        Measures.
    planned : callable
        Called with the number of cells of the grids before any is measured.
    after : callable
        Called when a record has been written.
    progress : bool
        Show progress bars, with the time left.

    Raises
    ------
    ValueError
        If there is no context to measure on.
    """
    units: list[Unit] = []
    left_out: dict[str, str] = {}
    found_samples = False
    for tasks, grid in wanted:
        samples, missing = load_samples(tasks, grid, identifier.tokenizer, progress=progress)
        units += make_units(samples, grid)
        left_out |= missing
        found_samples |= bool(samples)
    if found_samples and not units:
        shards = ", ".join("{}/{}".format(*grid.shard) for _, grid in wanted)
        raise ValueError(f"the shard {shards} holds no contexts: there are fewer contexts than shards")
    if not found_samples:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ValueError(f"no contexts to measure on: {reasons or 'no tasks were named'}")
    keys = [[key_of(identifier.identity(unit, variant)) for variant in unit.variants] for unit in units]
    planned(sum(map(len, keys)))
    judged = sum(_judge_anew(log, identifier, unit) for unit in units)
    pending = [
        replace(unit, variants=unfinished)
        for unit, of_unit in zip(units, keys, strict=True)
        if (unfinished := tuple(v for v, key in zip(unit.variants, of_unit, strict=True) if not _finished(log, key)))
    ]
    number = sum(len(unit.variants) for unit in pending)
    if number:
        with tqdm(total=number, desc="evaluation", unit="cell", smoothing=0, disable=not progress) as bar:
            for record in engine.run(pending):
                log.add(record)
                after()
                bar.set_postfix_str(f"{record['task']} {record['press']} {record['ratio']:g}", refresh=False)
                bar.update()
    finished = [log.get(key) for of_unit in keys for key in of_unit]
    records = [record for record in finished if record is not None]
    return Outcome(records, number, len(records) - number - judged, judged, left_out)


def _finished(log: SampleLog, key: str) -> bool:
    record = log.get(key)
    return record is not None and not failed(record)


def _judge_anew(log: SampleLog, identifier: Identifier, unit: Unit) -> int:
    """Where the answers of a cell were saved under another scorer, judge them instead of asking again."""
    judged = 0
    for variant in unit.variants:
        identity = identifier.identity(unit, variant)
        if key_of(identity) in log:
            continue
        for scorer in SCORERS:
            saved = log.get(key_of(identity, scorer))
            if saved is not None and not failed(saved):
                log.add(rescored(saved, identity["scorer"]))
                judged += 1
                break
    return judged
