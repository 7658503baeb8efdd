"""The Triton decode kernels: their results, in the interpreter, and the work lists that they follow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvzip_press.kernels.quantization import KEY_BLOCK
from kvzip_press.kernels.segments import Segments
from kvzip_press.kernels.split_k import work_list

CPU = torch.device("cpu")


def test_results_in_the_interpreter(tmp_path):
    """Every check of ``triton_decode_checks.py``: the interpreter must be chosen before the kernels are imported."""
    pytest.importorskip("triton", reason="the extra 'gpu' is not installed")
    checks = Path(__file__).with_name("triton_decode_checks.py")
    # Two operations that NumPy would run in many threads are smaller than starting them
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(checks), "--noconftest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_tensors_on_the_cpu_are_refused():
    """Outside of the interpreter, with the backend that takes them."""
    triton_decode = pytest.importorskip("kvzip_press.kernels.triton_decode", reason="the extra 'gpu' is not installed")
    pairs = torch.zeros(3, 64)
    with pytest.raises(ValueError, match="takes tensors on a GPU, got cpu; use backend='cpu'"):
        triton_decode.decode_attention(
            torch.zeros(1, 1, 1, 64), pairs, pairs, Segments(torch.tensor([0, 3])), softmax_scale=1.0
        )


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    step=st.sampled_from([KEY_BLOCK, 2 * KEY_BLOCK]),
    limit=st.integers(1, 60),
    min_length=st.sampled_from([1, 128, 300]),
)
def test_work_lists_cover_every_pair_once(lengths, step, limit, min_length):
    """Items are nearly equal, no more than asked for, and begin where a key block does."""
    segments = Segments.from_lengths(torch.tensor(lengths))
    work = work_list(segments, CPU, step=step, limit=limit, min_length=min_length)
    bounds, offsets, key_blocks = segments.bounds, work.offsets.tolist(), segments.block_offsets(KEY_BLOCK).tolist()
    assert len(work) == offsets[-1] <= max(limit, sum(length > 0 for length in lengths))
    for segment in range(len(lengths)):
        items = work.items[offsets[segment] : offsets[segment + 1]].tolist()
        assert work.max_items >= len(items)
        at = bounds[segment]
        for owner, first, last, key_block in items:
            assert owner == segment and first == at < last and (first - bounds[segment]) % step == 0
            assert key_block == key_blocks[segment] + (first - bounds[segment]) // KEY_BLOCK
            assert last - first <= work.max_length
            at = last
        assert at == bounds[segment + 1]
        sizes = [last - first for _, first, last, _ in items]
        assert len(sizes) < 2 or max(sizes[:-1]) - min(sizes[:-1]) <= step


@pytest.mark.parametrize("limit", [8, 40, 132, 388])
def test_work_lists_of_uneven_heads_are_even(limit):
    """The longest item is little longer than an equal share of the whole."""
    lengths = torch.tensor([1600, 9000, 37000, 4000, 60000, 21000, 12000, 800])
    work = work_list(Segments.from_lengths(lengths), CPU, step=KEY_BLOCK, limit=limit, min_length=128)
    assert len(work) <= limit
    assert work.max_length <= 1.25 * int(lengths.sum()) / limit + KEY_BLOCK or limit == len(lengths)


def test_work_lists_are_made_once():
    """A decode step finds the list of the step before."""
    segments = Segments(torch.tensor([0, 500]))
    choice = {"step": KEY_BLOCK, "limit": 4, "min_length": 128}
    assert work_list(segments, CPU, **choice) is work_list(segments, CPU, **choice)
