"""Every Triton kernel, compiled ahead of time in every configuration of the tables: nothing may leave the registers."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="the extra 'gpu' is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are compiled in a process without TRITON_INTERPRET", allow_module_level=True)

from triton_compile import Launch  # noqa: E402

from kvzip_press.kernels.decode import triton as triton_decode  # noqa: E402
from kvzip_press.kernels.options import ReplayOptions  # noqa: E402
from kvzip_press.kernels.replay import triton as triton_replay  # noqa: E402
from kvzip_press.kernels.replay import triton_scores  # noqa: E402
from kvzip_press.kernels.storage.quantization import quantize_keys, quantize_values  # noqa: E402
from kvzip_press.kernels.storage.segments import Segments  # noqa: E402
from kvzip_press.kernels.triton_config import launch_configs  # noqa: E402


def table(kernel: str, *kinds: str) -> list[Any]:
    """Entries of the table; those for 99 KiB of shared memory where they differ from A100's."""
    entries = [entry for entry in launch_configs() if entry[0] == kernel and entry[1] in kinds]
    of_a100 = {(*entry[:3], entry[4]) for entry in entries if entry[3] == 80}
    return [
        pytest.param(kind, head_dim, arch, config, id=f"{kind}-{head_dim}-{config.block_m}-{arch}")
        for _, kind, head_dim, arch, config in entries
        if arch != 86 or (kernel, kind, head_dim, config) not in of_a100
    ]


@pytest.fixture
def launches(monkeypatch) -> list[Launch]:
    """What the host wrappers launch is written down instead, and whether within a guard of the output's device."""
    written, entered = [], []

    @contextmanager
    def device_of(tensor):
        entered.append(tensor)
        yield
        entered.pop()

    def write(kernel, *arguments, grid, warmup, **keywords):
        written.append(Launch(kernel, arguments, keywords, guarded=any(tensor is arguments[0] for tensor in entered)))

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(triton.JITFunction, "run", write)
    return written


def decode(monkeypatch, kind, head_dim, rows, arch, *, masked=False, context=500, tail_len=48):
    """A decode step's launches as on a GPU: the tensors, among them a tail in its buffer, are only looked at."""
    monkeypatch.setattr(triton_decode, "check_input", lambda *_: None)
    monkeypatch.setattr(triton_decode, "architecture", lambda _: arch)
    monkeypatch.setattr(triton_decode, "multiprocessors", lambda _: 108)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    segments = Segments(torch.tensor([0, context, context + 40]))
    key = value = torch.zeros(segments.total, head_dim, dtype=dtype)
    if kind.startswith("int"):
        key, value = quantize_keys(key, segments, int(kind[3:])), quantize_values(value, int(kind[3:]))
    query = torch.zeros(1, 2 * rows, 1, head_dim, dtype=dtype)
    tail = torch.zeros(1, 2, 64, head_dim, dtype=dtype)[:, :, :tail_len]
    mask = torch.ones(1, 1, 1, 99, dtype=torch.bool)[..., -tail_len:] if masked else None
    options = {"softcap": 30.0 if masked else None, "tail": (tail, tail), "tail_mask": mask}
    triton_decode.decode_attention(query, key, value, segments, softmax_scale=1.0, **options)


@pytest.mark.parametrize("kind, head_dim, arch, config", table("decode", "float32", "16-bit", "int8", "int4"))
def test_decode(kind, head_dim, arch, config, launches, monkeypatch):
    """Plain, and of unquantised pairs with a masked tail and a soft-cap."""
    decode(monkeypatch, kind, head_dim, config.block_m, arch)
    assert launches[0].compile(arch).blocks_per_sm >= config.blocks_per_sm
    assert (launches[0]["BLOCK_M"], launches[0]["BLOCK_N"]) == (config.block_m, config.block_n)
    if not kind.startswith("int"):
        launches.clear()
        decode(monkeypatch, kind, head_dim, config.block_m, arch, masked=True)
        assert [launch["mask"] is not None for launch in launches[:-1]] == [False, True]
        launches[1].compile(arch)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("context", [500, 20000])
@pytest.mark.parametrize("arch", [80, 90])
def test_decode_combines(head_dim, context, arch, launches, monkeypatch):
    decode(monkeypatch, "16-bit", head_dim, 4, arch, context=context)
    launches[-1].compile(arch)


def assert_compiled_once(launches, runs):
    made = [launch.specialization for launch in launches]
    assert made and made == made[: len(made) // runs] * runs


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["16-bit", "int4"])
def test_decode_is_not_compiled_again_as_the_tail_grows(kind, masked, launches, monkeypatch):
    """Lengths that are 1, or divisible by 16, are no special case."""
    for tail_len in (1, 7, 16, 33, 48):
        decode(monkeypatch, kind, 80, 4, 90, masked=masked, tail_len=tail_len)
    assert_compiled_once(launches, 5)


