"""Measures units on the workers of a Ray cluster, a GPU each where there are GPUs."""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvzip_press.eval.identity import RunIdentity, Unit
from kvzip_press.eval.report import Record, provenance
from kvzip_press.eval.sweep import Effort

if TYPE_CHECKING:
    from kvzip_press.eval.session import ModelOptions

# Times that a unit is given to another worker after its own was lost
RETRIES = 3


class Worker:
    """
    What runs on the cluster: a loaded model.

    Parameters
    ----------
    options : ModelOptions
        The model.
    """

    def __init__(self, options: ModelOptions) -> None:
        self.engine = options.load()

    def describe(self) -> tuple[RunIdentity, Any, Any, Record]:
        """Return what records have in common, the tokenizer, the head scores and the provenance."""
        engine = self.engine
        return engine.identity, engine.tokenizer, engine.head_scores, provenance(engine.model, argparse.Namespace())

    def check(self, names: Sequence[str]) -> None:
        """Refuse presses that can't run."""
        self.engine.check(names)

    def measure(self, unit: Unit) -> tuple[list[Record], Effort]:
        """Measure a unit, and say what it took."""
        self.engine.effort = Effort()
        records = list(self.engine.measure(unit))
        return records, self.engine.effort


class RayEngine:
    """
    Spreads units over workers; a unit whose worker is lost goes to a new one.

    Parameters
    ----------
    options : ModelOptions
        The model, which every worker loads.
    address : str, optional
        Of an existing cluster, as in ``ray.init``; a local one is started by default.
    workers : int, optional
        Number of workers. By default one a GPU, or one a node where there are none.

    Raises
    ------
    ImportError
        If Ray is not installed.
    ValueError
        If the cluster can't be reached.
    """

    def __init__(self, options: ModelOptions, *, address: str | None = None, workers: int | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise ImportError("the engine ray needs Ray: pip install 'kvzip-press[ray]'") from error
        self._ray = ray
        self._options = options
        self.effort = Effort()
        self._started = not ray.is_initialized()
        if self._started:
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ValueError(f"no Ray cluster at {address!r}: {error}") from error
        resources = ray.cluster_resources()
        self._gpus = int(resources.get("GPU", 0))
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        self._actors = [self._start() for _ in range(workers or self._gpus or nodes)]
        described = ray.get(self._actors[0].describe.remote())
        self.identity, self.tokenizer, self.head_scores, self.provenance = described

    def _start(self) -> Any:
        options = {"num_gpus": 1 if self._gpus else 0, "num_cpus": 1, "scheduling_strategy": "SPREAD"}
        return self._ray.remote(**options)(Worker).remote(self._options)

    def check(self, names: Sequence[str]) -> None:
        """
        Refuse presses that can't run, before any work.

        Raises
        ------
        ValueError
            With the press and the reason.
        """
        try:
            self._ray.get(self._actors[0].check.remote(list(names)))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def run(self, units: Iterable[Unit]) -> Iterator[Record]:
        """
        Yield the records of units as they are finished, in any order.

        Raises
        ------
        RuntimeError
            If a unit's workers were lost time and again.
        """
        waiting = deque(enumerate(units))
        lost: Counter[int] = Counter()
        idle = list(self._actors)
        running: dict[Any, tuple[Any, int, Unit]] = {}
        while waiting or running:
            while waiting and idle:
                number, unit = waiting.popleft()
                actor = idle.pop()
                running[actor.measure.remote(unit)] = (actor, number, unit)
            (done, *_), _ = self._ray.wait(list(running), num_returns=1)
            actor, number, unit = running.pop(done)
            try:
                records, effort = self._ray.get(done)
            except self._ray.exceptions.RayActorError as error:
                lost[number] += 1
                if lost[number] > RETRIES:
                    raise RuntimeError(
                        f"sample {unit.sample.id} of {unit.task} lost its worker {lost[number]} times: {error}"
                    ) from error
                self._actors.remove(actor)
                self._actors.append(self._start())
                idle.append(self._actors[-1])
                waiting.appendleft((number, unit))
                continue
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause from error
            idle.append(actor)
            self.effort.add(effort)
            yield from records

    def close(self) -> None:
        """Stop the workers, and the cluster if it was started here."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._started:
            self._ray.shutdown()
