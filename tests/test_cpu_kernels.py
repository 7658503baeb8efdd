"""What the CPU kernels are made of: vectors, threads, their errors, and the size of their buffers."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention_oracle import bounds, pairs_of, randn, replay_inputs
from numba import njit

from kvzip_press.kernels import api
from kvzip_press.kernels.decode import cpu as cpu_decode
from kvzip_press.kernels.decode import cpu_items
from kvzip_press.kernels.replay import cpu_softmax
from kvzip_press.kernels.replay.blocked import Columns
from kvzip_press.kernels.simd import formats
from kvzip_press.kernels.simd import threads as cpu_threads
from kvzip_press.kernels.simd import vectors as cpu_simd
from kvzip_press.kernels.simd.threads import finish_item, take_item
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
    cap = njit(lambda logits: cpu_simd.capped(logits, np.float32(50.0)))
    numbers = np.concatenate([np.linspace(-300, 300, 16 * 100), [-np.inf, np.inf, 0] + [1] * 13]).astype(np.float32)
    np.testing.assert_allclose(apply(cap, numbers), 50 * np.tanh(numbers.astype(np.float64) / 50), atol=1e-5)


@pytest.mark.parametrize("hardware", [True, False])
def test_every_float16_is_read_exactly(hardware, monkeypatch):
    """All finite float16, subnormal ones too, with the processor's conversion and with integer arithmetic."""
    monkeypatch.setattr(formats, "_half_in_hardware", lambda: hardware)
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    numbers = np.where(np.isfinite(numbers), numbers, np.float16(0))
    result = np.empty(len(numbers), np.float32)
    rows, wide = (formats.Rows(part.ctypes.data, 0) for part in (numbers, result))
    formats._widener(formats.FLOAT16)(rows, wide, 1, len(numbers))
    assert (result == numbers.astype(np.float32)).all()


@pytest.mark.parametrize("channels", [1, 2, 15, 16, 17, 40, 64, 80])
@pytest.mark.parametrize("kind", range(5))
def test_rows_of_any_format_become_float32_rows(kind, channels):
    """Each format and length, read without touching what lies behind, zeros up to the next vector."""
    if kind == formats.HALF_BYTES:
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
    target = torch.full((3, formats.row_bytes(channels) // 4), torch.nan)
    rows, wide = (formats.Rows(part.data_ptr(), part.stride(0) * part.itemsize) for part in (source, target))
    formats.widen_rows(kind, rows, wide, 3, channels)
    assert torch.equal(target[:, :channels], numbers.float())
    whole = -(-channels // 16) * 16
    assert kind == formats.HALF_BYTES or (target[:, channels:whole] == 0).all()


def decode_case(lengths, seed=0):
    segments, packed = Segments(bounds(lengths)), pairs_of(lengths, 64)
    query = randn(1, 2 * len(lengths), 1, 64, seed=seed)
    return lambda: cpu_decode.decode_attention(query, *packed, segments, softmax_scale=0.125)


def test_without_openmp_threads_of_our_own_give_the_same_bits(monkeypatch):
    """Where torch's OpenMP can't be called, a thread pool does the same work in the same pieces."""
    decode = decode_case([4000, 0, 3, 9000])
    expected = decode()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    two_threads = decode()
    monkeypatch.setattr(cpu_threads, "_parallel", lambda: None)
    assert all(map(torch.equal, decode(), two_threads))
    torch.testing.assert_close(two_threads, expected, atol=1e-6, rtol=1e-5)


def test_callers_in_several_threads_do_not_disturb_one_another():
    """Eight Python threads decode at once, two of them each of four caches, many times; each gets its own result."""
    cases = 2 * [decode_case([1000 + 10 * index, 7, 600], seed=index) for index in range(4)]
    expected = [case() for case in cases]
    wrong = []

    def run(index):
        for _ in range(50):
            if not all(map(torch.equal, cases[index](), expected[index])):
                wrong.append(index)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(8)))
    assert not wrong


def raising(address):
    item = take_item(address)
    while item < 20:
        if item == 7:
            raise ZeroDivisionError
        finish_item(address)
        item = take_item(address)


@pytest.mark.parametrize("threads, openmp", [(1, True), (2, True), (2, False)])
def test_an_error_in_compiled_code_reaches_the_caller(threads, openmp, monkeypatch):
    """An item that raises is not done: the caller is told so, by the kernel's name, and the error is printed."""
    if not openmp:
        monkeypatch.setattr(cpu_threads, "_parallel", lambda: None)
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: printed.append(error.exc_type))
    with pytest.raises(RuntimeError, match=r"raising finished \d+ of 20 items"):
        cpu_threads.run_on_threads(cpu_threads.worker(raising), cpu_softmax.Job((20,)), threads)
    assert printed == [ZeroDivisionError]


