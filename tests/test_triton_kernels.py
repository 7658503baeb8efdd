"""The Triton kernels: their results, in the interpreter, and the work lists and conversions that they rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from kvzip_press.kernels.decode.split_k import work_list
from kvzip_press.kernels.options import ReplayOptions
from kvzip_press.kernels.storage.quantization import KEY_BLOCK
from kvzip_press.kernels.storage.segments import Segments

CPU = torch.device("cpu")


@pytest.mark.parametrize("operation", ["decode", "replay"])
def test_results_in_the_interpreter(operation, tmp_path):
    """Every check of ``triton_*_checks.py``: the interpreter must be chosen before the kernels are imported."""
    triton = pytest.importorskip("triton", reason="the extra 'gpu' is not installed")
    if Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.4"):
        pytest.skip(f"the interpreter of triton {triton.__version__} fails with numpy {np.__version__}")
    checks = Path(__file__).with_name(f"triton_{operation}_checks.py")
    # The matrix products are smaller than what it takes to start threads for them
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(checks), "--noconftest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("operation", ["decode", "replay"])
def test_tensors_on_the_cpu_are_refused(operation):
    """Outside of the interpreter, with the backends that take them."""
    module = f"kvzip_press.kernels.{operation}.triton"
    kernels = pytest.importorskip(module, reason="the extra 'gpu' is not installed")
    pairs = torch.zeros(3, 64)
    states, options = pairs[None, None], ReplayOptions(anchor=0, start=0, end=3, local=True, softmax_scale=1.0)
    with pytest.raises(ValueError, match="takes tensors on a GPU, got cpu; use backend='auto' or 'torch'"):
        if operation == "decode":
            kernels.decode_attention(states, pairs, pairs, Segments(torch.tensor([0, 3])), softmax_scale=1.0)
        else:
            kernels.replay_attention(states, states, states, states, states, options)


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
    segments = Segments(torch.tensor([0, 500]))
    first, second = (work_list(segments, CPU, step=KEY_BLOCK, limit=4, min_length=128) for _ in range(2))
    assert first is second


def run_assembly(text: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the instructions of the conversions do, by the PTX manual, on 32-bit words."""

    def bfloat16_halves(word):
        return [part.astype(np.uint32).view(np.float32) for part in (word << 16, word & 0xFFFF0000)]

    def fma(a, b, c):
        low, high = (x * y + z for x, y, z in zip(*map(bfloat16_halves, (a, b, c)), strict=True))
        low, high = low.view(np.uint32), high.view(np.uint32)
        assert not ((low | high) & 0xFFFF).any()  # exact in bfloat16
        return (low >> 16) | high

    def prmt(a, b, selector):
        both = [(word >> (8 * byte)) & 0xFF for word in (a, b) for byte in range(4)]
        return sum(both[int(selector) >> (4 * byte) & 0xF] << (8 * byte) for byte in range(4))

    def lop3(a, b, c, table):
        result = a & 0
        for entry in range(8):
            if int(table) >> entry & 1:
                terms = (x if entry >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0)))
                result = result | np.bitwise_and.reduce(np.broadcast_arrays(*terms))
        return result

    operations = {
        "mov.b32": lambda a: a,
        "shr.u32": lambda a, count: a >> count,
        "lop3.b32": lop3,
        "prmt.b32": prmt,
        "fma.rn.bf16x2": fma,
    }
    registers = dict(inputs)
    for line in filter(None, (line.strip() for line in text.strip("{} \n").split(";"))):
        if line.startswith(".reg"):
            continue
        name, operands = line.split(maxsplit=1)
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
        registers[target] = operations[name](*values) + np.zeros_like(next(iter(inputs.values())))
    return registers


@pytest.mark.parametrize("of_keys", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_become_numbers(bits, of_keys):
    """The interpreter runs no assembly: here it is run on every possible unit, in both halves of a word."""
    codes = pytest.importorskip("kvzip_press.kernels.decode.triton_codes", reason="the extra 'gpu' is not installed")
    name, parts = f"{'KEY' if of_keys else 'VALUE'}_CODES_{bits}", 16 // bits
    units = np.arange(1 << 16, dtype=np.uint32), np.arange(1 << 16, dtype=np.uint32)[::-1]
    registers = run_assembly(getattr(codes, name).value, {f"${parts}": units[0] | units[1] << 16})
    for part in range(parts):
        offset = codes.key_offset.fn(part, bits) if of_keys else codes.value_offset.fn(bits)
        for half, unit in enumerate(units):
            word = registers[f"${part}"] >> (16 * half) & 0xFFFF
            numbers = word.astype(np.uint16).view(np.float16) if of_keys else (word << 16).view(np.float32)
            expected = (unit >> (part * bits)) & ((1 << bits) - 1)
            np.testing.assert_array_equal(numbers.astype(np.float64), expected + offset)
