"""Measure grids into a results folder: what is finished there is not measured again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..choices import SCORERS
from ..presses.registry import FULL, Variant
from ..results.answers import failed, key_of, rescored
from ..results.folder import SampleLog, note_run
from ..results.record import Record
from .engine_local import LocalEngine
from .engine_ray import RayEngine
from .grid import Grid, Unit, load_samples, make_units


@dataclass(frozen=True)
class Outcome:
    """What a run has done."""

    records: list[Record]  # all of the grid
    measured: int  # cells measured now
    found: int  # found finished
    rescored: int  # judged anew from saved answers
    left_out: dict[str, str]  # tasks of a family that could not be had, with the reason


class Session:
    """An engine and a results folder, which is made if missing, and where the command's arguments are noted."""

    def __init__(
        self,
        engine: LocalEngine | RayEngine,
        folder: Path,
        arguments: dict[str, Any] | None = None,
        *,
        progress: bool = True,
    ) -> None:
        self.engine = engine
        model = engine.identifier.run.model["name"]
        self.provenance: Record = engine.provenance | {"model": model, "arguments": arguments or {}}
        self.log = SampleLog(folder)
        self.progress = progress
        self._noted: dict[str, int] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    def measure(self, *grids: Grid) -> Outcome:
        """
        Measure what of some grids is not finished; what the sweep saved is noted with each record.

        ValueError if a press can't run, or there is no context to measure on.
        """
        names = dict.fromkeys(name for grid in grids for name in grid.presses if name != FULL)
        self.engine.check(list(names))
        units, left_out = self._units(grids)
        identify = self.engine.identifier.identity
        keys = [{variant: key_of(identify(unit, variant)) for variant in unit.variants} for unit in units]
        self.provenance["planned cells"] = sum(map(len, keys))
        self._note()
        judged = sum(map(self._judge_anew, units, keys))
        pending = [
            replace(unit, variants=left)
            for unit, of_unit in zip(units, keys, strict=True)
            if (left := tuple(variant for variant, key in of_unit.items() if not self._finished(key)))
        ]
        measured = sum(len(unit.variants) for unit in pending)
        if pending:
            with tqdm(total=measured, desc="evaluation", unit="cell", smoothing=0, disable=not self.progress) as bar:
                for record in self.engine.run(pending):
                    self.log.add(record)
                    self._note()
                    bar.set_postfix_str("{task} {press} {ratio:g}".format(**record), refresh=False)
                    bar.update()
        self._note(left_out)
        cells = self.log.records
        records = [cells[key] for of_unit in keys for key in of_unit.values() if key in cells]
        return Outcome(records, measured, len(records) - measured - judged, judged, left_out)

    def _units(self, grids: Sequence[Grid]) -> tuple[list[Unit], dict[str, str]]:
        """Return the units of all grids, and the tasks that could not be had, with the reason."""
        units: list[Unit] = []
        left_out: dict[str, str] = {}
        found_samples = False
        for grid in grids:
            samples, missing = load_samples(grid, self.engine.tokenizer, progress=self.progress)
            units += make_units(samples, grid)
            left_out |= missing
            found_samples |= bool(samples)
        if not found_samples:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise ValueError(f"no contexts to measure on: {reasons or 'no tasks were named'}")
        if not units:
            shards = ", ".join("{}/{}".format(*grid.shard) for grid in grids)
            raise ValueError(f"the shard {shards} holds no contexts: there are fewer contexts than shards")
        return units, left_out

    def _finished(self, key: str) -> bool:
        record = self.log.records.get(key)
        return record is not None and not failed(record)

    def _judge_anew(self, unit: Unit, keys: dict[Variant, str]) -> int:
        """Where the answers of a cell were saved under another scorer, judge them instead of asking again."""
        judged = 0
        for variant, key in keys.items():
            if key not in self.log.records:
                identity = self.engine.identifier.identity(unit, variant)
                others = (key_of(identity, scorer=scorer) for scorer in SCORERS)
                if (saved := next(filter(self._finished, others), None)) is not None:
                    self.log.add(rescored(self.log.records[saved], identity["scorer"]))
                    judged += 1
        return judged

    def _note(self, left_out: dict[str, str] | None = None) -> None:
        """Note where the records come from, and what sharing prefills and replays has saved since the last note."""
        now = asdict(self.engine.effort)
        since = {name: number - self._noted.get(name, 0) for name, number in now.items()}
        note_run(self.log.folder, self.provenance, since, left_out)
        self._noted = now
