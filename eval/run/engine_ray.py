"""The engine on a Ray cluster: contexts are spread over workers with a model each, on a GPU where there are GPUs."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..results.record import Record
from .grid import Unit
from .identity import Identifier
from .model import ModelOptions
from .sweep import Effort

logger = logging.getLogger(__name__)

# Times that a unit is given to another worker after its own was lost
RETRIES = 3
# Seconds that workers may take to come up before it is said that some are not
PATIENCE = 60.0


class Worker:
    """
    What runs on the cluster: a loaded model.

    It is loaded by a method, as Ray keeps no more than the text of an error that a constructor raises.
    """

    def load(self, options: ModelOptions) -> tuple[Identifier, Any, Record]:
        """Load a model, and return what knows the records, the tokenizer, and the provenance."""
        self.engine = engine = options.load()
        return engine.identifier, engine.tokenizer, engine.provenance

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
    Spreads units over the workers that are up; a unit whose worker is lost goes to another one.

    Every worker loads the model. One that the cluster has no room for yet takes part once it has. `address` is that of
    an existing cluster, as in ``ray.init``; by default a local one is started. There are as many workers as told, else
    one a GPU, or one a node where there are no GPUs.

    ImportError if Ray is not installed, ValueError if the cluster can't be reached or is too small for a worker,
    ConnectionError if workers were lost time and again, while they loaded the model or measured a unit; what a worker
    raised is raised.
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
        self._gpus = int(ray.cluster_resources().get("GPU", 0))
        self._actors: list[Any] = []
        self._starting: dict[Any, Any] = {}
        self._lost_starting = 0
        self._told = False
        try:
            nodes = self._find_room()
            for _ in range(workers or self._gpus or nodes):
                self._start()
            while self._admit(self._first(list(self._starting))) is None:
                pass
        except BaseException:
            self.close()
            raise

    def _find_room(self) -> int:
        """Return the number of nodes that can hold a worker; refuse a cluster without any."""
        need = {"CPU": 1, "GPU": 1} if self._gpus else {"CPU": 1}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        fit = sum(all(node.get(name, 0) >= number for name, number in need.items()) for node in nodes)
        if not fit:
            told = " and ".join(f"{number} {name}" for name, number in need.items())
            has = dict.fromkeys(f"{node.get('CPU', 0):g} CPU and {node.get('GPU', 0):g} GPU" for node in nodes)
            raise ValueError(f"a Ray worker needs {told} on one node; the nodes of the cluster have {', '.join(has)}")
        return fit

    def _start(self) -> None:
        options = {"num_gpus": 1 if self._gpus else 0, "num_cpus": 1, "scheduling_strategy": "SPREAD"}
        actor = self._ray.remote(**options)(Worker).remote()
        self._actors.append(actor)
        self._starting[actor.load.remote(self._options)] = actor
        self._deadline = time.monotonic() + PATIENCE

    def _admit(self, loaded: Any) -> Any:
        """Return a worker that has loaded its model, and note what it told; None and another one if it was lost."""
        actor = self._starting.pop(loaded)
        try:
            self.identifier, self.tokenizer, self.provenance = self._answer(loaded)
        except self._ray.exceptions.RayActorError as error:
            self._lost_starting += 1
            if self._lost_starting > RETRIES:
                raise ConnectionError(
                    f"{self._lost_starting} workers were lost while they loaded the model: {error}"
                ) from error
            self._replace(actor)
            return None
        self._lost_starting = 0
        return actor

    def _replace(self, lost: Any) -> None:
        self._actors.remove(lost)
        self._start()

    def _answer(self, reference: Any) -> Any:
        """Return what a worker returned, or raise what it raised."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def _up(self) -> list[Any]:
        starting = set(self._starting.values())
        return [actor for actor in self._actors if actor not in starting]

    def _first(self, references: list[Any]) -> Any:
        """Return the first of some references that is finished; say when workers are long in coming up."""
        if self._starting and not self._told:
            left = max(0.0, self._deadline - time.monotonic())
            done, _ = self._ray.wait(references, num_returns=1, timeout=left)
            if done:
                return done[0]
            self._tell()
        done, _ = self._ray.wait(references, num_returns=1)
        return done[0]

    def _tell(self) -> None:
        self._told = True
        logger.warning(
            "%d of %d Ray workers are up; the others take part once the cluster has room and their model is loaded",
            len(self._up()),
            len(self._actors),
        )

    def check(self, names: Sequence[str]) -> None:
        """Refuse presses that can't run before any work: ValueError with the press and the reason."""
        self._answer(self._up()[0].check.remote(list(names)))

    def run(self, units: Iterable[Unit]) -> Iterator[Record]:
        """Yield the records of units as they are finished, in any order; raise as the constructor does."""
        waiting = deque(enumerate(units))
        number_of_units = len(waiting)
        lost: Counter[int] = Counter()
        idle = self._up()
        running: dict[Any, tuple[Any, int, Unit]] = {}
        while waiting or running:
            while waiting and idle:
                number, unit = waiting.popleft()
                actor = idle.pop()
                running[actor.measure.remote(unit)] = (actor, number, unit)
            done = self._first([*(self._starting if waiting else ()), *running])
            if done in self._starting:
                if (actor := self._admit(done)) is not None:
                    idle.append(actor)
                continue
            actor, number, unit = running.pop(done)
            try:
                records, effort = self._answer(done)
            except self._ray.exceptions.RayActorError as error:
                lost[number] += 1
                if lost[number] > RETRIES:
                    raise ConnectionError(
                        f"sample {unit.sample.id} of {unit.task} lost its worker {lost[number]} times: {error}"
                    ) from error
                self._replace(actor)
                waiting.appendleft((number, unit))
                continue
            idle.append(actor)
            self.effort.add(effort)
            yield from records
        if len(self._up()) < min(number_of_units, len(self._actors)) and not self._told:
            self._tell()

    def close(self) -> None:
        """Stop the workers, and the cluster if it was started here."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        self._starting = {}
        if self._started:
            self._ray.shutdown()
