"""The kernel benchmarks: what they compare, verify, write and refuse. No test looks at a time that was measured."""

import csv
import itertools
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvzip_press.kernels.bench import __main__ as bench
from kvzip_press.kernels.bench import case, decode, device_check, measure, results, scores
from kvzip_press.kernels.bench.case import LSE, Case, Comparison, Shape, Variant
from kvzip_press.kernels.bench.measure import WrongOutputError

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
TINY = Shape(2, 3, 16)
CASE = Case("decode", TINY, torch.float32, 60, CPU, "auto")
CHUNK = Case("scores", TINY, torch.bfloat16, 16, CPU, "auto")


@pytest.fixture
def run_tiny(monkeypatch, tmp_path):
    """Run the command on tiny shapes: its status and the rows of its CSV."""
    monkeypatch.setattr(bench, "SHAPES", {"cpu": (TINY,)})
    monkeypatch.setattr(decode, "QUICK_LENGTHS", (60, 128))
    monkeypatch.setattr(scores, "QUICK_LENGTHS", (16,))
    monkeypatch.setattr(device_check, "DECODE_CHECKS", device_check.DECODE_CHECKS[:2])
    monkeypatch.setattr(device_check, "REPLAY_CHECKS", device_check.REPLAY_CHECKS[:1])

    def run(*argv: str) -> tuple[int, list[dict[str, str]]]:
        path = tmp_path / "new" / "rows.csv"
        status = bench.main(["--quick", "--csv", str(path), *argv])
        with path.open(newline="", encoding="utf-8") as file:
            return status, list(csv.DictReader(file))

    return run


