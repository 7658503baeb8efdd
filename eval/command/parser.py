"""Command line of `kvzip-eval`: what can be asked for. Imports nothing that takes time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ... import __version__
from ...arguments import CommandParser, positive, ratio

PROG = "kvzip-eval"
PROTOCOLS = ("agnostic", "aware", "reuse")
PROMPTS = ("paper", "kvpress")
SCORERS = ("paper", "official", "lenient")
BUDGETS = ("equal", "plain")
DTYPES = ("auto", "float32", "bfloat16", "float16")
FORMATS = ("native", "kvpress")
ENGINES = ("local", "ray")
_RESUMABLE = ("run", "demo", "leaderboard")
Command = Callable[[argparse.Namespace], None]


def build_parser(commands: Mapping[str, Command]) -> CommandParser:
    """
    Build the parser.

    Parameters
    ----------
    commands : Mapping
        Function of each command by its name; parsed arguments hold theirs as `command`.
    """
    parser = CommandParser(prog=PROG, description="Measure compressed KV caches on tasks: query-agnostic, resumable.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    added = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add in _ADDED.items():
        command = add(added)
        command.set_defaults(command=commands[name])
        if name in _RESUMABLE:
            command.set_defaults(interrupted="interrupted; the same command goes on where it was")
    return parser


def _run(added: Any) -> argparse.ArgumentParser:
    run: argparse.ArgumentParser = added.add_parser(
        "run",
        help="measure presses on tasks",
        description=(
            "Measure presses on tasks into a results folder. What is finished there is not measured again, whatever "
            "ended the run that did it."
        ),
    )
    run.add_argument(
        "--tasks", nargs="+", required=True, metavar="TASK", help="tasks or families, see `kvzip-eval tasks`"
    )
    _grid_options(run, presses=["full", "kvzip"], ratios=[0.3], prompt="paper", source="generated")
    run.add_argument(
        "--protocols", nargs="+", choices=PROTOCOLS, default=["agnostic"],
        help="what the press sees of the questions: nothing, each, or the first alone (agnostic)",
    )  # fmt: skip
    run.add_argument("--length", nargs="+", type=positive, metavar="N", help="context lengths in tokens (the task's)")
    run.add_argument("--corpus", metavar="PATH", help="text file or folder that serves as haystack (packaged essays)")
    run.add_argument("--max-new-tokens", type=positive, metavar="N", help="cut answers there (the task's own length)")
    run.add_argument(
        "--format", choices=FORMATS, default="native",
        help="`kvpress`: write the folders of kvpress's evaluation too, into RESULTS/kvpress (native)",
    )  # fmt: skip
    _output(run)
    _model_options(run, budget="equal")
    return run


def _demo(added: Any) -> argparse.ArgumentParser:
    demo: argparse.ArgumentParser = added.add_parser(
        "demo",
        help="measure a small fixed grid, and report",
        description="Measure ours at ten ratios and four baselines at two, on RULER, NIAH and SCBench's kv task.",
    )
    _output(demo, Path("results/demo"))
    _model_options(demo, budget="equal")
    return demo


def _leaderboard(added: Any) -> argparse.ArgumentParser:
    leaderboard: argparse.ArgumentParser = added.add_parser(
        "leaderboard",
        help="measure the grid of kvpress's leaderboard and write its folders",
        description=(
            "Measure RULER at 4,096 tokens with kvpress's wording and the leaderboard's fractions, each press with the "
            "plain fraction, and write the folders that a submission is made of into RESULTS/kvpress."
        ),
    )
    ratios = [0.75, 0.5, 0.25, 0.125]
    _grid_options(leaderboard, presses=["full", "kvzip"], ratios=ratios, prompt="kvpress", source="hub")
    leaderboard.add_argument(
        "--length", nargs=1, type=positive, default=[4096], metavar="N", help="context length (4096)"
    )
    _output(leaderboard, Path("results/leaderboard"))
    _model_options(leaderboard, budget="plain")
    leaderboard.set_defaults(
        tasks=["ruler"], protocols=["agnostic"], corpus=None, max_new_tokens=None, format="kvpress"
    )
    return leaderboard


def _export(added: Any) -> argparse.ArgumentParser:
    export: argparse.ArgumentParser = added.add_parser(
        "export",
        help="write generated RULER contexts as a data set",
        description="Write RULER's generated tasks as kvpress's evaluation reads them: FOLDER/LENGTH/test-*.parquet.",
    )
    export.add_argument("--tasks", nargs="+", default=["ruler"], metavar="TASK", help="tasks of RULER (all)")
    export.add_argument("--length", type=positive, default=4096, metavar="N", help="context length (4096)")
    export.add_argument("--limit", type=positive, metavar="N", help="contexts of each task (500)")
    export.add_argument("--seed", type=int, default=42, help="(42)")
    export.add_argument("--corpus", metavar="PATH", help="text file or folder that serves as haystack")
    export.add_argument("--model", metavar="NAME_OR_PATH", help="whose tokenizer measures (the packaged SmolLM2's)")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="where to")
    return export


def _cost(added: Any) -> argparse.ArgumentParser:
    cost: argparse.ArgumentParser = added.add_parser(
        "cost",
        help="measure time and memory of compressing and of decoding",
        description=(
            "Measure presses against the plain prefill and the full cache: seconds, milliseconds a token of all caches "
            "decoded in turn, bytes, peak memory. A speed is told only where the logits are those of the reference."
        ),
    )
    presses = ["kvzip", "kvzip-int8", "kvzip-int4"]
    cost.add_argument(
        "--presses", nargs="+", default=presses, metavar="PRESS", help=f"beside the full cache ({' '.join(presses)})"
    )
    cost.add_argument("--ratios", nargs="+", type=ratio, default=[0.3], metavar="R", help="kept fractions (0.3)")
    lengths = [4000, 8000]
    cost.add_argument("--lengths", nargs="+", type=positive, default=lengths, metavar="N", help="tokens (4000 8000)")
    cost.add_argument("--repeats", type=positive, default=1, metavar="N", help="times are medians over them (1)")
    cost.add_argument("--decode-tokens", type=positive, default=32, metavar="N", help="timed in each repetition (32)")
    cost.add_argument("--corpus", metavar="PATH", help="text file or folder for the contexts (packaged essays)")
    cost.add_argument(
        "--random-model", action="store_true", help="a model of Llama-3.1-8B's shape with random weights instead"
    )
    cost.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the figures as JSON, with their origin")
    _loading_options(cost)
    return cost


def _rescore(added: Any) -> argparse.ArgumentParser:
    rescore: argparse.ArgumentParser = added.add_parser(
        "rescore",
        help="judge saved answers anew",
        description="Judge the saved answers of a results folder anew, in place or into another folder.",
    )
    rescore.add_argument("results", type=Path, metavar="RESULTS", help="the folder of a run")
    rescore.add_argument("--scorer", choices=SCORERS, default="paper", help="how answers are judged (paper)")
    rescore.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="leave RESULTS as it is and write here")
    return rescore


def _report(added: Any) -> argparse.ArgumentParser:
    report: argparse.ArgumentParser = added.add_parser("report", help="write the report of a results folder")
    report.add_argument("results", type=Path, metavar="RESULTS", help="the folder of a run")
    report.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="where to (into RESULTS)")
    return report


def _tasks(added: Any) -> argparse.ArgumentParser:
    tasks: argparse.ArgumentParser = added.add_parser("tasks", help="list the tasks")
    return tasks


def _presses(added: Any) -> argparse.ArgumentParser:
    presses: argparse.ArgumentParser = added.add_parser("presses", help="list the presses")
    return presses


_ADDED: dict[str, Callable[[Any], argparse.ArgumentParser]] = {
    "run": _run,
    "demo": _demo,
    "leaderboard": _leaderboard,
    "report": _report,
    "rescore": _rescore,
    "export": _export,
    "cost": _cost,
    "tasks": _tasks,
    "presses": _presses,
}


def _grid_options(
    parser: argparse.ArgumentParser, *, presses: list[str], ratios: list[float], prompt: str, source: str
) -> None:
    parser.add_argument(
        "--presses", nargs="+", default=presses, metavar="PRESS", help=f"see `kvzip-eval presses` ({' '.join(presses)})"
    )
    parser.add_argument(
        "--ratios", nargs="+", type=ratio, default=ratios, metavar="R",
        help=f"kept fractions ({' '.join(f'{ratio:g}' for ratio in ratios)})",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", choices=PROMPTS, default=prompt, help=f"wording, the paper's or kvpress's ({prompt})"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="contexts of each task (all)")
    parser.add_argument("--seed", type=int, default=42, help="of generated contexts (42)")
    parser.add_argument(
        "--source", default=source, metavar="SOURCE",
        help=f"`generated`, `hub`, or a folder or file with the task's data ({source})",
    )  # fmt: skip
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="measure each N-th context, from the I-th"
    )


def _output(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, required=default is None, default=default, metavar="RESULTS",
        help="the results folder" if default is None else f"the results folder ({default})",
    )  # fmt: skip


def _loading_options(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="NAME_OR_PATH", help="folder or hub name (the packaged SmolLM2-135M-Instruct)"
    )
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="(float32 on a CPU, bfloat16 on a GPU)")
    group.add_argument("--device", default="auto", help="for instance cpu or cuda:0 (a GPU if there is one)")
    group.add_argument("--attention", default="sdpa", metavar="NAME", help="transformers' implementation (sdpa)")
    group.add_argument("--threads", type=positive, metavar="N", help="CPU threads")
    group.add_argument("--head-scores", metavar="FILE", help="for kvzip-head, made by `kvzip-press heads score`")
    group.add_argument("--backend", default="auto", help="kernels of kvzip-press (auto)")
    group.add_argument("--quiet", action="store_true", help="no progress bars")
    return group


def _model_options(parser: argparse.ArgumentParser, *, budget: str) -> None:
    group = _loading_options(parser)
    group.add_argument("--window", type=positive, metavar="N", help="tokens the model can take (by its configuration)")
    group.add_argument(
        "--budget", choices=BUDGETS, default=budget,
        help=f"baselines keep as many pairs as kvzip-press, or what they make of the fraction themselves ({budget})",
    )  # fmt: skip
    group.add_argument("--scorer", choices=SCORERS, default="paper", help="how answers are judged (paper)")
    group.add_argument("--engine", choices=ENGINES, default="local", help="where: in this process, or on Ray (local)")
    group.add_argument("--address", metavar="ADDRESS", help="of a Ray cluster, for instance auto (start a local one)")
    group.add_argument("--workers", type=positive, metavar="N", help="Ray workers (one a GPU, else one a node)")


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    try:
        shard = int(part), int(parts)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a shard is written I/N, as in 1/4, got {text!r}") from None
    if not 1 <= shard[0] <= shard[1]:
        raise argparse.ArgumentTypeError(f"the shard must be one of 1/{shard[1]} to {shard[1]}/{shard[1]}, got {text}")
    return shard
