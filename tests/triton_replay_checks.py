"""
Results of the Triton replay kernels, in Triton's interpreter.

Run by ``test_triton_kernels.py`` in a process of its own, with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import pytest
import torch
from attention_oracle import fill_fresh_memory, randn, replay_inputs, surrounded

from kvzip_press.kernels.options import REDUCTIONS, ReplayOptions
from kvzip_press.kernels.replay import triton as triton_replay
from kvzip_press.kernels.replay import triton_scores
from kvzip_press.kernels.triton_config import INTERPRETED, LaunchConfig, launch_config

assert INTERPRETED

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Anchor, start and end of the chunk in a context of 90
CHUNKS = {
    "in the middle": (5, 20, 57),
    "right after the anchor": (20, 20, 57),
    "no anchor": (0, 20, 57),
    "all after the anchor": (7, 7, 90),
    "everything": (0, 0, 90),
    "at the end": (5, 50, 90),
    "of one pair": (5, 89, 90),
    "empty": (5, 20, 20),
    "empty, after the anchor": (90, 90, 90),
}


@pytest.fixture(autouse=True)
def fresh_memory_is_nan(monkeypatch):
    fill_fresh_memory(monkeypatch)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Many blocks in small tensors."""
    for module in (triton_replay, triton_scores):
        monkeypatch.setattr(module, "launch_config", lambda *_: LaunchConfig(32, 32, 4, 2, 1))


@pytest.fixture
def blocks_of_the_table(monkeypatch, small_blocks):
    for module in (triton_replay, triton_scores):
        monkeypatch.setattr(module, "launch_config", launch_config)