def test_defaults(monkeypatch):
    options = bench.parse_options([])
    assert options.device == CPU and list(options.suite) == ["decode", "scores"] and options.backend == "auto"
    assert options.csv == Path("kernels-cpu.csv") and not options.check and options.repeats is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "find_spec", lambda name: name)
    options = bench.parse_options(["--device", "cuda", "--suite", "scores"])
    assert options.device == CUDA and options.suite == ["scores"]
    assert options.csv == Path("kernels-cuda.csv") and options.check
    assert not bench.parse_options(["--device", "cuda", "--no-check"]).check


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--device cuda", "PyTorch sees no CUDA device; use --device cpu"),
        ("--device tpu", "invalid choice: 'tpu'"),
        ("--suite prefill", "invalid choice: 'prefill'"),
        ("--repeats 0", "--repeats must be at least 1, got 0"),
        ("--threads -1", "--threads must be at least 1, got -1"),
        ("--repeats many", "'many'"),
        ("--backend flash", "invalid choice: 'flash'"),
        ("--plot x.png --suite scores", "add decode to --suite"),
        ("--plot x.png", 'pip install "kvzip-press[plot]"'),
        ("--csv .", ". is a folder; name a file"),
    ],
)
def test_refused_arguments(argv, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        bench.parse_options(argv.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("heads", [2, 3, 8, 40])
@pytest.mark.parametrize("context", [60, 8000, 126976])
def test_heads_keep_5_to_60_percent_and_30_on_average(heads, context):
    lengths = case.head_lengths(heads, context)
    assert sum(lengths) == round(0.3 * heads * context) and case.head_lengths(1, 100) == [30]
    assert lengths[0] == round(0.05 * context) and lengths == sorted(lengths)
    assert heads == 2 or abs(lengths[-1] - 0.6 * context) <= max(0.005 * context, heads)


def test_variants_take_turns(monkeypatch):
    order = []
    monkeypatch.setattr(measure, "sample", lambda variant, on_gpu: order.append(variant.what) or float(len(order)))
    samples = measure.interleave([Variant(name, print) for name in "abc"], 20, on_gpu=False)
    rounds = [order[first : first + 3] for first in range(0, 63, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds) and len({tuple(one) for one in rounds}) > 1
    assert {name: len(times) for name, times in samples.items()} == {"a": 20, "b": 20, "c": 20}
    assert min(itertools.chain(*samples.values())) == 4  # three calls of the warm-up came before


def test_a_sample_is_the_mean_of_calls_in_a_row(monkeypatch):
    log, testing = [], pytest.importorskip("triton.testing")
    variant = Variant("x", lambda: log.append("run"), calls=5)
    monkeypatch.setattr(testing, "do_bench", lambda run, **options: run() or float(len(log)))
    assert measure.sample(variant, on_gpu=True) == 1.0  # five runs by five calls
    assert measure.sample(variant, on_gpu=False) > 0 and log == ["run"] * 10


@pytest.mark.parametrize(
    ("what", "baselines", "quantity", "target", "line"),
    [
        ("kept", ["full"], "time", 0.25, "full; time; 2 ms; 10 ms; 0.2 x; <= 0.25; yes"),
        ("kept", ["full"], "time", 0.19, "full; time; 2 ms; 10 ms; 0.2 x; <= 0.19; NO"),
        ("kept", ["full", "faster", "not there"], "speed", 4.0, "faster; speed; 2 ms; 8 ms; 4 x; >= 4; yes"),
        ("kept", ["full"], "memory", 0.2, "full; memory; 1 MiB; 4 MiB; 0.25 x; <= 0.2; NO"),
        ("kept", ["full"], "bandwidth", 1.25, "full; bandwidth; 1.5 GB/s; 1 GB/s; 1.5 x; >= 1.25; yes"),
        ("kept", ["full"], "time", None, "full; time; 2 ms; 10 ms; 0.2 x; -; -"),
        ("faster", ["full"], "memory", None, None),  # not measured
        ("not there", ["full"], "time", None, None),
        ("kept", ["not there"], "time", None, None),
    ],
)
def test_ratios_from_given_times(what, baselines, quantity, target, line):
    full = {"case": "one", "what": "full", "p50_ms": 10.0, "gb_per_s": 1.0, "peak_extra_mib": 4.0}
    faster = {**full, "what": "faster", "p50_ms": 8.0, "gb_per_s": None, "peak_extra_mib": None}
    rows = [full, faster, {**full, "what": "kept", "p50_ms": 2.0, "gb_per_s": 1.5, "peak_extra_mib": 1.0}]
    comparison = Comparison(what, tuple(baselines), quantity, target)
    assert list(results.compare([comparison], rows)) == ([("one", what, *line.split("; "))] if line else [])
    assert all(found[-2:] == ("-", "-") for found in results.compare([comparison], rows, verdicts=False))
    assert results.format_table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"


def test_row_error_is_by_row():
    right = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [-torch.inf, 1.0]])
    tenth, beside_zeros = right.clone(), right.clone()
    tenth[1, 0] += 0.05  # of a short row
    beside_zeros[2, 0] = 1e-9
    assert measure.row_error(right.clone(), right) == measure.row_error(torch.zeros(0, 4), torch.zeros(0, 4)) == 0.0
    assert measure.row_error(tenth, right) == pytest.approx(0.1)
    assert measure.row_error(tenth, right, floor=1.0) == pytest.approx(0.05)
    assert measure.row_error(beside_zeros, right) == math.inf


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 1.001])
def test_wrong_results_are_named(broken):
    right, found = {"the output": torch.ones(2, 4), LSE: torch.zeros(2, 1)}, (torch.ones(2, 4), torch.zeros(2, 1))
    assert measure.verify("x", found, right, torch.float32) == 0.0
    found[0][1, 2] = broken
    for states, message in ((found[0], "a row is off the reference by"), (torch.ones(3, 4), "has shape (3, 4)")):
        with pytest.raises(WrongOutputError, match=rf"^kernel \(cpu\): (in )?the output {re.escape(message)}"):
            measure.verify("kernel (cpu)", (states, found[1]), right, torch.float32)


