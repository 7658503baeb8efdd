"""What the CPU kernels are made of: vectors, threads, and how much memory they take."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from numba import njit

from kvzip_press.kernels.decode import cpu as cpu_decode
from kvzip_press.kernels.replay import cpu_softmax
from kvzip_press.kernels.replay.blocked import Columns
from kvzip_press.kernels.simd import rows as cpu_rows
from kvzip_press.kernels.simd import threads as cpu_threads
from kvzip_press.kernels.simd import vectors as cpu_simd
from kvzip_press.kernels.storage.segments import Segments


def apply(function, numbers: np.ndarray) -> np.ndarray:
    """Run a function of one vector over a float32 array whose size is a multiple of 16."""

    @njit
    def run(source, target, count):
        for index in range(0, count, 16):
            cpu_simd.store(target + 4 * index, function(cpu_simd.load(source + 4 * index)))

    result = np.full_like(numbers, np.nan)
    run(numbers.ctypes.data, result.ctypes.data, len(numbers))
    return result


def test_exponential_against_float64():
    """Within 3e-7 of the true value over the whole range, 0 far below it, NaN for NaN."""
    numbers = np.linspace(-86.9, 88, 16 * 5000).astype(np.float32)
    truth = np.exp(numbers.astype(np.float64))
    assert np.abs(apply(cpu_simd.exponential, numbers) / truth - 1).max() < 3e-7
    special = np.array([-np.inf, -1e30, -88, np.nan, 0] + [1] * 11, np.float32)
    result = apply(cpu_simd.exponential, special)
    assert (result[:3] == 0).all() and np.isnan(result[3]) and result[4] == 1


def test_softcap_against_float64():
    """``cap * tanh(x / cap)`` for small, large and infinite logits, with its sign."""

    @njit
    def cap(x):
        return cpu_simd.capped(x, np.float32(50.0))

    numbers = np.concatenate([np.linspace(-300, 300, 16 * 100), [-np.inf, np.inf, 0] + [1] * 13]).astype(np.float32)
    np.testing.assert_allclose(apply(cap, numbers), 50 * np.tanh(numbers.astype(np.float64) / 50), atol=1e-5)


@pytest.mark.parametrize("hardware", [True, False])
def test_every_float16_is_read_exactly(hardware, monkeypatch):
    """All finite float16, subnormal ones too, with the processor's conversion and with integer arithmetic."""
    monkeypatch.setattr(cpu_simd, "_half_in_hardware", lambda: hardware)
    load_float16 = cpu_simd._loader(cpu_simd.FLOAT16)

    @njit
    def run(source, target, count):
        for index in range(0, count, 16):
            cpu_simd.store(target + 4 * index, load_float16(source + 2 * index))

    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = np.where(np.isfinite(numbers), numbers, np.float16(0))
    result = np.empty(len(numbers), np.float32)
    run(numbers.ctypes.data, result.ctypes.data, len(numbers))
    assert (result == numbers.astype(np.float32)).all()


