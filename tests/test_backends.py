"""The registry of kernel backends: what is imported when, what ``auto`` chooses, what a named backend refuses."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import subprocess
import sys
import types

import pytest
import torch
from attention_oracle import assert_attended, bounds, pairs_of, randn

from kvzip_press.kernels import backends
from kvzip_press.kernels.backends import BACKENDS, REGISTRY, REPLAY_BACKENDS, decode_module, replay_module
from kvzip_press.kernels.storage.segments import Segments

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_choices():
    """No choice is remembered from other tests."""
    for choices in (decode_module, replay_module, backends._log_choice):
        choices.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """Call with a compute capability, and the packages that are installed, to pretend there is such a GPU."""

    def pretend(capability, packages=("triton",)):
        specs = {name: types.SimpleNamespace() if name in packages else None for name in ("triton", "flash_attn")}
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "hip", None)
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: specs[name] if name in specs else find_spec(name, *rest)
        )

    return pretend


def test_an_optional_package_is_imported_by_the_backend_that_needs_it():
    """By importing the front door none is, and torch and the specification run where there is no numba."""
    code = """
import sys, torch
before = set(sys.modules)
from kvzip_press.kernels.api import decode_attention
assert not {"triton", "flash_attn", "numba"} & (set(sys.modules) - before)
sys.modules["numba"] = None
key = torch.ones(3, 4)
for name in ("torch", "reference"):
    decode_attention(key[None, None], key, key, torch.tensor([0, 3]), softmax_scale=1.0, backend=name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_names_and_their_modules():
    """``auto`` and a line each, which stands for files in decode/ and replay/; flash-attn has no replay."""
    assert BACKENDS == ("auto", "reference", "torch", "cpu", "triton", "flash")
    assert REPLAY_BACKENDS == ("auto", "reference", "torch", "cpu", "triton")
    for operation, names in (("decode", BACKENDS[2:]), ("replay", REPLAY_BACKENDS[2:])):
        assert all(importlib.util.find_spec(f"kvzip_press.kernels.{operation}.{name}") is not None for name in names)
    assert importlib.util.find_spec("kvzip_press.kernels.replay.flash") is None


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float16, "cpu"), (torch.float64, "torch")],
)
def test_auto_on_the_cpu(dtype, expected, quantized):
    """CPU tensors take the CPU kernel in all formats it reads, quantised ones too; float64 takes torch."""
    found = decode_module("auto", CPU, dtype, dtype, 64, quantized)
    assert found.__name__ == f"kvzip_press.kernels.decode.{expected}"
    assert replay_module("auto", CPU, dtype, 64).__name__ == f"kvzip_press.kernels.replay.{expected}"


@pytest.mark.parametrize(
    ("capability", "packages", "dtype", "head_dim", "expected"),
    [
        ((9, 0), ("triton",), torch.bfloat16, 128, "triton"),
        ((8, 0), ("triton",), torch.float32, 256, "triton"),
        ((8, 0), ("triton", "flash_attn"), torch.float16, 128, "triton"),
        ((7, 5), ("triton",), torch.float16, 128, "torch"),
        ((9, 0), (), torch.bfloat16, 128, "torch"),
        ((9, 0), ("flash_attn",), torch.bfloat16, 128, "torch"),
        ((9, 0), ("triton",), torch.float64, 128, "torch"),
        ((9, 0), ("triton",), torch.bfloat16, 320, "torch"),
    ],
)
@pytest.mark.parametrize("quantized", [False, True])
def test_auto_on_a_gpu(gpu, capability, packages, dtype, head_dim, expected, quantized):
    """Triton where it is installed and the GPU new enough for it, torch otherwise."""
    gpu(capability, packages)
    assert backends._choose(GPU, (dtype, dtype), head_dim, quantized) == expected


def test_auto_takes_torch_where_triton_can_not_run(gpu, monkeypatch):
    """
    Quantised rows of no whole words or an odd number of value groups are read by torch; plain ones by Triton.

    Devices without kernels of their own run in torch; so does ROCm, whose devices are named cuda.
    """
    gpu((9, 0))
    for head_dim in (64, 80, 96, 128, 256, 192, 66):
        expected = "torch" if head_dim in (192, 66) else "triton"
        assert backends._choose(GPU, (torch.float16,), head_dim, True) == expected
        assert backends._choose(GPU, (torch.float16,), head_dim, False) == "triton"
    assert backends._choose(torch.device("mps"), (torch.float16,), 64, False) == "torch"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert backends._choose(GPU, (torch.float16,), 64, False) == "torch"


def test_auto_says_once_what_it_chose(caplog):
    with caplog.at_level(logging.DEBUG, logger="kvzip_press.kernels.backends"):
        for head_dim in (64, 64, 128):
            decode_module("auto", CPU, torch.float32, torch.float32, head_dim, False)
        decode_module("auto", CPU, torch.float64, torch.float64, 64, False)
    assert [record.message for record in caplog.records] == [
        "backend 'auto' chose 'cpu' for float32 on cpu",
        "backend 'auto' chose 'torch' for float64 on cpu",
    ]