def test_results_are_compared_in_the_type_of_the_variant():
    near = Variant("near", lambda: torch.full((1, 4), 1.001), expected=lambda: {"it": torch.ones(1, 4)})
    with pytest.raises(WrongOutputError, match=r"^decode 2 x 16 \(G 3\) float32 60, near \(torch\)"):
        measure.measure(CASE, SimpleNamespace(variants=lambda case: [near]), 1, True)
    near = replace(near, dtype=torch.bfloat16, peak_memory=lambda: 1 << 20)
    (row,) = measure.measure(CASE, SimpleNamespace(variants=lambda case: [near]), 3, True)
    assert row["rounds"] == 3 and row["peak_extra_mib"] == 1.0


def test_what_cannot_be_measured_is_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for suite, each in ((decode, CASE), (scores, CHUNK)):
        (row,) = measure.measure(replace(each, device=CUDA, length=1 << 30), suite, 1, False)
        assert row["note"].startswith("skipped: needs about ") and row["note"].endswith(" GiB, 3.0 GiB are free")
    case.require_memory(replace(CASE, device=CUDA), 3 << 30)
    case.require_memory(CASE, 1)


def test_small_odd_shapes_agree_on_the_cpu():
    errors = device_check.check_device(CPU, "auto")
    assert set(errors) == {"float32", "bfloat16", "float16"} and max(errors.values()) < 5e-3


