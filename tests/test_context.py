"""CompressedContext, and what it is made of: greedy decoding, forgetting what was asked, counting bytes and time."""

from unittest.mock import Mock

import kvpress
import pytest
import torch
from harness import make_press, prefill
from tiny_models import build_model, build_tokenizer, random_ids
from transformers import DynamicCache

from kvzip_press import CompressedContext, cache_nbytes, context, decoding
from kvzip_press.cache.ragged import RaggedLayer
from kvzip_press.cache.window import WindowLayer
from kvzip_press.decoding import end_tokens, forgetting, greedy

CONTEXT, QUESTION = random_ids(60, seed=1), random_ids(5, seed=2)
TEXT = "The keeper wrote down the name of every ship. " * 6
# How a context is held: plainly, with sliding layers, compressed
CACHES = {
    "plain": lambda model: prefill(model, CONTEXT),
    "config": lambda model: prefill(model, CONTEXT, cache=DynamicCache(config=model.config)),
    "compressed": lambda model: prefill(model, CONTEXT, make_press(ratio=0.4)),
    "quantised": lambda model: prefill(model, CONTEXT, make_press(ratio=0.4, quantization="int8")),
}


@pytest.fixture(params=list(CACHES))
def filled(request):
    """A hybrid model and its cache of a context."""
    model = build_model("gemma3")
    return model, CACHES[request.param](model)


def contents(cache):
    """Everything a cache holds, but for the room it keeps for later tokens."""
    return [
        [item.clone() if isinstance(item, torch.Tensor) else item for item in vars(layer).values()]
        if not hasattr(layer, "context_length")
        else [layer.get_seq_length(), layer.tail_length]
        for layer in cache.layers
    ]


def same(one, other):
    pairs = [pair for parts in zip(one, other, strict=True) for pair in zip(*parts, strict=True)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b or a == b for a, b in pairs)


@torch.no_grad()
def test_greedy_tokens_are_the_most_likely_ones(model):
    model.generation_config.eos_token_id = None
    ids = torch.cat([CONTEXT, QUESTION], dim=1)
    for _ in range(6):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    expected = ids[0, -6:].tolist()
    cache = prefill(model, CONTEXT)
    assert list(greedy(model, cache, QUESTION, 60, 6)) == expected
    assert cache.get_seq_length() == 60 + 5 + 5

    # An end token is the last one, unless it comes first and that is to be overlooked
    model.generation_config.eos_token_id = [expected[0], 7]
    assert end_tokens(model) == {expected[0], 7}
    assert list(greedy(model, prefill(model, CONTEXT), QUESTION, 60, 6)) == expected[:1]
    rest = expected[: 2 + expected[1:].index(expected[0])] if expected[0] in expected[1:] else expected
    assert list(greedy(model, prefill(model, CONTEXT), QUESTION, 60, 6, stop_at_first=False)) == rest
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        next(greedy(model, cache, QUESTION, 60, 0))


@pytest.mark.parametrize("interruption", [None, RuntimeError, KeyboardInterrupt])
def test_whatever_happens_the_cache_is_as_it_was(filled, interruption, monkeypatch):
    """Also when a step ends between two layers, of which one already holds the token."""
    model, cache = filled
    before, nbytes = contents(cache), cache_nbytes(cache)
    first = list(_asked(model, cache))
    assert same(contents(cache), before)
    if interruption is not None:
        with monkeypatch.context() as patched, pytest.raises(interruption):
            patched.setattr(model.model.layers[2].self_attn, "forward", Mock(side_effect=interruption))
            _asked(model, cache)
    assert same(contents(cache), before) and cache_nbytes(cache) == nbytes
    assert _asked(model, cache) == first


def _asked(model, cache):
    with forgetting(cache):
        return list(greedy(model, cache, QUESTION, 60, 3))


def test_a_cache_that_was_empty_is_empty_again(model):
    cache = DynamicCache()
    with forgetting(cache):
        list(greedy(model, cache, QUESTION, 0, 2))
    assert cache.layers == [] and cache.get_seq_length() == 0


def test_storages_count_once_and_whole():
    whole = torch.zeros(100)
    assert cache_nbytes(whole[:10]) == 400
    assert cache_nbytes([whole, whole[:10], {"same": (whole.view(10, 10), torch.zeros(2))}]) == 408
    assert cache_nbytes(torch.nn.Linear(3, 3), "text", 5, torch.float32) == 0