@pytest.mark.parametrize(
    ("backend", "capability", "dtype", "head_dim", "quantized", "message"),
    [
        ("triton", (7, 5), torch.float16, 64, False, "'triton' needs compute capability 8.0, cuda:0 has 7.5"),
        ("triton", (9, 0), torch.float64, 64, False, "'triton' takes float32, bfloat16, float16, got float64"),
        ("triton", (9, 0), torch.float32, 512, False, "'triton' takes a head_dim of at most 256, got 512"),
        ("triton", (9, 0), torch.float16, 192, True, "'triton' reads no quantised keys and values of head_dim 192"),
        ("triton", (9, 0), torch.float16, 66, True, "'triton' reads no quantised keys and values of head_dim 66"),
        ("flash", (9, 0), torch.float32, 64, False, "'flash' takes bfloat16, float16, got float32"),
        ("flash", (9, 0), torch.float16, 64, True, "'flash' reads no quantised keys and values"),
        ("cpu", (9, 0), torch.float32, 64, False, "'cpu' runs on the CPU only, got tensors on cuda:0"),
        ("slow", (9, 0), torch.float32, 64, False, "backend must be one of auto, .*, got 'slow'"),
    ],
)
def test_a_named_backend_refuses_what_it_can_not_take(gpu, backend, capability, dtype, head_dim, quantized, message):
    """A named backend never hands its work to another one: the error says why, and names what can."""
    gpu(capability)
    with pytest.raises(ValueError, match=message):
        decode_module(backend, GPU, dtype, dtype, head_dim, quantized)


@pytest.mark.parametrize(
    ("backend", "package", "extra"), [("triton", "triton", "gpu"), ("flash", "flash_attn", "flash-attn")]
)
def test_a_named_backend_that_is_not_installed(gpu, monkeypatch, backend, package, extra):
    gpu((9, 0))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'needs {package}.*pip install "kvzip-press\[{extra}\]"'):
        decode_module(backend, GPU, torch.float16, torch.float16, 64, False)


def test_triton_takes_cpu_tensors_in_its_interpreter_alone(monkeypatch):
    """With TRITON_INTERPRET=1 the kernels run on CPU tensors; ``auto`` does not choose them even then."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert REGISTRY["triton"].unsupported(CPU, (torch.float32,), 64) is not None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert REGISTRY["triton"].unsupported(CPU, (torch.float32,), 64) is None
    assert backends._choose(CPU, (torch.float32,), 64, False) == "cpu"


def varlen_attention(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, softcap, return_attn_probs
):  # fmt: skip
    """What flash-attn 2.7 documents of ``flash_attn_varlen_func``, in float64, and what it demands of its input."""
    total_q, heads, head_dim = q.shape
    heads_k = k.shape[1]
    assert k.shape == v.shape == (len(k), heads_k, head_dim) and heads % heads_k == 0
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert len(cu_seqlens_q) == len(cu_seqlens_k) and cu_seqlens_q[-1] == total_q and cu_seqlens_k[-1] == len(k)
    assert isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int)
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    assert not causal and return_attn_probs
    out = torch.zeros(total_q, heads, head_dim, dtype=torch.float64)
    lse = torch.full((heads, total_q), torch.inf)  # of no keys: +inf
    for sequence in range(len(cu_seqlens_q) - 1):
        rows = slice(*cu_seqlens_q[sequence : sequence + 2].tolist())
        columns = slice(*cu_seqlens_k[sequence : sequence + 2].tolist())
        for head in range(heads if len(k[columns]) else 0):
            head_k = head // (heads // heads_k)
            logits = q[rows, head].double() @ k[columns, head_k].double().T * softmax_scale
            logits = logits if softcap == 0.0 else softcap * torch.tanh(logits / softcap)
            out[rows, head] = logits.softmax(-1) @ v[columns, head_k].double()
            lse[head, rows] = logits.logsumexp(-1).float()
    return out.to(q.dtype), lse, None


@pytest.fixture
def flash_decode(monkeypatch):
    """The module, with the stand-in for flash-attn."""
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=varlen_attention))
    monkeypatch.delitem(sys.modules, "kvzip_press.kernels.decode.flash", raising=False)
    yield importlib.import_module("kvzip_press.kernels.decode.flash")
    sys.modules.pop("kvzip_press.kernels.decode.flash")


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_tail", [False, True])
@pytest.mark.parametrize("lengths", [[5, 0, 63, 64, 1, 0], 6 * [0]])
def test_flash_attn_is_handed_sequences(flash_decode, q_len, group, dtype, softcap, with_tail, lengths):
    """Each (row, KV head) is one sequence; outputs and log-sum-exps return to their rows, empty heads included."""
    query, packed = randn(2, 3 * group, q_len, 32, dtype=dtype), pairs_of(lengths, 32, dtype=dtype)
    tail = tuple(randn(2, 3, 4, 32, seed=seed, dtype=dtype) for seed in (3, 4)) if with_tail else None
    mask = torch.ones(q_len, 4, dtype=torch.bool).tril(4 - q_len)[None, None] if with_tail else None
    options = dict(softcap=softcap, tail=tail, tail_mask=mask)
    result = flash_decode.decode_attention(query, *packed, Segments(bounds(lengths)), softmax_scale=0.2, **options)
    assert result[0].dtype == result[1].dtype == torch.float32
    # The stand-in rounds its output to 16 bits, as flash-attn does
    assert_attended(result, query, packed, lengths, 0.2, 2 * torch.finfo(dtype).eps, **options)


def test_flash_attn_needs_one_type_and_one_head_size(flash_decode):
    """A query of another type, or values of another size, are refused with the remedy."""
    key = randn(4, 32, dtype=torch.float16)
    query = randn(1, 2, 1, 32, dtype=torch.bfloat16)
    for arguments in ((query, key, key), (query.half(), key, key[:, :16])):
        with pytest.raises(ValueError, match="takes query, keys and values of one type and head_dim.*backend='auto'"):
            flash_decode.decode_attention(*arguments, Segments(bounds([4])), softmax_scale=0.2)