def test_quick_run(run_tiny, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    status, rows = run_tiny("--check", "--plot", str(tmp_path / "times.png"))
    output = capsys.readouterr().out
    assert status == 0 and "Small odd shapes agree" in output and "no verdicts" in output and "34 rows" in output
    assert (tmp_path / "times.png").read_bytes()[:4] == b"\x89PNG" and list(rows[0]) == list(results.COLUMNS)
    of_decode = [row for row in rows if row["suite"] == "decode"]
    assert len(of_decode) == 2 * 2 * 6 and len(rows) - len(of_decode) == 2 * 5
    kinds = [decode.FULL_GROUPED, decode.FULL_KERNEL, decode.KEPT_KERNEL, decode.INT8, decode.INT4, decode.READ]
    assert [row["what"] for row in of_decode[:6]] == kinds and of_decode[0]["case"] == CASE.name
    found = {(row["context"], row["dtype"]) for row in of_decode}
    assert found == {*itertools.product(("60", "128"), ("float32", "bfloat16"))}
    for row in rows:
        assert (row["num_kv_heads"], row["group"], row["head_dim"], row["rounds"]) == ("2", "3", "16", "3")
        assert row["torch"] == torch.__version__ and row["commit"] and row["date"]
        assert float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
    full, _, kept, int8, int4, read = of_decode[:6]
    assert full["bytes_read"] == str(2 * 2 * 60 * 16 * 4) and (kept["kept"], kept["backend"]) == ("0.3", "cpu")
    assert kept["bytes_read"] == read["bytes_read"] == str(2 * sum(case.head_lengths(2, 60)) * 16 * 4)
    assert int(int4["bytes_read"]) < int(int8["bytes_read"]) and float(read["bandwidth_share"]) == 1.0
    for row in of_decode[:6]:
        rate = int(row["bytes_read"]) / float(row["p50_ms"]) / 1e6
        assert float(row["gb_per_s"]) == pytest.approx(rate)
        assert float(row["bandwidth_share"]) == pytest.approx(rate / float(read["gb_per_s"]))


@pytest.mark.parametrize(
    ("module", "attend", "index", "message"),
    [
        (decode, "decode_attention", 0, "decode 2 x 16 (G 3) float32 60, full, kernel (cpu): in the output a row"),
        (scores, "replay_attention", 1, "chunk 16, replay_attention, max (cpu): in the scores a row"),
        (device_check, "replay_attention", 1, "replay of dtype torch.bfloat16, local True: in the scores a row"),
    ],
)
def test_nothing_wrong_is_timed(module, attend, index, message, run_tiny, monkeypatch, capsys):
    right = getattr(module, attend)

    def wrong(*inputs, backend, **options):
        found = list(right(*inputs, backend=backend, **options))
        found[index] = found[index] * (1.1 if backend == "auto" else 1)
        return tuple(found)

    monkeypatch.setattr(module, attend, wrong)
    assert run_tiny("--check", "--suite", "scores" if module is scores else "decode") == (1, [])
    assert message in capsys.readouterr().err


def test_an_interrupted_run_leaves_what_was_measured(run_tiny, monkeypatch, capsys):
    monkeypatch.setattr(scores, "replay_input", lambda case: (_ for _ in ()).throw(KeyboardInterrupt))
    status, rows = run_tiny()
    printed = capsys.readouterr()
    assert status == 130 and len(rows) == 24
    assert "interrupted" in printed.err and decode.KEPT_KERNEL in printed.out


def test_scoring_takes_a_twentieth_of_the_memory_of_the_whole_matrix(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    chunk, q_len = Case("scores", Shape(3, 3, 64), torch.float32, 2048, CPU, "auto"), scores._PROMPT + 2048
    ours, whole = (scores.peak_memory(what, chunk) for what in (scores.ATTENTION, scores.MATERIALISED))
    matrix = 4 * 3 * 3 * q_len * (scores._ANCHOR + 2048 + q_len)
    # None where the high-water mark can't be reset; two of the matrix are alive at a time
    assert whole is None or 20 * ours <= 1.9 * matrix < whole < 6 * matrix


def test_what_a_gpu_compares_on_the_cpu(monkeypatch):
    monkeypatch.setattr(decode, "_COPY_BYTES", 1 << 12)
    small = replace(CASE, dtype=torch.bfloat16, length=100)
    made = decode.gpu_variants(decode.decode_input(small), decode.variants(small)[:-1])
    rows = {row["what"]: row for row in measure.measure(small, SimpleNamespace(variants=lambda case: made), 2, True)}
    assert len(rows) == len(made) and rows[decode.COPY]["bytes_read"] == 2 << 12
    assert rows[decode.COPY]["bandwidth_share"] == 1.0
    of_scores = {each.what for each in scores.variants(CHUNK)} | {scores.UNSCORED}  # in the interpreter, below
    for suite, names in ((decode, rows.keys() | {decode.KEPT_FLASH}), (scores, of_scores)):
        for each in suite.comparisons(replace(CHUNK, device=CUDA)):
            assert each.what in names and set(each.baselines) & names
    targets = [each.target for each in scores.comparisons(replace(CHUNK, length=2048))]
    assert targets[:3] == [0.4, 0.1, 2.5] and not any(each.target for each in scores.comparisons(CHUNK))


def test_plotted_lines():
    row = {**results.case_row(CASE), "bandwidth_share": 0.8}
    full = [
        {**row, "what": decode.FULL_GROUPED, "context": context, "p50_ms": context / 512} for context in (1024, 2048)
    ]
    names = (decode.READ, decode.FULL_KERNEL + decode.ROW, decode.KEPT_KERNEL)
    others = [{**row, "what": what, "p50_ms": 1.0} for what in names]
    (lines,) = results.decode_panels([*full, *others, {"suite": "scores", "what": "x"}, {"suite": "decode"}]).values()
    kept = {decode.KEPT_KERNEL: {60: 1.0}, results.BOUND: {60: 0.8}}
    assert lines == {decode.FULL_GROUPED: {1024: 2.0, 2048: 4.0}, **kept}


def test_what_only_a_gpu_runs_in_tritons_interpreter():
    pytest.importorskip("triton")
    code = """
from test_kernel_bench import CASE, CHUNK, Shape, decode, measure, replace, scores, torch

torch.set_num_threads(1)
for suite, each in ((decode, CASE), (scores, CHUNK)):
    each = replace(each, shape=Shape(1, 2, 32), dtype=torch.bfloat16, backend="triton")
    print([row["what"] for row in measure.measure(each, suite, 1, False) if row["backend"] == "triton"])
"""
    interpreter = {**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=Path(__file__).parent, env=interpreter, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    of_decode = [decode.FULL_KERNEL, decode.KEPT_KERNEL, decode.INT8, decode.INT4]
    assert run.stdout.splitlines() == [str(of_decode), str([scores.ATTENTION, scores.LOGIT, scores.UNSCORED])]
