"""The command `kvzip-eval`: measure compressed caches on tasks, and report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...terminal import format_table
from .parser import build_parser

# Nothing here imports torch before a command runs: `--help` and wrong arguments are then answered at once.
if TYPE_CHECKING:
    from ..run.runner import Outcome
    from ..run.session import Session


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, see :meth:`kvzip_press.arguments.CommandParser.run`."""
    return build_parser(COMMANDS).run(argv)


def _session(arguments: argparse.Namespace) -> Session:
    from ..run.session import ModelOptions, Session, plain_arguments

    options = ModelOptions(**{name: getattr(arguments, name) for name in ModelOptions.__dataclass_fields__})
    told, progress = plain_arguments(arguments), not arguments.quiet
    if arguments.engine == "ray":
        cluster = {"address": arguments.address, "workers": arguments.workers}
        return Session.ray(options, arguments.output, told, progress=progress, **cluster)
    if arguments.address is not None or arguments.workers is not None:
        raise ValueError("--address and --workers are for --engine ray")
    return Session.local(options, arguments.output, told, progress=progress)


def _run(arguments: argparse.Namespace) -> None:
    from ..run.runner import Grid
    from ..run.session import find_tasks

    grid = Grid(
        presses=tuple(arguments.presses),
        ratios=tuple(arguments.ratios),
        protocols=tuple(arguments.protocols),
        prompt=arguments.prompt,
        source=arguments.source,
        corpus=arguments.corpus,
        lengths=tuple(arguments.length or [None]),
        limit=arguments.limit,
        seed=arguments.seed,
        max_new_tokens=arguments.max_new_tokens,
        shard=arguments.shard,
    )
    tasks = find_tasks(arguments.tasks)
    with _session(arguments) as session:
        outcome = session.measure((tasks, grid))
    _print_outcome(outcome, arguments.output)
    if arguments.format == "kvpress":
        from ..results.folder import read_records
        from ..results.kvpress_format import write_folders
        from ..results.records import same_cells

        records = outcome.records
        if grid.shard != (1, 1):
            records = same_cells(records, read_records(arguments.output))
        for folder in write_folders(records, arguments.output / "kvpress"):
            print(folder)


def _demo(arguments: argparse.Namespace) -> None:
    from .demo import demo_grids

    with _session(arguments) as session:
        outcome = session.measure(*demo_grids())
    _print_outcome(outcome, arguments.output)
    _print_report(arguments.output, None)


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
    from ..results.folder import SampleLog, note_run, read_records, read_run
    from ..results.records import rescored
    from .console import score_tables

    records = [rescored(record, arguments.scorer) for record in read_records(arguments.results)]
    target = arguments.output or arguments.results
    log = SampleLog(target)
    if arguments.output is None:
        log.replace_all(records)
    else:
        for record in records:
            log.add(record)
        run = read_run(arguments.results)
        note_run(target, run, run.get("saved"), run.get("left_out"))
    print(score_tables(records))


def _export(arguments: argparse.Namespace) -> None:
    from ... import load_model
    from ..results.kvpress_format import DATASET, write_dataset
    from ..run.runner import Grid, load_samples
    from ..run.session import find_tasks

    tasks = find_tasks(arguments.tasks)
    for task, _ in tasks:
        if task.family != DATASET:
            raise ValueError(f"only RULER has a data set in kvpress's form, got {task.name}")
    _, tokenizer = load_model(arguments.model)
    wanted = {"corpus": arguments.corpus, "limit": arguments.limit, "seed": arguments.seed}
    loaded, left_out = load_samples(tasks, Grid((), (), lengths=(arguments.length,), **wanted), tokenizer)
    samples: dict[str, list] = {}
    for task, _, sample in loaded:
        samples.setdefault(task.name, []).append(sample)
    print(write_dataset(samples, arguments.output, arguments.length))
    for name, reason in left_out.items():
        print(f"Left out: {name}: {reason}")


def _report(arguments: argparse.Namespace) -> None:
    _print_report(arguments.results, arguments.output)


def _print_report(results: Path, output: Path | None) -> None:
    from ..report.web_page import write_report

    for path in write_report(results, output):
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
    print(format_table(rows, dict.fromkeys(["family", "task", "sources", "generated"], "")))


def _presses(arguments: argparse.Namespace) -> None:
    from ..presses.registry import PRESSES

    rows = [{"press": name, "about": kind.about} for name, kind in PRESSES.items()]
    print(format_table(rows, {"press": "", "about": ""}))


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