def rand(*shape, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def make(**shape):
    """States with NaN around them: the own ones token by token as projections write them, the context's by heads."""
    tensors = replay_inputs(**{"num_kv_heads": 1, "group": 2, "q_len": 21, "context_len": 90, **shape})
    own = [surrounded(tensor.transpose(1, 2).contiguous(), 2).transpose(1, 2) for tensor in tensors[:3]]
    return [*own, *(surrounded(tensor, 1, 2, 3) for tensor in tensors[3:])]


def written_out(tensors, options, dtype):
    """Output and scores from the whole matrix, in ``dtype`` throughout."""
    query, own_key, own_value, context_key, context_value = (tensor.to(dtype) for tensor in tensors)
    num_kv_heads, context_len, q_len = *context_key.shape[1:3], query.shape[2]
    group = query.shape[1] // num_kv_heads
    key = torch.cat([context_key, own_key], 2).repeat_interleave(group, 1)
    value = torch.cat([context_value, own_value], 2).repeat_interleave(group, 1)
    logit, maximum = options.reduction == "logit", options.reduction in ("max", "logit")
    position, column = torch.arange(q_len)[:, None] + context_len, torch.arange(context_len + q_len)[None]
    seen = (column <= position) & (column > position - (options.window or context_len + q_len))
    in_chunk = (options.start <= column) & (column < options.end)
    normalized = seen & ((column < options.anchor) | in_chunk | (column >= context_len))
    logits = query @ key.mT * options.softmax_scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    out = logits.where(normalized if options.local else seen, -torch.inf).softmax(-1) @ value
    given = logits if logit else logits.where(normalized, -torch.inf).softmax(-1)
    if options.row_weight is not None:
        given = given * options.row_weight.to(dtype)[:, None, :, None]
    given = given.where(seen, -torch.inf if logit else 0)[..., options.start : options.end]
    if options.column_weight is not None:
        weighted = given * options.column_weight.to(dtype).flatten(1, 2)[:, :, None]
        given = given.where(given == -torch.inf, weighted)
    if options.reduction == "sum_of_squares":
        given = given.square()
    by_group = given.unflatten(1, (num_kv_heads, group)).flatten(2, 3)
    return out, by_group.amax(2) if maximum else by_group.sum(2)


def error(actual, expected):
    assert actual.shape == expected.shape
    never_seen = expected == -torch.inf
    assert torch.equal(actual == -torch.inf, never_seen)
    difference = (actual.double() - expected.double()).masked_fill(never_seen, 0.0).abs()
    assert not difference.isnan().any()
    return float(difference.max()) if len(difference.flatten()) else 0.0


def asked(tensors, **options):
    chunk = {"anchor": 5, "start": 20, "end": 57}
    return ReplayOptions(**{"softmax_scale": tensors[0].shape[-1] ** -0.5, "local": True, **chunk, **options})


def replay(tensors, **options):
    return triton_replay.replay_attention(*tensors, asked(tensors, **options))


def check(tensors, **options):
    """The result against float64: no further off than twice a computation in the tensors' own type."""
    given = asked(tensors, **options)
    out, scores = replay(tensors, **options)
    assert out.dtype == scores.dtype == torch.float32
    expected = written_out(tensors, given, torch.float64)
    eager = written_out(tensors, given, tensors[0].dtype)
    for actual, exact, low in zip((out, scores), expected, eager, strict=True):
        # A softmax weight in another order of summation moves the last bit: nothing is asked below float32's own
        assert error(actual, exact) <= 2 * error(low, exact) + 1e-6 * max(1.0, given.softcap or 1.0)
    return out, scores


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("local", [True, False], ids=["local", "full"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(reduction, local, dtype):
    check(make(num_kv_heads=2, dtype=dtype), reduction=reduction, local=local)


@pytest.mark.parametrize("local", [True, False], ids=["local", "full"])
@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
def test_chunks(chunk, local):
    anchor, start, end = chunk
    check(make(), anchor=anchor, start=start, end=end, local=local)


def test_no_context():
    out, scores = check(make(context_len=0), anchor=0, start=0, end=0, local=False)
    assert scores.shape == (1, 1, 0)


@pytest.mark.parametrize("reduction, local", list(zip(REDUCTIONS, [True, False, False, True], strict=True)))
@pytest.mark.parametrize("softcap, window", [(2.0, None), (None, 45), (2.0, 60), (None, 100)])
def test_softcap_and_window(softcap, window, reduction, local):
    """The window ends in the chunk for the last rows, before it, or before the anchor."""
    check(make(), start=40, end=77, local=local, softcap=softcap, window=window, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_chunk_that_no_row_sees(reduction):
    for options in ({"softcap": 2.0}, {"row_weight": torch.ones(1, 21)}, {"column_weight": torch.zeros(1, 1, 2, 37)}):
        _, scores = check(make(), reduction=reduction, **options, local=False, window=30)
        assert (scores == (-torch.inf if reduction == "logit" else 0.0)).all()


@pytest.mark.parametrize("window", [1, 2, 17])
def test_windows_within_the_own_keys(window):
    """Blocks of own keys that some of their rows do not see at all."""
    check(make(group=1, q_len=45), local=False, window=window)


@pytest.mark.parametrize("q_len", [1, 16, 63, 111])
def test_numbers_of_tokens(q_len):
    check(make(q_len=q_len, context_len=40), start=9, end=30, local=False)
    check(make(q_len=q_len, context_len=40, group=3), start=9, end=30, reduction="logit")


@pytest.mark.parametrize("length", [1, 32, 63, 111])
def test_lengths_of_the_chunk(length):
    check(make(q_len=5, context_len=150), end=20 + length, reduction="sum")
    check(make(q_len=5, context_len=length), anchor=0, start=0, end=length, local=False)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("group", [1, 3, 4])
def test_groups_and_rows_of_a_batch(group, reduction):
    tensors = make(batch_size=3, num_kv_heads=2, group=group, q_len=9, context_len=40)
    check(tensors, anchor=3, start=8, end=35, local=False, reduction=reduction)


@pytest.mark.parametrize("softcap, window", [(None, None), (2.0, 60)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights(reduction, softcap, window):
    tensors = make(batch_size=2, group=3, q_len=14, dtype=torch.float16)
    row_weight, column_weight = rand(2, 14, seed=5), rand(2, 1, 3, 34, seed=6)
    row_weight[1, 7] = 0
    column_weight[0, :, :, 7] = 0
    chunk = {"start": 40, "end": 74, "softcap": softcap, "window": window, "reduction": reduction}
    for rows, columns in ((row_weight, None), (None, column_weight), (row_weight, column_weight)):
        check(tensors, **chunk, row_weight=rows, column_weight=columns)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_negative_row_weights(reduction):
    """They never make a maximum of softmax weights, but count in sums and among logits."""
    row_weight = randn(1, 21, seed=5)
    assert row_weight.min() < 0 < row_weight.max()
    check(make(), reduction=reduction, row_weight=row_weight)


@pytest.mark.usefixtures("blocks_of_the_table")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim, value_dim", [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128)])
def test_head_sizes_in_blocks_of_the_table(head_dim, value_dim, dtype):
    """Also with blocks that are larger than everything."""
    tensors = make(q_len=9, context_len=40, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    check(tensors, start=9, end=37, local=False)


@pytest.mark.usefixtures("blocks_of_the_table")
def test_many_blocks_of_the_table():
    """More rows and columns than a block of the table holds, in both kernels, with whole blocks and rests of them."""
    tensors = make(group=4, q_len=75, context_len=320, dtype=torch.bfloat16)
    check(tensors, anchor=130, start=135, end=300, local=False)
    check(tensors, anchor=130, start=135, end=300, window=350, reduction="sum")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_split_over_blocks(reduction, monkeypatch):
    """However many SMs share the rows, the scores are those of one."""
    tensors, empty, shapes = make(q_len=111), torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: shapes.append(shape) or empty(*shape, **options))
    for sms, splits in ((1, 1), (8, 4), (1000, 7)):
        monkeypatch.setattr(triton_scores, "multiprocessors", lambda _, sms=sms: sms)
        check(tensors, reduction=reduction)
        assert shapes[-1] == (splits, 1, 37)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_same_bits_twice(reduction, monkeypatch):
    monkeypatch.setattr(triton_scores, "multiprocessors", lambda _: 6)
    tensors = make(q_len=63, dtype=torch.bfloat16)
    weights = {"row_weight": rand(1, 63, seed=5), "column_weight": rand(1, 1, 2, 37, seed=6)}
    first, second = (replay(tensors, local=False, reduction=reduction, **weights) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    "message, changed",
    [
        ("float32, bfloat16 and float16, got torch.float64; use backend='torch'", {"dtype": torch.float64}),
        ("head sizes up to 256, got 260", {"head_dim": 260}),
        ("head sizes up to 256, got 300", {"value_dim": 300}),
    ],
)
def test_what_the_kernels_do_not_take(message, changed):
    with pytest.raises(ValueError, match=message):
        replay(make(q_len=2, context_len=9, **changed), anchor=0, start=0, end=9)


@pytest.mark.parametrize("reduction", ["max", "logit"])
def test_channels_and_scales_that_the_kernels_do_not_take(reduction):
    query, *others = make(q_len=2, context_len=9)
    chunk = {"anchor": 0, "start": 0, "end": 9, "reduction": reduction}
    with pytest.raises(ValueError, match="positive softmax_scale, got -1"):
        replay([query, *others], **chunk, softmax_scale=-1.0)
    with pytest.raises(ValueError, match=r"one type, got torch.bfloat16, torch.float32"):
        replay([query.bfloat16(), *others], **chunk)
    with pytest.raises(ValueError, match=r"contiguous channels, got strides \[2, 1, 1, 1, 1\]"):
        replay([query.mT.contiguous().mT, *others], **chunk)
