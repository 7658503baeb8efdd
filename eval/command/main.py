"""The command `kvzip-eval`: measure compressed caches on tasks, and report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...terminal import format_table
from .parser import build_parser

# Nothing here imports torch before a command runs: `--help` and wrong arguments are then answered at once.
if TYPE_CHECKING:
    from ..run.engine_local import LocalEngine
    from ..run.grid import Grid
    from ..run.session import Outcome, Session


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, see :meth:`kvzip_press.arguments.CommandParser.run`."""
    return build_parser(COMMANDS).run(argv)


def _session(arguments: argparse.Namespace) -> Session:
    from ..run.engine_ray import RayEngine
    from ..run.model import ModelOptions
    from ..run.session import Session

    options = ModelOptions(**_those_of(ModelOptions, arguments))
    engine: LocalEngine | RayEngine
    if arguments.engine == "ray":
        engine = RayEngine(options, address=arguments.address, workers=arguments.workers)
    elif arguments.address is not None or arguments.workers is not None:
        raise ValueError("--address and --workers are for --engine ray")
    else:
        engine = options.load()
    told = {name: value for name, value in vars(arguments).items() if name not in ("command", "interrupted")}
    told["output"] = str(arguments.output)
    return Session(engine, arguments.output, told, progress=not arguments.quiet)


def _those_of(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that a dataclass has fields for."""
    given = vars(arguments)
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


def _grid(arguments: argparse.Namespace, **more: Any) -> Grid:
    from ..run.grid import Grid, find_tasks

    return Grid(**{**_those_of(Grid, arguments), "tasks": find_tasks(arguments.tasks), **more})


def _run(arguments: argparse.Namespace) -> None:
    grid = _grid(arguments, lengths=arguments.length or [None])
    with _session(arguments) as session:
        outcome = session.measure(grid)
    _print_outcome(outcome, arguments.output)
    if arguments.format == "kvpress":
        from ..results.answers import same_cells
        from ..results.folder import read_records
        from ..results.kvpress_format import write_folders

        records = outcome.records
        if grid.shard != (1, 1):
            records = same_cells(records, read_records(arguments.output))
        _print_paths(write_folders(records, arguments.output / "kvpress"))


def _demo(arguments: argparse.Namespace) -> None:
    from .demo import demo_grids

    with _session(arguments) as session:
        outcome = session.measure(*demo_grids())
    _print_outcome(outcome, arguments.output)
    _report(argparse.Namespace(results=arguments.output, output=None))


def _print_outcome(outcome: Outcome, folder: Path) -> None:
    from ..results.folder import read_run
    from .console import saved_line, score_tables

    print(score_tables(outcome.records))
    for name, reason in outcome.left_out.items():
        print(f"\nLeft out: {name}: {reason}")
    told = f"{outcome.measured} cells measured, {outcome.found} found finished"
    if outcome.rescored:
        told += f", {outcome.rescored} judged anew from saved answers"
    print(f"\n{told}; {folder} took {saved_line(read_run(folder).get('saved') or {})}")


def _rescore(arguments: argparse.Namespace) -> None:
    from ..results.answers import rescored
    from ..results.folder import SampleLog, note_run, read_records, read_run
    from .console import score_tables

    records = [rescored(record, arguments.scorer) for record in read_records(arguments.results)]
    if arguments.output is None:
        SampleLog(arguments.results).replace_all(records)
    else:
        log = SampleLog(arguments.output)
        for record in records:
            log.add(record)
        run = read_run(arguments.results)
        note_run(arguments.output, run, run.get("saved"), run.get("left_out"))
    print(score_tables(records))


def _export(arguments: argparse.Namespace) -> None:
    from ... import load_model
    from ..results.kvpress_format import DATASET, write_dataset
    from ..run.grid import load_samples

    grid = _grid(arguments, presses=(), ratios=(), lengths=[arguments.length])
    for task, _ in grid.tasks:
        if task.family != DATASET:
            raise ValueError(f"only RULER has a data set in kvpress's form, got {task.name}")
    _, tokenizer = load_model(arguments.model)
    loaded, left_out = load_samples(grid, tokenizer)
    samples: dict[str, list] = {}
    for task, _, sample in loaded:
        samples.setdefault(task.name, []).append(sample)
    print(write_dataset(samples, arguments.output, arguments.length))
    for name, reason in left_out.items():
        print(f"Left out: {name}: {reason}")


def _report(arguments: argparse.Namespace) -> None:
    from ..report.web_page import write_report

    _print_paths(write_report(arguments.results, arguments.output))


def _print_paths(paths: Sequence[Path]) -> None:
    for path in paths:
        print(path)


def _cost(arguments: argparse.Namespace) -> None:
    from ..cost import measure

    measure(arguments)


def _tasks(arguments: argparse.Namespace) -> None:
    from ..tasks.registry import families

    rows = [
        {
            "family": family,
            "task": task.name,
            "sources": ", ".join(task.sources),
            "generated": "imitation" if task.imitation else None,
        }
        for family, tasks in families().items()
        for task in tasks
    ]
    print(format_table(rows, dict.fromkeys(rows[0], "")))


def _presses(arguments: argparse.Namespace) -> None:
    from ..presses.registry import PRESSES

    rows = [{"press": name, "about": kind.about} for name, kind in PRESSES.items()]
    print(format_table(rows, {"press": "", "about": ""}))


# What each command does; its options are in `OPTIONS` of parser.py
COMMANDS = {
    "run": _run,
    "demo": _demo,
    "leaderboard": _run,
    "report": _report,
    "rescore": _rescore,
    "export": _export,
    "cost": _cost,
    "tasks": _tasks,
    "presses": _presses,
}


if __name__ == "__main__":
    sys.exit(main())
