"""The options of `kvzip-eval` and its commands. Imports nothing that takes time, so that `--help` is there at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from ... import __version__
from ...arguments import CommandParser, positive, ratio
from ..choices import BUDGETS, PROTOCOLS, SCORERS, STYLES

PROG = "kvzip-eval"
DTYPES = ("auto", "float32", "bfloat16", "float16")
FORMATS = ("native", "kvpress")
ENGINES = ("local", "ray")


def build_parser(commands: Mapping[str, Callable[[argparse.Namespace], None]]) -> CommandParser:
    """Build the parser, given each command's function by its name; parsed arguments hold theirs as `command`."""
    parser = CommandParser(prog=PROG, description="Measure compressed KV caches on tasks: query-agnostic, resumable.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    added = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add_options, summary) in OPTIONS.items():
        command = added.add_parser(name, help=summary, description=add_options.__doc__)
        command.set_defaults(command=commands[name])
        add_options(command)
    return parser


def _run(parser: argparse.ArgumentParser) -> None:
    """
    Measure presses on tasks into a results folder.

    What is finished there is not measured again, whatever ended the run that did it.
    """
    add = parser.add_argument
    add("--tasks", nargs="+", required=True, metavar="TASK", help="tasks or families, see `kvzip-eval tasks`")
    _grid_options(parser, ratios=[0.3], prompt="paper", source="generated")
    seen = "what the press sees of the questions: nothing, each, or the first alone (agnostic)"
    add("--protocols", nargs="+", choices=PROTOCOLS, default=["agnostic"], help=seen)
    add("--length", nargs="+", type=positive, metavar="N", help="context lengths in tokens (the task's)")
    add("--corpus", metavar="PATH", help="text file or folder that serves as haystack (packaged essays)")
    add("--max-new-tokens", type=positive, metavar="N", help="cut answers there (the task's own length)")
    folders = "`kvpress`: write the folders of kvpress's evaluation too, into RESULTS/kvpress (native)"
    add("--format", choices=FORMATS, default="native", help=folders)
    _session_options(parser, budget="equal")


def _demo(parser: argparse.ArgumentParser) -> None:
    """Measure ours at ten ratios and four baselines at two, on RULER, NIAH and SCBench's kv task."""
    _session_options(parser, budget="equal", output=Path("results/demo"))


def _leaderboard(parser: argparse.ArgumentParser) -> None:
    """
    Measure RULER at 4,096 tokens with kvpress's wording and the leaderboard's fractions.

    Each press takes the plain fraction; the folders that a submission is made of are written into RESULTS/kvpress.
    """
    _grid_options(parser, ratios=[0.75, 0.5, 0.25, 0.125], prompt="kvpress", source="hub")
    parser.add_argument("--length", nargs=1, type=positive, default=[4096], metavar="N", help="context length (4096)")
    _session_options(parser, budget="plain", output=Path("results/leaderboard"))
    parser.set_defaults(tasks=["ruler"], protocols=["agnostic"], corpus=None, max_new_tokens=None, format="kvpress")


def _export(parser: argparse.ArgumentParser) -> None:
    """Write RULER's generated tasks as kvpress's evaluation reads them: FOLDER/LENGTH/test-*.parquet."""
    add = parser.add_argument
    add("--tasks", nargs="+", default=["ruler"], metavar="TASK", help="tasks of RULER (all)")
    add("--length", type=positive, default=4096, metavar="N", help="context length (4096)")
    add("--limit", type=positive, metavar="N", help="contexts of each task (500)")
    add("--seed", type=int, default=42, help="(42)")
    add("--corpus", metavar="PATH", help="text file or folder that serves as haystack")
    add("--model", metavar="NAME_OR_PATH", help="whose tokenizer measures (the packaged SmolLM2's)")
    add("-o", "--output", type=Path, required=True, metavar="FOLDER", help="where to")


def _cost(parser: argparse.ArgumentParser) -> None:
    """
    Measure presses against the plain prefill and the full cache.

    Seconds, milliseconds a token of all caches decoded in turn, bytes, peak memory. A speed is told only where the
    logits are those of the reference.
    """
    add = parser.add_argument
    presses = ["kvzip", "kvzip-int8", "kvzip-int4"]
    add("--presses", nargs="+", default=presses, metavar="PRESS", help=f"beside the full cache ({' '.join(presses)})")
    add("--ratios", nargs="+", type=ratio, default=[0.3], metavar="R", help="kept fractions (0.3)")
    add("--lengths", nargs="+", type=positive, default=[4000, 8000], metavar="N", help="tokens (4000 8000)")
    add("--repeats", type=positive, default=1, metavar="N", help="times are medians over them (1)")
    add("--decode-tokens", type=positive, default=32, metavar="N", help="timed in each repetition (32)")
    add("--corpus", metavar="PATH", help="text file or folder for the contexts (packaged essays)")
    add("--random-model", action="store_true", help="a model of Llama-3.1-8B's shape with random weights instead")
    add("-o", "--output", type=Path, metavar="FILE", help="write the figures as JSON, with their origin")
    _loading_options(parser)


def _rescore(parser: argparse.ArgumentParser) -> None:
    """Judge the saved answers of a results folder anew, in place or into another folder."""
    parser.add_argument("results", type=Path, metavar="RESULTS", help="the folder of a run")
    parser.add_argument("--scorer", choices=SCORERS, default="paper", help="how answers are judged (paper)")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="leave RESULTS as it is and write here")


