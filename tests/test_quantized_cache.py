"""Compressed caches whose kept pairs are stored in 8 or 4 bits: answers, bytes, and everything a cache can be asked."""

import copy
import io
import pickle

import pytest
import torch
from dense_reference import dense_masked, keep_masks
from harness import TOLERANCE, ask, follow, generated, make_press, prefill, ragged, refused
from tiny_models import WINDOW, build_model, random_ids
from transformers import DynamicCache

from kvzip_press import cache_nbytes, kept_fraction
from kvzip_press.kernels.storage.quantization import QuantizedKeys, QuantizedValues

IDS = random_ids(300, seed=1)
QUESTION = random_ids(6, seed=2)
QUANTIZATIONS = {"int8": 8, "int4": 4}


def rounded_full_cache(full: DynamicCache, compressed: DynamicCache, keep: dict[int, torch.Tensor]) -> None:
    """Replace in the full cache each kept pair by the numbers that the compressed one stores."""
    for index, mask in keep.items():
        layer = compressed.layers[index]
        for name, packed in (("keys", layer.packed_keys), ("values", layer.packed_values)):
            states = getattr(full.layers[index], name)
            held = states[:, :, states.shape[2] - mask.shape[2] :]
            held[mask] = packed.dequantize(layer.segments).to(states.dtype)


@pytest.mark.parametrize("quantization", list(QUANTIZATIONS))
@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_answers_equal_the_masked_dense_reference_over_the_stored_numbers(family, quantization, backend):
    model = build_model(family)
    ids = IDS[:, :90]
    cache = prefill(model, ids, make_press(ratio=0.4, quantization=quantization, backend=backend))
    assert ragged(cache)
    for layer in ragged(cache):
        assert isinstance(layer.packed_keys, QuantizedKeys) and isinstance(layer.packed_values, QuantizedValues)
        assert layer.packed_keys.bits == layer.packed_values.bits == QUANTIZATIONS[quantization]
        assert all(buffer.dtype == torch.float32 for buffer in layer._tail._buffers)
    full = prefill(model, ids)
    keep = keep_masks(full, prefill(model, ids, make_press(ratio=0.4)))
    rounded_full_cache(full, cache, keep)
    ours = follow(model, cache, QUESTION, WINDOW + 4)
    with dense_masked(model, keep):
        expected = follow(model, full, QUESTION, WINDOW + 4)
    torch.testing.assert_close(ours, expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_are_near_those_of_the_unquantised_cache(model, dtype):
    """The distance of the logits falls with the bits, and in 8 bits is a fraction of that of dropping pairs at all."""
    model = model.to(dtype)
    full = follow(model, prefill(model, IDS), QUESTION).float()
    plain = follow(model, prefill(model, IDS, make_press(ratio=0.3)), QUESTION).float()
    distance = {}
    for quantization in QUANTIZATIONS:
        cache = prefill(model, IDS, make_press(ratio=0.3, quantization=quantization))
        distance[quantization] = (follow(model, cache, QUESTION).float() - plain).norm().item()
    dropped = (plain - full).norm().item()
    assert distance["int8"] < distance["int4"] < dropped
    assert distance["int8"] < dropped / 5


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.32), ("int4", 0.2)])
def test_bytes_fall_with_the_bits(quantization, most):
    """Against float32: 8 and 4 of 32 bits a number, and the scales: measured on storages, and freed in the tail too."""
    model = build_model("qwen3")
    ids = random_ids(1500)
    plain = prefill(model, ids, make_press(ratio=0.5, chunk_size=300))
    cache = prefill(model, ids, make_press(ratio=0.5, chunk_size=300, quantization=quantization))
    assert kept_fraction(cache) == kept_fraction(plain) == pytest.approx(0.5, abs=1e-3)
    assert cache_nbytes(cache) < most * cache_nbytes(plain)
    bits, expected = QUANTIZATIONS[quantization], 0
    for layer in ragged(cache):
        pairs = int(layer.head_lengths.sum())
        blocks = int(((layer.head_lengths + 63) // 64).sum())
        # Codes of keys and values; float16 scale and minimum a channel and block, and a value; bounds of both
        expected += 2 * pairs * 16 * bits // 8 + blocks * 16 * 4 + pairs * 4 + 2 * 3 * 8
    assert cache_nbytes(cache) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-sliding"])
@pytest.mark.parametrize("quantization", list(QUANTIZATIONS))
def test_rows_are_repeated_reordered_and_selected(family, quantization):
    model = build_model(family)
    press = make_press(ratio=0.4, quantization=quantization)
    contexts = [IDS[:, :70], random_ids(70, seed=3)]
    alone = [prefill(model, ids, press) for ids in contexts]
    answers = [ask(model, cache, QUESTION) for cache in alone]
    cache = prefill(model, torch.cat(contexts), press)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 2, 1]))
    cache.batch_select_indices(torch.tensor([0, 1, 3]))
    rows = [1, 0, 0]
    answered = follow(model, cache, QUESTION.expand(3, -1))
    for row, context in enumerate(rows):
        torch.testing.assert_close(answered[row : row + 1], answers[context][:, :6], **TOLERANCE)
    for layer, *own in zip(ragged(cache), *(ragged(one) for one in alone), strict=True):
        expected = [own[context] for context in rows]
        numbers = layer.packed_keys.dequantize(layer.segments)
        assert torch.equal(numbers, torch.cat([one.packed_keys.dequantize(one.segments) for one in expected]))
        assert layer.head_lengths.tolist() == [one.head_lengths[0].tolist() for one in expected]