def test_bytes_of_every_kind_of_cache(filled):
    """By hand, of 4 layers of 2 heads and 16 channels, of which two slide within 24 tokens."""
    model, cache = filled
    token = 2 * 2 * 16 * 4
    expected = 0
    for layer in cache.layers:
        if isinstance(layer, RaggedLayer):
            held = [layer.segments.cu_seqlens]
            for packed in (layer.packed_keys, layer.packed_values):
                held += [packed] if isinstance(packed, torch.Tensor) else vars(packed).values()
            # The bounds that quantised keys carry are those of the layer's segments
            expected += sum({part.data_ptr(): part.nbytes for part in held if isinstance(part, torch.Tensor)}.values())
        else:
            # transformers' own sliding layers are slices that keep the whole context alive, and a tensor of one number
            expected += token * (23 if isinstance(layer, WindowLayer) else 60)
            expected += 8 * hasattr(layer, "_sliding_window_tensor")
    assert cache_nbytes(cache) == expected


def test_a_masking_press_holds_its_masks_too(model):
    full = cache_nbytes(prefill(model, CONTEXT))
    masked = prefill(model, CONTEXT, kvpress.AdaKVPress(kvpress.KnormPress(compression_ratio=0.5)))
    masks = [layer.self_attn.masked_key_indices for layer in model.model.layers]
    assert cache_nbytes(masked) == full
    assert cache_nbytes(masked, masks) == full + sum(8 * len(part) for mask in masks for part in mask)


def test_a_context_answers_as_its_cache_does(model, tokenizer):
    text = CompressedContext.compress(model, tokenizer, TEXT, press=make_press(ratio=0.5, tokenizer=None))
    before = text.nbytes
    assert before == cache_nbytes(text.cache)
    answer = text.answer("Who?", max_new_tokens=4)
    ids = torch.tensor([tokenizer.encode("\n\nWho?<e><s>assistant:")])
    assert answer.token_ids == list(greedy(model, text.cache, ids, text.num_tokens, 4))
    assert answer.prefill_seconds > 0 and text.kept_fraction == pytest.approx(0.5, abs=1e-3)
    full = CompressedContext.full(model, tokenizer, TEXT)
    assert full.nbytes == full.full_nbytes == text.full_nbytes > before
    assert full.compress_seconds == 0 and full.kept_fraction == 1 and full.max_length == 4096


def test_impossible_contexts_and_answers_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="the text is empty"):
        CompressedContext.full(model, tokenizer, " \n")
    with pytest.raises(ValueError, match="ratio=0.5 or press=KVzipPress"):
        CompressedContext.compress(model, tokenizer, TEXT, ratio=0.5, press=make_press())
    model.config.max_position_embeddings = 200
    with pytest.raises(ValueError, match="82 more than the model's window of 200"):
        CompressedContext.full(model, tokenizer, TEXT)
    short = CompressedContext.full(model, tokenizer, TEXT[:150])
    with pytest.raises(ValueError, match="more than the model's window of 200; lower max_new_tokens"):
        short.ask("Who?", max_new_tokens=100)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        short.ask("Who?", max_new_tokens=0)


@pytest.mark.parametrize("make", [CompressedContext.full, CompressedContext.compress])
def test_times_are_taken_when_the_device_has_finished(model, tokenizer, monkeypatch, make):
    """A stand-in for a GPU, which does its work while the host goes on: the full cache's prefill took no time."""
    queued = []
    model.model.register_forward_hook(lambda *args: queued.append(5))
    monkeypatch.setattr(context, "device_time", lambda device: sum(queued))
    made = make(model, tokenizer, TEXT)
    assert made.prefill_seconds == 5
    assert made.compress_seconds == (0 if make == CompressedContext.full else 5)


def test_the_clock_waits_for_the_device(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for name in ("cpu", "cuda:1"):
        decoding.device_time(torch.device(name))
    assert waited == [torch.device("cuda:1")]


def test_a_text_without_template_is_raw(model):
    """The BOS token stands for the prefix."""
    assert CompressedContext.full(model, build_tokenizer(None), "abc").num_tokens == 4
