"""Packed keys and values in 8 and 4 bits: the format by hand, its error, and re-cutting without requantising."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from attention_oracle import bounds, pairs_of, randn, stored_numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvzip_press.kernels.storage.quantization import pack_codes, quantize_keys, quantize_values, unpack_codes
from kvzip_press.kernels.storage.segments import Segments

TINY = 2.0**-24


def test_codes_are_packed_by_halves():
    """In 4 bits byte j holds channel j in its low half and channel j + head_dim / 2 in its high half."""
    codes = torch.tensor([[1, 2, 3, 4], [15, 0, 7, 8]], dtype=torch.uint8)
    packed = pack_codes(codes, 4)
    assert packed.tolist() == [[1 + 16 * 3, 2 + 16 * 4], [15 + 16 * 7, 16 * 8]]
    assert torch.equal(unpack_codes(packed, 4), codes)
    assert torch.equal(pack_codes(codes, 8), codes)


def test_a_key_block_worked_by_hand():
    """One scale a channel over the tokens of a block: a channel from 0 to 15 has step 1, a constant one codes of 0."""
    keys = torch.tensor([[0.0, -2.5], [7.25, -2.5], [15.0, -2.5]])
    quantized = quantize_keys(keys, Segments(bounds([3])), 4)
    assert quantized.scale.tolist() == [[1.0, TINY]] and quantized.minimum.tolist() == [[0.0, -2.5]]
    assert quantized.codes.tolist() == [[0], [7], [15]]
    assert quantized.dequantize(Segments(bounds([3]))).tolist() == [[0.0, -2.5], [7.0, -2.5], [15.0, -2.5]]
    assert (quantized.bits, quantized.head_dim, quantized.shape, len(quantized)) == (4, 2, (3, 2), 3)
    assert quantized.block_offsets.tolist() == [0, 1]


def test_key_blocks_start_anew_in_each_segment():
    """Segments of 65, 0 and 2 tokens: two blocks, none, and one, each with the range of its own tokens."""
    keys = torch.cat([torch.arange(65.0), torch.tensor([100.0, 355.0])]).unsqueeze(-1)
    quantized = quantize_keys(keys, Segments(bounds([65, 0, 2])), 8)
    assert quantized.block_offsets.tolist() == [0, 2, 2, 3]
    assert quantized.minimum.flatten().tolist() == [0.0, 64.0, 100.0]
    assert quantized.scale[2].item() == 1.0 and quantized.scale[1].item() == TINY
    # 63 / 255 is rounded up to a float16, so that code 255 reaches 63
    assert 63 / 255 <= quantized.scale[0].item() <= 63 / 255 * (1 + 2**-10)
    assert quantized.codes.flatten().tolist()[-3:] == [0, 0, 255]


def test_a_value_row_worked_by_hand():
    """One scale a token and group of 64 channels, or over all channels where 64 does not divide their number."""
    values = torch.tensor([[-3.0, 0.0, 12.0, 4.375], [1.0, 1.0, 1.0, 1.0]])
    quantized = quantize_values(values, 4)
    assert quantized.scale.tolist() == [[1.0], [TINY]] and quantized.minimum.tolist() == [[-3.0], [1.0]]
    assert quantized.codes.tolist() == [[0 + 16 * 15, 3 + 16 * 7], [0, 0]]
    assert quantized.dequantize().tolist() == [[-3.0, 0.0, 12.0, 4.0], [1.0, 1.0, 1.0, 1.0]]
    for head_dim, groups in ((64, 1), (128, 2), (96, 1), (256, 4)):
        assert quantize_values(randn(3, head_dim), 8).scale.shape == (3, groups)
    grouped = torch.cat([torch.linspace(0, 255, 64), torch.linspace(-1, 0, 64)]).unsqueeze(0)
    assert quantize_values(grouped, 8).scale[0, 0].item() == 1.0
    assert quantize_values(grouped, 8).minimum.tolist() == [[0.0, -1.0]]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 130]), min_size=1, max_size=4),
    head_dim=st.sampled_from([2, 16, 128]),
    bits=st.sampled_from([8, 4]),
    offset=st.sampled_from([0.0, 1e-6, -300.0, 6e4]),
    size=st.sampled_from([1e-7, 1e-3, 1.0, 100.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_number_is_further_off_than_half_a_step(lengths, head_dim, bits, offset, size, dtype):
    """The error is at most half the stored scale, whatever the size and offset, up to float32's own rounding."""
    segments = Segments(bounds(lengths))
    packed = (size * randn(segments.total, head_dim) + offset).to(dtype)
    keys, values = quantize_keys(packed, segments, bits), quantize_values(packed, bits)
    blocks = zip(keys.block_offsets.tolist(), lengths, strict=False)
    block = torch.cat([first + torch.arange(length) // 64 for first, length in blocks])
    numbers = packed.double()
    rounding = numbers.abs() * 2**-23
    key_error = (keys.dequantize(segments).double() - numbers).abs()
    assert (key_error <= 0.5001 * keys.scale.double()[block] + rounding).all()
    value_scale = values.scale.double().repeat_interleave(head_dim // values.scale.shape[1], dim=1)
    assert ((values.dequantize().double() - numbers).abs() <= 0.5001 * value_scale + rounding).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_dequantised_numbers_are_those_of_the_format(bits):
    """Whole, by segment and code by code the same numbers are read."""
    lengths = [63, 0, 64, 130, 1]
    segments = Segments(bounds(lengths))
    for quantized in pairs_of(lengths, 128, bits):
        by_hand = stored_numbers(quantized, lengths)
        torch.testing.assert_close(quantized.dequantize(segments).double(), by_hand, atol=1e-6, rtol=1e-6)
        parts = [quantized.dequantize_segment(segments, index, torch.float64) for index in range(len(lengths))]
        assert torch.equal(torch.cat(parts), by_hand)


@pytest.mark.parametrize("bits", [8, 4])
def test_segments_are_selected_without_requantising(bits):
    """Any segments in any order, repeated ones too, keep their codes and numbers bit for bit."""
    lengths, chosen = [63, 0, 64, 130, 1], [3, 4, 4, 0, 1, 2, 3]
    segments = Segments(bounds(lengths))
    selected = segments.select(chosen)
    assert selected.lengths.tolist() == [lengths[index] for index in chosen]
    for quantized in pairs_of(lengths, 64, bits):
        numbers = quantized.dequantize(segments)
        expected = torch.cat([numbers.split(lengths)[index] for index in chosen])
        assert torch.equal(quantized.select(segments, chosen).dequantize(selected), expected)
        assert torch.equal(segments.gather(numbers, chosen), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_are_those_of_the_format(bits):
    """Codes, a float16 scale and minimum a channel and block or a token and group, bounds of segments and blocks."""
    keys, values = pairs_of([100, 64], 128, bits)
    assert keys.nbytes == 164 * 128 * bits // 8 + 3 * 128 * 4 + 2 * 3 * 8
    assert values.nbytes == 164 * 128 * bits // 8 + 164 * 2 * 4


def test_copies_and_pickles_hold_the_same_numbers():
    """A deep copy shares no memory; a pickle carries all that is needed, and bounds without what kernels derived."""
    segments = Segments(bounds([70, 5]))
    segments.derived("plan", object)
    keys = quantize_keys(randn(75, 64), segments, 4)
    for copied_segments, copied in (copy.deepcopy((segments, keys)), pickle.loads(pickle.dumps((segments, keys)))):
        assert torch.equal(copied.dequantize(copied_segments), keys.dequantize(segments))
        assert copied.codes.data_ptr() != keys.codes.data_ptr()
        assert copied_segments.bounds == segments.bounds and copied_segments._derived == {}
    moved = keys.to("cpu", non_blocking=True)
    assert torch.equal(moved.dequantize(segments), keys.dequantize(segments)) and moved.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(bits=3), "bits must be one of 8, 4, got 3"),
        (dict(packed=torch.zeros(4, 3), bits=4), "4 bits need an even head_dim, got 3; use 8 bits"),
        (dict(packed=torch.tensor([[1.0, torch.nan]] * 4)), "must be finite and below 65,504"),
        (dict(packed=torch.tensor([[1.0, torch.inf]] * 4)), "must be finite and below 65,504"),
        (dict(packed=torch.tensor([[1.0, -7e4]] * 4)), "must be finite and below 65,504.*unquantised"),
    ],
)
def test_what_can_not_be_quantised_is_refused(change, message):
    """Numbers that float16 scales can't reach, and bits that are not stored, are an error with the remedy."""
    packed, bits = change.get("packed", torch.zeros(4, 2)), change.get("bits", 8)
    with pytest.raises(ValueError, match=message):
        quantize_keys(packed, Segments(bounds([4])), bits)
    with pytest.raises(ValueError, match=message):
        quantize_values(packed, bits)


def test_keys_and_bounds_must_agree():
    """Keys of another number of pairs than the segments are an error with both numbers."""
    with pytest.raises(ValueError, match="packed_key holds 5 pairs, the segments 4"):
        quantize_keys(torch.zeros(5, 2), Segments(bounds([4])), 8)


def test_no_pairs_at_all():
    for quantized in pairs_of([0, 0], 64, 4):
        assert quantized.dequantize(Segments(bounds([0, 0]))).shape == (0, 64)
