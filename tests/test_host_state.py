"""What a press must leave alone, and what it must not confuse."""

import pytest
import torch
from harness import TOLERANCE, Operations, ask, follow, make_press, prefill, ragged
from tiny_models import SHAPE, build_model, build_tokenizer, random_ids
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvzip_press import ReplayPrompts, is_compressed, kept_fraction

IDS = random_ids(60)
QUESTION = random_ids(4, seed=7)


def test_rows_with_equal_ids_and_different_images_are_scored_apart():
    model = build_model("gemma3-image-text")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "multi_modal" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 2)
    ids = IDS.clone()
    ids[:, 10:26] = model.config.image_token_id
    ids = ids.repeat(2, 1)
    pixels = torch.randn(2, 4, 3, 16, 16, generator=generator)

    def kept(rows: list[int]) -> list[list[list[int]]]:
        images = {"pixel_values": pixels[rows].flatten(0, 1)}
        types = (ids[rows] == model.config.image_token_id).long()
        cache = prefill(model, ids[rows], make_press(ratio=0.3), token_type_ids=types, **images)
        return [layer.head_lengths.tolist() for layer in ragged(cache)]

    alone = [kept([row]) for row in (0, 1)]
    assert alone[0] != alone[1]
    both = kept([0, 1])
    assert [[layer[row] for layer in both] for row in (0, 1)] == [[layer[0] for layer in one] for one in alone]


def test_a_prepared_mask_is_refused(model):
    """A 4-D mask hides which columns are padding: an error before the replay, not padding among the sinks."""
    mask = torch.ones(60, 60, dtype=torch.bool).tril()
    mask[:, :8] = False
    with pytest.raises(ValueError, match="pass a 2-D attention_mask"):
        prefill(model, IDS, make_press(), attention_mask=mask[None, None])


def test_dynamic_rotary_embeddings_are_restored():
    """Replayed positions beyond the model's window rescale dynamic rotary embeddings; afterwards they are as before."""
    shape = {**SHAPE, "max_position_embeddings": 64}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=rope)).eval()
    full = prefill(model, IDS)
    before = model.model.rotary_emb.inv_freq.clone()
    expected = ask(model, full, QUESTION, steps=0)
    prefill(model, random_ids(60, seed=9), make_press(ratio=0.5))
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert torch.equal(ask(model, full, QUESTION, steps=0), expected)


@pytest.mark.parametrize("generate", [False, True])
def test_of_nested_presses_the_inner_one_compresses(model, generate):
    cache = DynamicCache()
    with torch.no_grad(), make_press(ratio=0.9)(model), make_press(ratio=0.2)(model):
        model.generate(IDS, max_new_tokens=2, past_key_values=cache) if generate else model(IDS, past_key_values=cache)
    assert kept_fraction(cache) == pytest.approx(0.2, abs=0.01)


def test_generate_leaves_other_prefills_of_the_block_unfinished(model):
    cache, press = DynamicCache(), make_press(ratio=0.5)
    with torch.no_grad(), press(model):
        model(IDS[:, :30], past_key_values=cache)
        model.generate(random_ids(40, seed=3), max_new_tokens=2, do_sample=False)
        assert not is_compressed(cache)
        model(IDS[:, 30:], past_key_values=cache)
    expected = follow(model, prefill(model, IDS, press), QUESTION)
    torch.testing.assert_close(follow(model, cache, QUESTION), expected, **TOLERANCE)


def test_gradients_through_a_compressed_cache_are_refused(model):
    """Keys and values of the past are detached: a backward pass raises instead of giving wrong gradients."""
    cache = prefill(model, IDS, make_press())
    with pytest.raises(RuntimeError, match="gives no gradients"):
        model(QUESTION, past_key_values=cache).logits.sum().backward()


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-sliding"])
def test_rows_repeated_in_inference_mode_are_usable_outside(family):
    model = build_model(family)
    cache = prefill(model, IDS, make_press(ratio=0.5))
    follow(model, cache, QUESTION)
    with torch.inference_mode():
        cache.batch_repeat_interleave(2)
        model(QUESTION.repeat(2, 1), past_key_values=cache)
    logits = follow(model, cache, QUESTION.repeat(2, 1))
    assert torch.equal(logits[0], logits[1])


def test_a_reset_cache_is_refused_under_a_press(model):
    cache = prefill(model, IDS, make_press())
    cache.reset()
    assert cache.get_seq_length() == 0 and not is_compressed(cache)
    with pytest.raises(ValueError, match=r"use past_key_values=DynamicCache\(\)"):
        prefill(model, IDS, make_press(), cache)


def test_rows_out_of_range_are_refused(model):
    """Negative rows count from the end; others and an empty selection are an error that changes nothing."""
    cache = prefill(model, IDS.repeat(2, 1), make_press())
    for rows in ([2], [-3], []):
        with pytest.raises(ValueError, match="rows must be some of 0 to 1"):
            cache.batch_select_indices(torch.tensor(rows, dtype=torch.long))
    cache.batch_select_indices(torch.tensor([-1]))
    assert cache.layers[0].batch_size == 1


def test_an_additive_mask_is_looked_into_once_a_forward_pass(model):
    """The device is waited for once, not in every layer; the answer is the boolean mask's, and a bias is refused."""
    cache = prefill(model, IDS, make_press())
    expected = ask(model, cache, QUESTION, steps=0)
    mask = torch.zeros(1, 1, 4, 64).masked_fill_(~torch.ones(4, 64).tril(60).bool(), torch.finfo(torch.float32).min)
    for _ in range(2):
        with torch.no_grad(), Operations() as operations:
            logits = model(QUESTION, attention_mask=mask, past_key_values=cache).logits
        cache.crop(60)
        torch.testing.assert_close(logits, expected, **TOLERANCE)
        # Those whose result the host must wait for
        assert operations.names.count("_local_scalar_dense") + operations.names.count("nonzero") <= 1
    mask[..., -1, 60] = -1.5
    with pytest.raises(NotImplementedError, match="additive attention bias"), torch.no_grad():
        model(QUESTION, attention_mask=mask, past_key_values=cache)


def test_a_template_that_repeats_the_message_can_be_overridden(model):
    """The remedy of the error works: prefix length and suffix given, the template is not asked."""
    tokenizer = build_tokenizer("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}")
    with pytest.raises(ValueError, match=r"prefix_length=\.\.\., suffix="):
        prefill(model, IDS, make_press(tokenizer=tokenizer))
    prompts = ReplayPrompts(prefix_length=6, suffix="\n")
    cache = prefill(model, IDS, make_press(tokenizer=tokenizer, prompts=prompts, ratio=0.5))
    assert cache.layers[0].prefix_pairs == [2 * 6]
