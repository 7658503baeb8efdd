"""Time the kernels beside their baselines: ``python -m kvzip_press.kernels.bench``."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..backends import REPLAY_BACKENDS
from . import decode, scores
from .case import DTYPES, SHAPES, Case
from .device_check import check_device
from .measure import WrongOutputError, measure
from .results import COLUMNS, HEADER, compare, decode_panels, environment, format_table, plot_decode

SUITES: dict[str, Any] = {"decode": decode, "scores": scores}
_QUICK_ROUNDS = 3


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; what can't be done ends the process before any work."""
    parser = argparse.ArgumentParser(
        prog="python -m kvzip_press.kernels.bench",
        description="Time the kernels beside their baselines. Every result is compared with the reference first; the "
        "exit code is 1 if one is wrong.",
    )
    option = parser.add_argument
    option("--device", choices=("cpu", "cuda"), default="cpu", help="cuda is the first CUDA device (cpu)")
    option("--suite", nargs="+", choices=SUITES, default=SUITES, help="what to measure (all)")
    option("--quick", action="store_true", help="small shapes and few rounds, without verdicts: seconds")
    option("--repeats", type=int, metavar="N", help="rounds of each case (each suite has its own)")
    option("--threads", type=int, metavar="N", help="CPU threads (PyTorch's choice)")
    option("--backend", choices=REPLAY_BACKENDS, default="auto", help="kernel backend to measure (auto)")
    check = "first compare kernels with float64 on small odd shapes (done on a GPU)"
    option("--check", action=argparse.BooleanOptionalAction, help=check)
    option("--csv", type=Path, metavar="PATH", help="replaced if it is there (kernels-<device>.csv)")
    option("--plot", type=Path, metavar="PATH", help="PNG of decode time by context length")
    options = parser.parse_args(argv)
    on_gpu = options.device == "cuda"
    options.csv = options.csv or Path(f"kernels-{options.device}.csv")
    refused = {
        "--device cuda: PyTorch sees no CUDA device; use --device cpu": on_gpu and not torch.cuda.is_available(),
        '--device cuda needs triton: run `pip install "kvzip-press[gpu]"`': on_gpu and not find_spec("triton"),
        f"--repeats must be at least 1, got {options.repeats}": options.repeats is not None and options.repeats < 1,
        f"--threads must be at least 1, got {options.threads}": options.threads is not None and options.threads < 1,
        "--plot shows the decode suite; add decode to --suite": options.plot and "decode" not in options.suite,
        '--plot needs matplotlib: run `pip install "kvzip-press[plot]"`': options.plot and not find_spec("matplotlib"),
        f"{options.csv} is a folder; name a file": options.csv.is_dir(),
        f"{options.plot} is a folder; name a file": options.plot and options.plot.is_dir(),
    }
    for reason, applies in refused.items():
        if applies:
            parser.error(reason)
    options.check = on_gpu if options.check is None else options.check
    options.device = torch.device("cuda:0" if on_gpu else "cpu")
    return options


def _run(options: argparse.Namespace, rows: list[dict[str, Any]], table: list[tuple[str, ...]]) -> None:
    """Measure every case; each is in the CSV and in ``rows`` and ``table`` at once, whatever happens next."""
    device, constants = options.device, environment(options.device)
    cases = [
        Case(name, shape, dtype, length, device, options.backend)
        for name, suite in SUITES.items()
        for shape, dtype in product(SHAPES[device.type], DTYPES[device.type])
        for length in (suite.QUICK_LENGTHS if options.quick else suite.LENGTHS)
        if name in options.suite
    ]
    with options.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        if options.check:
            errors = check_device(device, options.backend)
            largest = ", ".join(f"{error:.1g} in {dtype}" for dtype, error in errors.items())
            print(f"Small odd shapes agree with float64; largest error of a row by its length: {largest}.", flush=True)
        for case in tqdm(cases, desc="kernels", unit="case"):
            suite = SUITES[case.suite]
            usual = _QUICK_ROUNDS if options.quick else suite.ROUNDS[device.type]
            measured = measure(case, suite, options.repeats or usual, with_memory=not options.quick)
            writer.writerows(constants | row for row in measured)
            file.flush()
            rows += measured
            table += compare(suite.comparisons(case), measured, verdicts=not options.quick)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 0, 1 if an output was wrong, 130 if interrupted."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    table: list[tuple[str, ...]] = [HEADER]
    status = 0
    try:
        _run(options, rows, table)
    except WrongOutputError as error:
        print(f"wrong output: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    print(format_table(table))
    if options.quick:
        print("A quick run's shapes are too small for the targets: no verdicts.")
    for row in rows:
        if "note" in row:
            print(f"{row['case']}: {row['note']}")
    print(f"{len(rows)} rows in {options.csv}")
    panels = decode_panels(rows)
    if options.plot is not None and panels:
        plot_decode(panels, options.plot)
        print(f"plot in {options.plot}")
    return status


if __name__ == "__main__":
    sys.exit(main())