def test_an_error_in_a_pool_is_raised_when_all_threads_have_returned(monkeypatch):
    monkeypatch.setattr(cpu_threads, "_parallel", lambda: None)
    caller, returned = threading.get_ident(), []

    def run(address):
        if threading.get_ident() == caller:
            raise KeyError("the caller's")
        time.sleep(0.1)
        returned.append(address)

    with pytest.raises(KeyError, match="the caller's"):
        cpu_threads.run_on_threads(SimpleNamespace(ctypes=run), cpu_softmax.Job((1,)), 3)
    assert len(returned) == 2


def column_scores(first_visible=None, row_weight=None):
    """Scores of six query heads over columns 5 to 44, by their maximum."""
    device = torch.device("cpu")
    return cpu_softmax.CpuColumnScores(Columns(6, 5, 45, "max", None, first_visible, row_weight, torch.float32, device))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_replayed_token_that_sees_no_column_is_an_error():
    """Its softmax has no weights: not a result that looks like one."""
    with pytest.raises(RuntimeError, match="cpu_softmax finished"):
        column_scores(first_visible=torch.tensor([0, 99])).visit(torch.zeros(6, 2, 47), 0, None)


def test_compiled_workers_can_be_kept_for_later_processes():
    """Their code holds no address of this process, so numba writes it to its cache."""
    for worker in (cpu_items.decode_worker, cpu_softmax._row_worker):
        assert not worker._library.has_dynamic_globals


@pytest.mark.parametrize("lengths", [[700, 0, 65], [0, 0, 0]])
def test_results_under_another_default_type_and_device(monkeypatch, lengths):
    """Native code writes float32 on the CPU, whatever torch makes by default."""
    segments, inputs = Segments(bounds(lengths)), (*pairs_of(lengths, 16), *replay_inputs(num_kv_heads=3))
    options = api.ReplayOptions(anchor=4, start=10, end=40, local=False, softmax_scale=0.125)

    def run(backend, dtype):
        key, value, query, *others = (part.to(dtype) for part in inputs)
        decoded = api.decode_attention(query, key, value, segments, softmax_scale=0.125, backend=backend)
        return *decoded, *api.replay_attention(query, *others, options, backend=backend)

    expected = run("reference", torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            results = run("cpu", torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    for result, truth in zip(results, expected, strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), truth, atol=2e-6, rtol=1e-5)


def test_working_memory_does_not_grow_with_the_context(monkeypatch):
    """Sixteen times the context takes no larger buffers for a decoded token."""
    made, sizes, empty = [], [], torch.Tensor.new_empty
    cases = [decode_case([length] * 4) for length in (4000, 64000)]
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *of, **kind: made.append(empty(*of, **kind)) or made[-1])
    for case in cases:
        made.clear()
        case()
        sizes.append(sum(buffer.nbytes for buffer in made))
    assert 0 < sizes[1] <= 1.01 * sizes[0]


def test_column_scores_of_a_block_of_rows():
    """Weights, their maximum over rows and the log-sum-exp agree with float64, with and without factors of the rows."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, 9, 5 + 40 + 9, generator=generator)
    future = torch.ones(9, 54, dtype=torch.bool).triu(46)
    seen = logits.double().masked_fill(future, -torch.inf)
    weights = seen.softmax(-1)
    for row_weight in (None, torch.rand(2, 9, generator=generator)):
        scores = column_scores(row_weight=row_weight)
        lse = torch.empty(6, 9)
        visited = scores.visit(logits.clone(), 0, lse)
        factor = torch.ones(2, 9) if row_weight is None else row_weight
        truth = (weights[..., 5:45] * factor.double().repeat_interleave(3, 0).unsqueeze(-1)).amax(1)
        torch.testing.assert_close(scores.result().double(), truth, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(lse.double(), seen.logsumexp(-1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(visited.double(), weights, atol=1e-6, rtol=1e-5)