def replay(monkeypatch, kind, head_dim, arch, *, group=4, q_len=300, context_len=700, columns=(5, 20, 640), **options):
    """The launches of a replayed layer as on a GPU: the tensors, laid out as in a model, are only looked at."""
    for module in (triton_replay, triton_scores):
        monkeypatch.setattr(module, "architecture", lambda _: arch)
    monkeypatch.setattr(triton_replay, "_check", lambda *_: None)
    monkeypatch.setattr(triton_scores, "multiprocessors", lambda _: 132)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    query = torch.zeros(1, q_len, 2 * group, head_dim, dtype=dtype).transpose(1, 2)
    own = torch.zeros(1, q_len, 2, head_dim, dtype=dtype).transpose(1, 2)
    context = torch.zeros(1, 2, context_len + 100, head_dim, dtype=dtype)[:, :, :context_len]
    anchor, start, end = columns
    if options.pop("weighted", False):
        options |= {"row_weight": torch.ones(1, q_len), "column_weight": torch.ones(1, 2, group, end - start)}
    asked = ReplayOptions(anchor=anchor, start=start, end=end, local=False, softmax_scale=0.1, **options)
    triton_replay.replay_attention(query, own, own, context, context, asked)


EVERYTHING = {"softcap": 30.0, "window": 500}


@pytest.mark.parametrize("kind, head_dim, arch, config", table("attention", "float32", "16-bit"))
def test_replay_attention(kind, head_dim, arch, config, launches, monkeypatch):
    """Plain, and with a soft-cap and a window."""
    replay(monkeypatch, kind, head_dim, arch)
    replay(monkeypatch, kind, head_dim, arch, **EVERYTHING)
    for launch in launches[::2]:
        assert launch.kernel is triton_replay.attention_kernel
        assert launch.compile(arch).blocks_per_sm >= config.blocks_per_sm


@pytest.mark.parametrize("kind, head_dim, arch, config", table("scores", "float32", "16-bit"))
def test_replay_scores(kind, head_dim, arch, config, launches, monkeypatch):
    """The reductions that models and presses use most, and one with all there is."""
    replay(monkeypatch, kind, head_dim, arch, reduction="max")
    replay(monkeypatch, kind, head_dim, arch, reduction="logit")
    replay(monkeypatch, kind, head_dim, arch, reduction="sum_of_squares", weighted=True, **EVERYTHING)
    for launch in launches[1::2]:
        assert launch.kernel is triton_scores.scores_kernel
        resources = launch.compile(arch)
        if not launch["SHAPE"].has_window:
            assert resources.blocks_per_sm >= config.blocks_per_sm


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("group, head_dim", [(3, 64), (1, 80), (7, 128)])
def test_replay_of_other_models(group, head_dim, arch, launches, monkeypatch):
    """Groups that divide no block, and head sizes that fill none."""
    replay(monkeypatch, "16-bit", head_dim, arch, group=group)
    replay(monkeypatch, "16-bit", head_dim, arch, group=group, weighted=True, reduction="max")
    for launch in (*launches[:2], launches[3]):
        launch.compile(arch)


def test_replay_moves_tiles_by_tensor_core_and_wide_copies(launches, monkeypatch):
    """A layout that the compiler cannot follow would fall back to narrow loads, or shuffle between the warps."""
    replay(monkeypatch, "16-bit", 128, 90)
    attention, scores = (launch.compile(90) for launch in launches)
    for resources in (attention, scores):
        assert resources.count("HGMMA") and resources.count("LDGSTS.E.BYPASS.128")
        assert not resources.count("LDGSTS.E.BYPASS.64") and not resources.count("HMMA")
    # The maximum over the rows crosses lanes once a block of columns, not once a tile
    assert scores.count("SHFL") <= 8


def test_replay_is_not_compiled_again_for_another_length(launches, monkeypatch):
    """Lengths that are 1, or divisible by 16, are no special case."""
    lengths = [(300, 700, (5, 20, 640)), (1, 1, (0, 0, 1)), (16, 32, (16, 16, 32)), (33, 4096, (1, 2, 4095))]
    for q_len, context_len, columns in lengths:
        replay(monkeypatch, "16-bit", 128, 90, q_len=q_len, context_len=context_len, columns=columns, window=50)
    assert_compiled_once(launches, 4)


def test_launches_are_few_and_on_the_gpu_of_their_tensors(launches, monkeypatch):
    """Triton launches on the current GPU, which is another where a model's layers are on several."""
    decode(monkeypatch, "16-bit", 128, 4, 90)
    decode(monkeypatch, "int4", 128, 4, 90)
    replay(monkeypatch, "16-bit", 128, 90)
    decoded = ["_attend_kernel", "_combine_kernel"]
    names = [*decoded, "_attend_quantized_kernel", *decoded, "attention_kernel", "scores_kernel"]
    assert [launch.kernel.__name__ for launch in launches] == names
    assert all(launch.guarded for launch in launches)