def _report(parser: argparse.ArgumentParser) -> None:
    """Write the report of a results folder: report.md and report.html."""
    parser.add_argument("results", type=Path, metavar="RESULTS", help="the folder of a run")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="where to (into RESULTS)")


def _list(parser: argparse.ArgumentParser) -> None:
    """List all that there are, by the names that other commands take."""


def _grid_options(parser: argparse.ArgumentParser, *, ratios: list[float], prompt: str, source: str) -> None:
    add = parser.add_argument
    presses = "see `kvzip-eval presses` (full kvzip)"
    add("--presses", nargs="+", default=["full", "kvzip"], metavar="PRESS", help=presses)
    kept = f"kept fractions ({' '.join(f'{kept:g}' for kept in ratios)})"
    add("--ratios", nargs="+", type=ratio, default=ratios, metavar="R", help=kept)
    add("--prompt", choices=STYLES, default=prompt, help=f"wording, the paper's or kvpress's ({prompt})")
    add("--limit", type=positive, metavar="N", help="contexts of each task (all)")
    add("--seed", type=int, default=42, help="of generated contexts (42)")
    where = f"`generated`, `hub`, or a folder or file with the task's data ({source})"
    add("--source", default=source, metavar="SOURCE", help=where)
    add("--shard", type=_shard, default=(1, 1), metavar="I/N", help="measure each N-th context, from the I-th")


def _loading_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", metavar="NAME_OR_PATH", help="folder or hub name (the packaged SmolLM2-135M-Instruct)")
    add("--dtype", choices=DTYPES, default="auto", help="(float32 on a CPU, bfloat16 on a GPU)")
    add("--device", default="auto", help="for instance cpu or cuda:0 (a GPU if there is one)")
    add("--attention", default="sdpa", metavar="NAME", help="transformers' implementation (sdpa)")
    add("--threads", type=positive, metavar="N", help="CPU threads")
    add("--head-scores", metavar="FILE", help="for kvzip-head, made by `kvzip-press heads score`")
    add("--backend", default="auto", help="kernels of kvzip-press (auto)")
    add("--quiet", action="store_true", help="no progress bars")
    return group


def _session_options(parser: argparse.ArgumentParser, *, budget: str, output: Path | None = None) -> None:
    told = "the results folder" if output is None else f"the results folder ({output})"
    missing = output is None
    parser.add_argument("-o", "--output", type=Path, required=missing, default=output, metavar="RESULTS", help=told)
    add = _loading_options(parser).add_argument
    add("--window", type=positive, metavar="N", help="tokens the model can take (by its configuration)")
    fair = f"baselines keep as many pairs as kvzip-press, or what they make of the fraction themselves ({budget})"
    add("--budget", choices=BUDGETS, default=budget, help=fair)
    add("--scorer", choices=SCORERS, default="paper", help="how answers are judged (paper)")
    add("--engine", choices=ENGINES, default="local", help="where: in this process, or on Ray (local)")
    add("--address", metavar="ADDRESS", help="of a Ray cluster, for instance auto (start a local one)")
    add("--workers", type=positive, metavar="N", help="Ray workers (one a GPU, else one a node)")
    parser.set_defaults(interrupted="interrupted; the same command goes on where it was")


# Of each command: what adds its options, and says in its help what it does; its line in the list of commands
OPTIONS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "run": (_run, "measure presses on tasks"),
    "demo": (_demo, "measure a small fixed grid, and report"),
    "leaderboard": (_leaderboard, "measure the grid of kvpress's leaderboard and write its folders"),
    "report": (_report, "write the report of a results folder"),
    "rescore": (_rescore, "judge saved answers anew"),
    "export": (_export, "write generated RULER contexts as a data set"),
    "cost": (_cost, "measure time and memory of compressing and of decoding"),
    "tasks": (_list, "list the tasks"),
    "presses": (_list, "list the presses"),
}


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    try:
        shard = int(part), int(parts)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a shard is written I/N, as in 1/4, got {text!r}") from None
    if not 1 <= shard[0] <= shard[1]:
        raise argparse.ArgumentTypeError(f"the shard must be one of 1/{shard[1]} to {shard[1]}/{shard[1]}, got {text}")
    return shard
