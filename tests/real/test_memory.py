"""What compression frees, on a real model and a context of 5,000 tokens."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import context_of

from kvzip_press import KVzipPress, cache_nbytes
from kvzip_press.cache.measure import plain_nbytes
from kvzip_press.context import context_ids
from kvzip_press.kernels.memory import return_free_memory

RATIO = 0.3


def resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


@torch.no_grad()
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_bytes_and_resident_memory_fall(smollm2, essay):
    """At most ratio x full + prefix + 1 % stays, and the process gives the rest back."""
    model, tokenizer = smollm2
    ids = context_ids(tokenizer, essay(5000))
    press = KVzipPress(ratio=RATIO, tokenizer=tokenizer)
    compressor = press.compressor(model)
    context = context_of(model, ids)
    full = cache_nbytes(context.cache)
    assert full == plain_nbytes(model, ids.shape[1])
    prefix = context.rows(compressor.prompts, press.n_sink)[0].protected
    scores = compressor.score(context)
    gc.collect()
    return_free_memory()
    before = resident_bytes()
    compressor.evict(context, press.allowance(), level=press.level, scores=scores)
    after = resident_bytes()
    held = cache_nbytes(context.cache)
    assert held <= (RATIO + prefix / ids.shape[1] + 0.01) * full
    assert before - after >= 0.9 * (full - held)


@torch.no_grad()
def test_replay_adds_less_than_two_percent_to_the_peak(smollm2, essay):
    """The peak while replaying stays under the peak of the prefill, plus 2 %."""
    model, tokenizer = smollm2
    ids = context_ids(tokenizer, essay(5000))
    compressor = KVzipPress(ratio=RATIO, tokenizer=tokenizer).compressor(model)

    def peak_of(work) -> tuple[int, Any]:
        peak, done = [resident_bytes()], threading.Event()

        def watch() -> None:
            while not done.wait(0.003):
                peak.append(resident_bytes())

        with ThreadPoolExecutor() as pool:
            pool.submit(watch)
            try:
                result = work()
            finally:
                done.set()
        return max(peak), result

    prefill_peak, context = peak_of(lambda: context_of(model, ids))
    replay_peak, _ = peak_of(lambda: compressor.score(context))
    assert replay_peak <= 1.02 * prefill_peak
