"""The command line."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..backends import REPLAY_BACKENDS

SUITES = ("decode", "scores", "model")
_MIN_TOKENS = 64
_TOKENS = {"cpu": 8000, "cuda": 124 << 10}
_QUICK_TOKENS = 400
_QUICK_ROUNDS = 3


@dataclass(frozen=True)
class Options:
    """
    What is measured.

    Parameters
    ----------
    device : torch.device
        ``cpu`` or ``cuda:0``.
    suites : tuple[str, ...]
        Of :data:`SUITES`, in that order.
    quick : bool
        Small shapes and few rounds.
    repeats : int, optional
        Rounds of every case; by default each suite has its own number.
    tokens : int
        Context length of the whole model.
    threads : int, optional
        CPU threads; by default PyTorch's choice.
    backend : str
        Kernel backend.
    check : bool
        Compare kernels on small odd shapes first.
    csv : Path
        Where the rows go.
    plot : Path, optional
        Where the plot of the decode suite goes.
    """

    device: torch.device
    suites: tuple[str, ...] = SUITES
    quick: bool = False
    repeats: int | None = None
    tokens: int = _QUICK_TOKENS
    threads: int | None = None
    backend: str = "auto"
    check: bool = False
    csv: Path = Path("kernels-cpu.csv")
    plot: Path | None = None

    def rounds(self, usual: int) -> int:
        """Rounds of a case, of which a suite usually takes so many."""
        if self.repeats is not None:
            return self.repeats
        return min(usual, _QUICK_ROUNDS) if self.quick else usual


def _at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {text}")
        return value

    return number


def make_parser() -> argparse.ArgumentParser:
    """The options, their defaults and what they mean."""
    parser = argparse.ArgumentParser(
        prog="python -m kvzip_press.kernels.bench",
        description="Time the kernels beside their baselines. Every result is compared with the reference first; the "
        "exit code is 1 if one is wrong.",
    )
    parser.add_argument("--device", choices=sorted(_TOKENS), default="cpu", help="cuda is the first CUDA device (cpu)")
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=SUITES, help="what to measure (all)")
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds, without verdicts: seconds")
    parser.add_argument(
        "--repeats",
        type=_at_least(1),
        metavar="N",
        help="rounds of each case (each suite has its own); a whole model is compressed at most 3 times",
    )
    parser.add_argument(
        "--tokens",
        type=_at_least(_MIN_TOKENS),
        metavar="N",
        help="context of the whole model (8000 on the CPU, 126976 on a GPU)",
    )
    parser.add_argument("--threads", type=_at_least(1), metavar="N", help="CPU threads (PyTorch's choice)")
    parser.add_argument("--backend", choices=REPLAY_BACKENDS, default="auto", help="kernel backend to measure (auto)")
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        help="first compare kernels with float64 on small odd shapes (done on a GPU)",
    )
    parser.add_argument("--csv", type=Path, metavar="PATH", help="replaced if it is there (kernels-<device>.csv)")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="PNG of decode time by context length")
    return parser


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Read the command line; what can't be done ends the process before any work."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    suites = tuple(suite for suite in SUITES if suite in arguments.suite)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device; use --device cpu")
    if arguments.plot is not None:
        if "decode" not in suites:
            parser.error("--plot shows the decode suite; add decode to --suite")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error('--plot needs matplotlib: run `pip install "kvzip-press[plot]"`')
    for path in (arguments.csv, arguments.plot):
        if path is not None and path.is_dir():
            parser.error(f"{path} is a folder; name a file")
    usual_tokens = _QUICK_TOKENS if arguments.quick else _TOKENS[arguments.device]
    return Options(
        device=torch.device("cuda:0" if arguments.device == "cuda" else "cpu"),
        suites=suites,
        quick=arguments.quick,
        repeats=arguments.repeats,
        tokens=arguments.tokens or usual_tokens,
        threads=arguments.threads,
        backend=arguments.backend,
        check=arguments.device == "cuda" if arguments.check is None else arguments.check,
        csv=arguments.csv or Path(f"kernels-{arguments.device}.csv"),
        plot=arguments.plot,
    )
