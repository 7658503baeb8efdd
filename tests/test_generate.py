"""generate inside the press and with a compressed cache, prefills in several calls, batches and beams."""

import pytest
import torch
from dense_reference import dense_masked, keep_masks
from harness import TOLERANCE, all_equal, ask, counted_calls, follow, generated, make_press, packed_states, pad, prefill
from tiny_models import build_model, random_ids
from transformers import DynamicCache

from kvzip_press import cache_nbytes, is_compressed, kept_fraction
from kvzip_press.models import language_model

PROMPT = random_ids(80, seed=1)
LONG = random_ids(300, seed=2)


@torch.no_grad()
def prefill_then_decode(model, ids, press, steps: int = 8) -> tuple[torch.Tensor, DynamicCache]:
    """What generate under a press must give: the prompt prefilled, its cache compressed, then a greedy loop."""
    cache = DynamicCache()
    with press(model):
        logits = model(input_ids=ids, past_key_values=cache).logits
    tokens = [logits[:, -1:].argmax(-1)]
    while len(tokens) < steps:
        tokens.append(model(input_ids=tokens[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
    return torch.cat([ids, *tokens], dim=1), cache


@pytest.mark.parametrize("given", [True, False])
def test_generate_inside_the_press_is_compressed(family, given):
    model, press = build_model(family), make_press(ratio=0.2)
    expected, expected_cache = prefill_then_decode(model, PROMPT, press)
    caches = {"past_key_values": DynamicCache()} if given else {}
    out = generated(model, PROMPT, press, return_dict_in_generate=True, **caches)
    cache = caches.get("past_key_values", out.past_key_values)
    assert torch.equal(out.sequences, expected)
    assert all_equal(packed_states(cache), packed_states(expected_cache))
    assert cache.get_seq_length() == PROMPT.shape[1] + 7
    assert kept_fraction(cache) == pytest.approx(0.2, abs=0.01)


def test_generate_inside_the_press_holds_the_bytes_of_what_is_kept(model):
    cache = DynamicCache()
    generated(model, LONG, make_press(ratio=0.2), past_key_values=cache)
    full_bytes = cache_nbytes(prefill(model, LONG))
    tail_bytes = 2 * 4 * 2 * 64 * 8 * 4  # keys and values, layers, heads, smallest tail, head_dim, float32
    pairs = sum(len(layer.packed_keys) for layer in cache.layers)
    assert pairs == round(0.2 * 296 * 8) + 4 * 8
    assert cache_nbytes(cache) < full_bytes * pairs / (300 * 8) + tail_bytes + 200


@torch.no_grad()
def chunked_prefill_then_decode(model, press, chunk: int) -> tuple[torch.Tensor, DynamicCache]:
    """Prefill in several calls and a greedy loop, at the positions that transformers' chunked prefill gives."""
    positions, cache = [], DynamicCache()

    def note(module, args, kwargs):
        positions.append({key: kwargs[key] for key in ("position_ids", "cache_position")})

    handle = model.model.register_forward_pre_hook(note, with_kwargs=True)
    generated(model, PROMPT, prefill_chunk_size=chunk)
    handle.remove()
    parts = PROMPT.split(chunk, dim=1)
    with press(model):
        for part, where in zip(parts, positions, strict=False):
            logits = model(input_ids=part, past_key_values=cache, **where).logits
    tokens = [logits[:, -1:].argmax(-1)]
    for where in positions[len(parts) :]:
        tokens.append(model(input_ids=tokens[-1], past_key_values=cache, **where).logits[:, -1:].argmax(-1))
    return torch.cat([PROMPT, *tokens], dim=1), cache


@pytest.mark.parametrize("chunk", [1, 7, 40, 79, 80, 200])
def test_generate_with_a_chunked_prefill(model, chunk):
    """With prefill_chunk_size all chunks are one context, compressed once, before the first decode step."""
    press, cache = make_press(ratio=0.2), DynamicCache()
    expected, expected_cache = chunked_prefill_then_decode(model, press, chunk)
    assert torch.equal(generated(model, PROMPT, press, past_key_values=cache, prefill_chunk_size=chunk), expected)
    assert all_equal(packed_states(cache), packed_states(expected_cache))
    assert kept_fraction(cache) == pytest.approx(0.2, abs=0.01)
    whole = generated(model, PROMPT, make_press(ratio=1.0), prefill_chunk_size=chunk)
    assert torch.equal(whole, generated(model, PROMPT, prefill_chunk_size=chunk))


@pytest.mark.parametrize("inside", [False, True])
def test_generate_with_a_compressed_cache(family, inside):
    """generate(context + question, past_key_values=cache) reads the question alone; a block compresses nothing."""
    model, press, question = build_model(family), make_press(ratio=0.3), random_ids(6, seed=4)
    cache, ids = prefill(model, PROMPT, press), torch.cat([PROMPT, question], dim=1)
    states = packed_states(cache)
    with counted_calls(language_model(model).norm) as fed:
        out = generated(model, ids, press if inside else None, past_key_values=cache)
    assert [shape[1] for shape in fed] == [6] + [1] * 7
    assert all_equal(packed_states(cache), states) and cache.layers[0].tail_length == 6 + 7
    cache.crop(PROMPT.shape[1])
    logits = ask(model, cache, question, 7)
    assert torch.equal(out[0, -8:], logits[0, 5:].argmax(-1))


def test_generate_in_the_block_and_after_it(model):
    press, cache = make_press(ratio=0.3), DynamicCache()
    first = generated(model, PROMPT, press, past_key_values=cache)
    states = packed_states(cache)
    both = generated(model, first, past_key_values=cache)
    expected, _ = prefill_then_decode(model, PROMPT, press, steps=16)
    assert torch.equal(both, expected)
    assert all_equal(packed_states(cache), states)


def test_two_generates_in_one_block_are_two_contexts(model):
    press, caches = make_press(ratio=0.3), [DynamicCache(), DynamicCache()]
    prompts = [PROMPT, random_ids(50, seed=5)]
    with press(model):
        outs = [generated(model, p, past_key_values=c) for p, c in zip(prompts, caches, strict=True)]
    for prompt, cache, out in zip(prompts, caches, outs, strict=True):
        expected, expected_cache = prefill_then_decode(model, prompt, press)
        assert torch.equal(out, expected) and all_equal(packed_states(cache), packed_states(expected_cache))


@pytest.mark.parametrize("sizes", [(45, 45), (1, 89), (89, 1), (10,) * 9, (1,) * 90])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-sliding"])
def test_a_prefill_in_many_calls_equals_one_call(family, sizes):
    model, press = build_model(family), make_press(ratio=0.3)
    ids, question = random_ids(90, seed=3), random_ids(5, seed=4)
    whole, cache = prefill(model, ids, press), DynamicCache()
    with torch.no_grad(), press(model):
        for part in ids.split(sizes, dim=1):
            language_model(model)(input_ids=part, past_key_values=cache)
            assert not is_compressed(cache)
    assert cache.get_seq_length() == 90
    # The bounds of the segments are among these: integers that differ are not close
    torch.testing.assert_close(packed_states(cache), packed_states(whole), **TOLERANCE)
    torch.testing.assert_close(ask(model, cache, question), ask(model, whole, question), **TOLERANCE)


def test_caches_filled_alternately_in_one_block(model):
    press, caches = make_press(ratio=0.3), [DynamicCache(), DynamicCache()]
    contexts = [random_ids(60, seed=5), random_ids(60, seed=6)]
    with torch.no_grad(), press(model):
        for part in range(2):
            for ids, cache in zip(contexts, caches, strict=True):
                prefill(model, ids[:, 30 * part : 30 * part + 30], cache=cache)
    for ids, cache in zip(contexts, caches, strict=True):
        lengths = [[layer.head_lengths.tolist() for layer in one.layers] for one in (cache, prefill(model, ids, press))]
        assert lengths[0] == lengths[1]


def test_a_cache_that_was_filled_or_cropped_outside_of_the_prefill_is_refused(model):
    """Tokens that the press did not see can't be replayed: an error before the forward. Fewer than it saw neither."""
    cache = prefill(model, PROMPT)
    with pytest.raises(ValueError, match="already holds 80 tokens.*under the press"):
        prefill(model, random_ids(5), make_press(), cache)
    assert cache.get_seq_length() == 80 and not is_compressed(cache)
    cache = DynamicCache()
    with pytest.raises(ValueError, match="holds 70 tokens but 80 were fed"), torch.no_grad(), make_press()(model):
        prefill(model, PROMPT, cache=cache)
        cache.crop(70)
    assert not is_compressed(cache)


def test_generate_of_a_padded_batch_equals_each_row_alone(model):
    press = make_press(ratio=0.4)
    rows = [random_ids(80, seed=9), random_ids(50, seed=10)]
    ids, mask = pad(rows)
    out = generated(model, ids, press, attention_mask=mask)
    for index, row in enumerate(rows):
        expected, _ = prefill_then_decode(model, row, press)
        assert torch.equal(out[index, 80:], expected[0, row.shape[1] :])


def test_right_padding_is_refused(model):
    """A mask with zeros after the text would put padding among the context's tokens: refused with the remedy."""
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[1, 60:] = 0
    cache = DynamicCache()
    with pytest.raises(ValueError, match="pad on the left"):
        prefill(model, PROMPT.repeat(2, 1), make_press(), cache, attention_mask=mask)
    assert not is_compressed(cache)


def test_beam_search_inside_the_press(model):
    expected, cache = generated(model, PROMPT, num_beams=2), DynamicCache()
    assert torch.equal(generated(model, PROMPT, make_press(ratio=1.0), num_beams=2), expected)
    out = generated(model, PROMPT, make_press(ratio=0.3), num_beams=2, past_key_values=cache)
    assert out.shape == expected.shape
    assert kept_fraction(cache) == pytest.approx(0.3, abs=0.01)
    for layer in cache.layers:
        assert layer.head_lengths[0].tolist() == layer.head_lengths[1].tolist()


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_beams_on_a_compressed_cache_are_those_of_the_masked_dense_cache(model, ratio):
    ids = torch.cat([PROMPT, random_ids(4, seed=4)], dim=1)
    compressed, full = prefill(model, PROMPT, make_press(ratio=ratio)), prefill(model, PROMPT)
    keep = {layer: mask.repeat(2, 1, 1) for layer, mask in keep_masks(full, compressed).items()}
    compressed.batch_repeat_interleave(2)
    full.batch_repeat_interleave(2)
    ours = generated(model, ids, past_key_values=compressed, num_beams=2)
    assert ours.shape == (1, PROMPT.shape[1] + 4 + 8) and compressed.layers[0].batch_size == 2
    with dense_masked(model, keep):
        assert torch.equal(ours, generated(model, ids, past_key_values=full, num_beams=2))


def test_every_row_of_a_batch_and_every_copy_of_it_answers_as_alone(family):
    model, press = build_model(family), make_press(ratio=0.3)
    ids, question = random_ids(60, batch_size=2, seed=7), random_ids(5, batch_size=2, seed=8)
    cache = prefill(model, ids, press)
    alone = torch.cat([ask(model, prefill(model, ids[r : r + 1], press), question[r : r + 1]) for r in (0, 1)])
    torch.testing.assert_close(ask(model, cache, question), alone, **TOLERANCE)
    cache.batch_repeat_interleave(3)
    copies = question.repeat_interleave(3, dim=0)
    torch.testing.assert_close(ask(model, cache, copies), alone.repeat_interleave(3, dim=0), **TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-sliding"])
@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 0], [2]])
def test_rows_can_be_reordered_and_selected_with_their_tails(family, rows):
    model, press = build_model(family), make_press(ratio=0.3)
    ids, questions = random_ids(60, batch_size=3, seed=7), random_ids(5, batch_size=3, seed=8)
    later = random_ids(4, seed=9).repeat(len(rows), 1)
    for method in ("reorder_cache", "batch_select_indices"):
        cache = prefill(model, ids, press)
        follow(model, cache, questions)
        getattr(cache, method)(torch.tensor(rows))
        logits = follow(model, cache, later)
        assert logits.shape[0] == len(rows)
        assert kept_fraction(cache) == pytest.approx(0.3, abs=0.01)
        for index, row in enumerate(rows):
            alone = prefill(model, ids[row : row + 1], press)
            follow(model, alone, questions[row : row + 1])
            torch.testing.assert_close(logits[index : index + 1], follow(model, alone, later[:1]), **TOLERANCE)


def test_a_batch_of_another_size_is_refused(model):
    cache = prefill(model, PROMPT, make_press(ratio=0.3))
    states = packed_states(cache)
    with pytest.raises(ValueError, match="holds 1 rows, the input has 2.*batch_repeat_interleave"):
        follow(model, cache, random_ids(4, batch_size=2))
    assert all_equal(packed_states(cache), states)