@pytest.mark.parametrize("channels", [1, 2, 15, 16, 17, 40, 64, 80])
@pytest.mark.parametrize("kind", range(5))
def test_rows_of_any_format_become_float32_rows(kind, channels):
    """Each format and length, read without touching what lies behind, zeros up to the next vector."""
    if kind == cpu_simd.HALF_BYTES:
        channels *= 2
    numbers = torch.arange(3 * channels).view(3, channels) % 13
    sources = [
        numbers.float(),
        numbers.bfloat16(),
        numbers.half(),
        numbers.to(torch.uint8),
        (numbers[:, : channels // 2] | numbers[:, -(channels // 2) :] << 4).to(torch.uint8),
    ]
    source = sources[kind].contiguous()
    width = cpu_rows.padded.py_func(channels)
    target, spare = torch.full((3, width), torch.nan), torch.empty(16)
    step = source.stride(0) * source.itemsize
    cpu_rows.widen_rows(kind, source.data_ptr(), step, target.data_ptr(), 3, channels, spare.data_ptr())
    assert torch.equal(target[:, :channels], numbers.float())
    whole = -(-channels // 16) * 16
    assert kind == cpu_simd.HALF_BYTES or (target[:, channels:whole] == 0).all()


def decode_case(lengths, q_len=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    segments = Segments(torch.tensor([0, *itertools.accumulate(lengths)]))
    key, value = torch.randn(2, segments.total, 64, generator=generator)
    query = torch.randn(1, 2 * len(lengths), q_len, 64, generator=generator)
    return lambda: cpu_decode.decode_attention(query, key, value, segments, softmax_scale=0.125)


def test_without_openmp_threads_of_our_own_give_the_same_bits(monkeypatch):
    """Where torch's OpenMP can't be called, a thread pool does the same work in the same pieces."""
    decode = decode_case([4000, 0, 3, 9000])
    expected = decode()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    two_threads = decode()
    monkeypatch.setattr(cpu_threads, "_parallel", lambda: None)
    for result, same in zip(decode(), two_threads, strict=True):
        assert torch.equal(result, same)
    torch.testing.assert_close(two_threads, expected, atol=1e-6, rtol=1e-5)


def test_callers_in_several_threads_do_not_disturb_one_another():
    """Eight Python threads decode different caches at once, many times; each gets its own result."""
    cases = [decode_case([1000 + 10 * index, 7, 600], seed=index) for index in range(8)]
    expected = [case() for case in cases]
    wrong = []

    def run(index):
        for _ in range(50):
            if not all(map(torch.equal, cases[index](), expected[index])):
                wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_working_memory_does_not_grow_with_the_context(monkeypatch):
    """Sixteen times the context takes no larger buffers for a decoded token."""
    sizes = []
    empty = torch.empty

    def counted(*shape, **kwargs):
        made = empty(*shape, **kwargs)
        sizes.append(made.nbytes)
        return made

    short, long = decode_case([4000] * 4), decode_case([64000] * 4)
    monkeypatch.setattr(torch, "empty", counted)
    short()
    at_short = sum(sizes)
    sizes.clear()
    long()
    assert 0 < sum(sizes) <= 1.01 * at_short


def test_column_scores_of_the_maximum():
    """Weights, their maximum over rows and the log-sum-exp agree with float64, with and without factors of the rows."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, 9, 5 + 40 + 9, generator=generator)
    row_weight = torch.rand(2, 9, generator=generator)
    future = torch.ones(9, 54, dtype=torch.bool).triu(46)
    weights = logits.double().masked_fill(future, -torch.inf).softmax(-1)
    truth = (weights[..., 5:45] * row_weight.double().repeat_interleave(3, 0).unsqueeze(-1)).amax(1)
    plain_truth = weights[..., 5:45].amax(1)
    for factor in (None, row_weight):
        columns = Columns(6, 5, 45, "max", None, None, factor, torch.float32, torch.device("cpu"))
        scores = cpu_softmax.CpuColumnScores(columns)
        lse = torch.empty(6, 9)
        visited = scores.visit(logits.clone(), 0, lse)
        expected = plain_truth if factor is None else truth
        torch.testing.assert_close(scores.result().double(), expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(
            lse.double(), logits.double().masked_fill(future, -torch.inf).logsumexp(-1), atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(visited.double(), weights, atol=1e-6, rtol=1e-5)


PEAK = """
import sys, torch
from kvzip_press.kernels.api import ReplayOptions, replay_attention
torch.set_num_threads(2)
heads, group, head_dim, chunk, q_len = 3, 3, 64, 2048, 2078
query = torch.randn(1, heads * group, q_len, head_dim)
own, context = torch.randn(1, heads, q_len, head_dim), torch.randn(1, heads, 2100, head_dim)

def ours(rows):
    options = ReplayOptions(anchor=26, start=26, end=26 + chunk, local=True, softmax_scale=0.125)
    replay_attention(query[:, :, :rows], own[:, :, :rows], own[:, :, :rows], context, context, options)

def materialised(rows):
    keys = torch.cat([context[:, :, : 26 + chunk], own[:, :, :rows]], 2)
    logits = query[:, :, :rows].view(1, heads, group, rows, head_dim) @ keys.unsqueeze(2).transpose(-1, -2) * 0.125
    logits[..., 26 + chunk :].masked_fill_(torch.ones(rows, rows, dtype=torch.bool).triu(1), -torch.inf)
    logits.softmax(-1)[..., 26 : 26 + chunk].amax((2, 3))

run = {"ours": ours, "materialised": materialised}[sys.argv[1]]
def kib(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

run(8)  # compiles, starts threads
open("/proc/self/clear_refs", "w").write("5")  # forgets the peak so far
before = kib("VmRSS")
run(q_len)
print(kib("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_scoring_takes_a_twentieth_of_the_memory_of_the_whole_matrix():
    """Peak memory beyond the inputs, chunk 2,048, against the form that keeps the query x key matrix."""
    peak = {}
    for form in ("ours", "materialised"):
        # A trimming allocator, so that the first run leaves no free memory for the second
        environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, "-c", PEAK, form]
        peak[form] = int(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)
    matrix = 9 * 2078 * (26 + 2048 + 2078) * 4 // 1024
    assert peak["materialised"] > 1.9 * matrix  # the logits and their softmax: the test measures what it means to
    assert peak["ours"] <= 0.05 * peak["materialised"], peak