@pytest.mark.parametrize("quantization", list(QUANTIZATIONS))
def test_beam_search_in_generate(model, quantization):
    """Beams decode from re-cut quantised rows: one beam gives the greedy tokens, three at least as likely ones."""
    press = make_press(ratio=0.5, quantization=quantization)
    ids = IDS[:, :60]

    def likelihood(sequence):
        cache = DynamicCache()
        with torch.no_grad(), press(model):
            first = model(input_ids=ids, past_key_values=cache).logits[:, -1:]
        logits = torch.cat([first, follow(model, cache, sequence[:, 60:-1])], dim=1).log_softmax(-1)
        return logits.gather(-1, sequence[:, 60:, None]).flatten(), logits.argmax(-1)

    greedy, beams = (generated(model, ids, press, num_beams=beams, max_new_tokens=6) for beams in (1, 3))
    tokens, best = likelihood(greedy)
    assert torch.equal(best, greedy[:, 60:])
    assert likelihood(beams)[0].sum() >= tokens.sum() - 1e-4


def saved_and_loaded(cache):
    torch.save(cache, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), saved_and_loaded])
@pytest.mark.parametrize("quantization", [None, *QUANTIZATIONS])
def test_copies_live_apart(model, copied, quantization):
    cache = prefill(model, IDS[:, :80], make_press(ratio=0.3, quantization=quantization))
    assert len(pickle.dumps(cache)) < 0.6 * len(pickle.dumps(prefill(model, IDS[:, :80])))
    expected = ask(model, cache, QUESTION)
    other = copied(cache)
    assert kept_fraction(other) == kept_fraction(cache)
    for layer, original in zip(ragged(other), ragged(cache), strict=True):
        codes, own = (getattr(packed, "codes", packed) for packed in (layer.packed_keys, original.packed_keys))
        assert codes.data_ptr() != own.data_ptr() and layer.nbytes == original.nbytes
    follow(model, other, random_ids(9, seed=5))
    assert cache.get_seq_length() == 80 and torch.equal(ask(model, cache, QUESTION), expected)
    other.crop(80)
    assert torch.equal(ask(model, other, QUESTION), expected)


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_cropped_moved_and_reset(family, quantization):
    model = build_model(family)
    cache = prefill(model, IDS[:, :80], make_press(ratio=0.3, quantization=quantization))
    expected = ask(model, cache, QUESTION)
    follow(model, cache, QUESTION)
    cache.crop(80)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert torch.equal(ask(model, cache, QUESTION), expected)
    follow(model, cache, QUESTION)
    cache.reset()
    assert cache.get_seq_length() == 0
    expected = follow(model, DynamicCache(), QUESTION, 3)
    torch.testing.assert_close(follow(model, cache, QUESTION, 3), expected, **TOLERANCE)


def test_what_can_not_be_stored_is_refused_before_any_work(model):
    model.config.head_dim = 7
    with refused(model, "4 bits need an even head_dim, got 7; use 8 bits"):
        prefill(model, IDS, make_press(quantization="int4"))
    del model.config.head_dim
    with refused(model, "backend 'flash' runs on CUDA GPUs only, got tensors on cpu"):
        prefill(model, IDS, make_press(quantization="int4", backend="flash"))
