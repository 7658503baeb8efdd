"""Time the kernels beside their baselines: ``python -m kvzip_press.kernels.bench``."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tqdm import tqdm

from ..memory import return_free_memory
from .arguments import Options, parse_options
from .case import Case, CasePlan, SkippedError
from .decode import decode_plans
from .device_check import check_device
from .environment import available_bytes, environment
from .model import model_plans
from .plot import plot_decode
from .ratios import Ratio, case_ratios, format_ratios
from .results import CsvFile, case_rows, measurements, skipped_row
from .scores import score_plans
from .timing import CudaTimer, HostTimer, Timer, interleave
from .verify import WrongOutputError, verify

_PLANS = {"decode": decode_plans, "scores": score_plans, "model": model_plans}
_INTERRUPTED = 130


class Run:
    """
    Measures cases one after another; what was measured is in the CSV, whatever happens next.

    Parameters
    ----------
    options : Options
        Device and files.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ratios: list[Ratio] = []
        self.rows: list[dict[str, Any]] = []
        self._csv = CsvFile(options.csv, environment(options.device))
        self._timer, self._host_timer = _timers(options.device)

    def measure(self, plan: CasePlan, stage: Callable[[str], Any]) -> None:
        """
        Build, verify and time one case.

        Raises
        ------
        WrongOutputError
            If a variant's output is wrong: then nothing of the case was timed.
        """
        try:
            self._require_memory(plan)
            stage("building")
            rows = self._measured(plan, plan.build(), stage)
        except (SkippedError, torch.OutOfMemoryError) as error:
            rows = [skipped_row(plan, " ".join(str(error).split()))]
        self._csv.write(rows)
        self.rows += rows
        _release_memory(self.options.device)

    def _measured(self, plan: CasePlan, case: Case, stage: Callable[[str], Any]) -> list[dict[str, Any]]:
        verify(plan.name, case, plan.dtype, stage)
        extra_memory = {}
        for variant in case.variants:
            if variant.extra_memory is not None:
                stage(f"memory of {variant.what}")
                extra_memory[variant.what] = variant.extra_memory()
        timer = self._host_timer if case.host_clock else self._timer
        samples = interleave(case.variants, timer, plan.rounds, case.warm_up, stage)
        measured = measurements(case, samples, extra_memory)
        self.ratios += case_ratios(plan.name, case.comparisons, measured)
        return case_rows(plan, case, measured)

    def _require_memory(self, plan: CasePlan) -> None:
        available = available_bytes(self.options.device)
        if available is not None and plan.required_bytes > available:
            raise SkippedError(
                f"needs about {plan.required_bytes / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are free"
            )


def _timers(device: torch.device) -> tuple[Timer, Timer]:
    """For kernels, and for what the host takes part in."""
    if device.type == "cuda":
        return CudaTimer.on(device), HostTimer(lambda: torch.cuda.synchronize(device))
    return HostTimer(), HostTimer()


def _release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        return_free_memory()


def measure_all(run: Run, plans: Iterable[CasePlan]) -> None:
    """Measure every case, with a progress bar."""
    plans = list(plans)
    with tqdm(total=len(plans), desc="kernels", unit="case") as bar:
        for plan in plans:
            bar.set_description(plan.name)
            run.measure(plan, bar.set_postfix_str)
            bar.update()


def _check(options: Options) -> None:
    with tqdm(desc="small odd shapes", unit="input", leave=False) as bar:
        errors = check_device(options.device, options.backend, lambda what: bar.update())
    largest = ", ".join(f"{error:.1g} in {dtype}" for dtype, error in errors.items())
    print(f"Small odd shapes agree with float64; largest error of a row by its length: {largest}.", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 0, 1 if an output was wrong, 130 if interrupted."""
    options = parse_options(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    run = Run(options)
    status = 0
    try:
        if options.check:
            _check(options)
        measure_all(run, (plan for suite in options.suites for plan in _PLANS[suite](options)))
    except WrongOutputError as error:
        print(f"wrong output: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = _INTERRUPTED
    _report(run)
    return status


def _report(run: Run) -> None:
    options = run.options
    if run.ratios:
        print(format_ratios(run.ratios, verdicts=not options.quick))
    if run.ratios and options.quick:
        print("A quick run's shapes are too small for the targets: no verdicts.")
    for row in run.rows:
        if "note" in row:
            print(f"{row['case']}: {row['note']}")
    print(f"{len(run.rows)} rows in {options.csv}")
    if options.plot is not None and any(row["suite"] == "decode" and "what" in row for row in run.rows):
        plot_decode(run.rows, options.plot)
        print(f"plot in {options.plot}")


if __name__ == "__main__":
    sys.exit(main())
