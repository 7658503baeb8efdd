"""What a press takes: ways to call the model, tokenizers, chat prefixes, short contexts, parameters."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from harness import TOLERANCE, all_equal, ask, follow, kept_positions, make_press, packed_states, prefill, refused
from tiny_models import build_model, build_tokenizer, random_ids
from transformers import DynamicCache

from kvzip_press import KVzipPress, ReplayPrompts, is_compressed, kept_fraction
from kvzip_press.models import ModelLayout

IDS = random_ids(80, seed=1)
QUESTION = random_ids(5, seed=2)
IDS_ONLY = ReplayPrompts(first=[10, 11, 12], later=[13, 14], anchor_tokens=4, suffix=[15], prefix_length=3)


def chat_ids(text: str) -> torch.Tensor:
    """Ids of a text inside the tests' chat template: its prefix is `<s>user:`, 6 tokens."""
    return torch.tensor([build_tokenizer().encode("<s>user:" + text, add_special_tokens=False)])


@torch.no_grad()
def test_every_way_to_call_the_model_is_compressed(model):
    """Ids and cache by position or keyword, to the model or its decoder, or with a cache that the model makes."""
    press, caches = make_press(ratio=0.3), [DynamicCache() for _ in range(3)]
    with press(model):
        model(IDS, None, None, caches[0])
        model.model(IDS, None, None, caches[1])
        model(IDS, past_key_values=caches[2])
        caches += [model(IDS).past_key_values, model.model(IDS, use_cache=True).past_key_values]
        caches.append(model(IDS, return_dict=False)[1])
    expected = packed_states(prefill(model, IDS, press))
    assert all(all_equal(packed_states(cache), expected) for cache in caches)


@torch.no_grad()
def test_embeddings_equal_the_ids_they_come_from(family):
    model = build_model(family)
    press = make_press(ratio=0.3, prompts=ReplayPrompts(anchor_tokens=0, prefix_length=7))
    expected, cache = prefill(model, IDS, press), DynamicCache()
    with press(model):
        ModelLayout.of(model).decoder(inputs_embeds=model.get_input_embeddings()(IDS), past_key_values=cache)
    torch.testing.assert_close(packed_states(cache), packed_states(expected), **TOLERANCE)
    torch.testing.assert_close(ask(model, cache, QUESTION), ask(model, expected, QUESTION), **TOLERANCE)


def test_generate_from_embeddings(model):
    press = make_press(ratio=0.3, prompts=ReplayPrompts(anchor_tokens=0, prefix_length=7))
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    with press(model):
        by_ids = model.generate(IDS, **options)
        by_embeds = model.generate(inputs_embeds=model.get_input_embeddings()(IDS).detach(), **options)
    assert torch.equal(by_embeds, by_ids[:, IDS.shape[1] :])


@pytest.mark.parametrize("family", ["llama", "gemma3-image-text"])
@pytest.mark.parametrize("entry", ["model", "model.model"])
@torch.no_grad()
def test_ids_are_known_wherever_the_model_is_entered(family, entry):
    """An image-text model turns ids into embeddings between its modules: prefix and anchors are found nonetheless."""
    model, press, cache = build_model(family), make_press(ratio=0.1), DynamicCache()
    ids = chat_ids("a" * 40 + "b" * 40)
    with press(model):
        (model if entry == "model" else model.model)(input_ids=ids, past_key_values=cache)
    expected = prefill(model, ids, press)
    assert [layer.prefix_pairs for layer in cache.layers if hasattr(layer, "prefix_pairs")][0] == [12]
    torch.testing.assert_close(packed_states(cache), packed_states(expected), **TOLERANCE)


def test_an_empty_block_does_nothing_and_a_forward_without_a_cache_raises_before_any_work(model):
    with make_press()(model):
        pass
    with refused(model, "use_cache=True"), make_press()(model):
        model.model(input_ids=IDS, use_cache=False)
    model.config.use_cache = False
    with pytest.raises(ValueError, match="use_cache=True"), torch.no_grad(), make_press()(model):
        model.model(input_ids=IDS)


def test_a_model_without_a_name_or_a_tokenizer_under_it_says_so(model, tmp_path):
    with refused(model, "LlamaForCausalLM was built in memory.*tokenizer="):
        prefill(model, IDS, KVzipPress())
    assert is_compressed(prefill(model, IDS, KVzipPress(tokenizer=build_tokenizer())))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path.name}.*tokenizer="), KVzipPress()(loaded):
        pass


def test_prompts_of_ids_need_no_tokenizer(model):
    press = KVzipPress(ratio=0.3, chunk_size=32, prompts=IDS_ONLY)
    full, cache = prefill(model, IDS), prefill(model, IDS, press)
    assert all({0, 1, 2} <= head for heads in kept_positions(full, cache) for head in heads)
    with_tokenizer = make_press(ratio=0.3, prompts=IDS_ONLY)
    assert all_equal(packed_states(cache), packed_states(prefill(model, IDS, with_tokenizer)))


@pytest.mark.parametrize("level", ["pair", "pair-layer", "pair-uniform"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_the_chat_prefix_is_kept_in_every_head(family, level):
    model = build_model(family)
    ids = chat_ids("The harbour was rebuilt in 1907, and again in 1931. " * 2)
    compressed = prefill(model, ids, make_press(ratio=0.02, level=level))
    assert all({*range(6)} <= head for heads in kept_positions(prefill(model, ids), compressed) for head in heads)
    assert kept_fraction(compressed) == pytest.approx(0.02, abs=0.01)


def test_a_long_system_prompt_is_kept_in_every_head(model):
    prefix = "<s>system:You are a helpful assistant who answers in one short sentence.<s>user:"
    tokenizer = build_tokenizer(
        prefix.removesuffix("<s>user:") + "{% for m in messages %}<s>user:{{ m['content'] }}<e>{% endfor %}"
    )
    ids = torch.tensor([tokenizer.encode(prefix + "The tower was built in 1907. " * 3, add_special_tokens=False)])
    length = len(tokenizer.encode(prefix, add_special_tokens=False))
    assert length == 76
    compressed = prefill(model, ids, make_press(ratio=0.05, tokenizer=tokenizer))
    for head in sum(kept_positions(prefill(model, ids), compressed), []):
        assert set(range(length)) <= head and not set(range(length, ids.shape[1])) <= head


def test_a_raw_context_keeps_its_sinks_and_nothing_else_for_free(model):
    """Outside of the chat template only the first tokens are protected; the user's text competes as a whole."""
    ids = random_ids(100, seed=5)
    kept = kept_positions(prefill(model, ids), prefill(model, ids, make_press(ratio=0.1, level="pair-uniform")))
    assert all({*range(4)} <= head and len(head) == 4 + round(0.1 * 96) for heads in kept for head in heads)
    without = prefill(model, ids, make_press(ratio=0.1, level="pair-uniform", n_sink=0))
    assert all(len(head) == 10 for heads in kept_positions(prefill(model, ids), without) for head in heads)
    assert without.layers[0].prefix_pairs == [0]


def test_without_a_chat_template_the_bos_token_is_the_prefix(model):
    """kvpress's pipeline puts the BOS token before a raw text: it is kept, even without sinks."""
    tokenizer = build_tokenizer(None)
    ids = torch.tensor([[1, *random_ids(60)[0].tolist()]])
    cache = prefill(model, ids, make_press(tokenizer=tokenizer, ratio=0.1, n_sink=0))
    assert cache.layers[0].prefix_pairs == [2]
    assert all(0 in head for heads in kept_positions(prefill(model, ids), cache) for head in heads)


@pytest.mark.parametrize("length", range(1, 11))
@pytest.mark.parametrize("level", ["pair", "pair-layer", "pair-uniform"])
def test_short_contexts_keep_every_layer(family, length, level):
    """From 1 to 10 tokens no head goes empty: sinks stay, the rest is counted, and the cache still answers."""
    model = build_model(family)
    ids = random_ids(length, seed=length)
    cache = prefill(model, ids, make_press(ratio=0.3, level=level))
    assert cache.get_seq_length() == length
    lengths = [layer.head_lengths for layer in cache.layers if hasattr(layer, "head_lengths")]
    assert torch.stack(lengths).min() >= min(4, length)
    if length <= 4:
        full = prefill(model, ids)
        torch.testing.assert_close(ask(model, cache, QUESTION), ask(model, full, QUESTION), **TOLERANCE)
    else:
        assert torch.isfinite(ask(model, cache, QUESTION)).all()


NOT_A_FRACTION = [math.nan, math.inf, -0.1, True, False, "x", "0.3", [0.3], 1.5]


@pytest.mark.parametrize(
    ("name", "interval", "value"),
    [("ratio", r"\(0, 1\]", value) for value in (*NOT_A_FRACTION, 0, 0.0)]
    + [("compression_ratio", r"\[0, 1\)", value) for value in (*NOT_A_FRACTION, 1, 1.0)],
)
def test_what_is_no_fraction_is_refused_in_the_constructor_and_later(name, interval, value):
    with pytest.raises(ValueError, match=rf"^{name} must be a number in {interval}, got"):
        KVzipPress(**{name: value})
    press = KVzipPress(ratio=0.4)
    with pytest.raises(ValueError, match="got"):
        setattr(press, name, value)
    with pytest.raises(ValueError, match=f"{name} can't be unset"):
        setattr(press, name, None)
    assert (press.ratio, press.compression_ratio) == (0.4, 0.6)


def test_ratio_and_compression_ratio_are_one_state(model):
    press = make_press(ratio=0.3)
    assert press.compression_ratio == 0.7
    # As kvpress's evaluation does: one instance for many contexts, under inference mode
    for seed, removed in itertools.product(range(2), (0.25, 0.5, 0.75, 0.875)):
        press.compression_ratio = removed
        with torch.inference_mode():
            cache = prefill(model, random_ids(60, seed=seed), press)
        assert press.compression_ratio == removed and press.ratio == 1 - removed
        assert kept_fraction(cache) == pytest.approx(1 - removed, abs=1e-3)
    press.ratio = 1
    assert press.compression_ratio == 0
    assert KVzipPress(ratio=0.3, compression_ratio=0.7).ratio == 0.3
    with pytest.raises(ValueError, match="give one of.*ratio=0.3, compression_ratio=0.3"):
        KVzipPress(ratio=0.3, compression_ratio=0.3)
    assert KVzipPress(compression_ratio=np.float64(0.25)).ratio == 0.75
    press = KVzipPress(ratio=1e-13)
    assert press.ratio == 1e-13 and 0 < press.compression_ratio < 1
    press.compression_ratio = 1 - 1e-13
    assert 0 < press.ratio < 1e-12


def test_a_budget_replaces_the_fraction_and_back():
    """A budget has no fraction until a context is known; setting a fraction ends the budget."""
    press = KVzipPress(budget=16)
    assert (press.ratio, press.compression_ratio, press.budget) == (None, None, 16)
    press.compression_ratio = 0.25
    assert (press.ratio, press.compression_ratio, press.budget) == (0.75, 0.25, None)
    press.budget = 8
    assert (press.ratio, press.compression_ratio, press.budget) == (None, None, 8)
    with pytest.raises(ValueError, match="give one of"):
        KVzipPress(ratio=0.3, budget=16)
    for value in (0, -1, 1.5, True, "8"):
        with pytest.raises(ValueError, match="budget must be a whole number of at least 1"):
            press.budget = value
    with pytest.raises(ValueError, match="budget can't be unset"):
        press.budget = None
    assert press.budget == 8


def test_the_printed_press_is_short_and_always_the_same(model):
    """str(press), which goes into result files, names the amount and what differs from the default, and no object."""
    assert str(KVzipPress()) == "KVzipPress(ratio=0.3)"
    press = KVzipPress(compression_ratio=0.25, level="pair-layer", tokenizer=build_tokenizer())
    assert str(press) == repr(press) == "KVzipPress(ratio=0.75, level='pair-layer')"
    prefill(model, IDS, press)
    assert str(press) == "KVzipPress(ratio=0.75, level='pair-layer')"
    assert str(KVzipPress(budget=64)) == "KVzipPress(budget=64)"
    quantised = KVzipPress(quantization="int4")
    assert str(quantised) == "KVzipPress(ratio=0.3, quantization='int4')"
    quantised.quantization = None
    assert str(quantised) == "KVzipPress(ratio=0.3)"
    assert str(copy.deepcopy(press)) == str(press)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("level", "tokens", "level must be one of 'pair'.*got 'tokens'"),
        ("replay", "none", "replay must be one of 'local', 'full', got 'none'"),
        ("scorer", None, "scorer must be one of 'kvzip'.*got None"),
        ("repeat", "all", "repeat must be one of 'context'.*got 'all'"),
        ("prompts", "long", "prompts must be one of 'default', 'paper', got 'long'"),
        ("backend", "fast", "backend must be one of auto.*got 'fast'"),
        ("chunk_size", 0, "chunk_size must be a whole number of at least 1, got 0"),
        ("chunk_size", 2.5, "chunk_size must be a whole number.*got 2.5"),
        ("n_sink", -1, "n_sink must be a whole number of at least 0, got -1"),
        *(("quantization", value, "must be one of 'int8', 'int4', got") for value in ("int3", 4, True, "INT8")),
        ("tokenizer", "gpt2", "tokenizer must be a loaded tokenizer, got 'gpt2'"),
        ("head_scores", torch.ones(4, 2), "head_scores must be a HeadScores, got Tensor.*HeadScores.load"),
    ],
)
def test_every_other_parameter_is_checked_whenever_it_is_set(name, value, message):
    with pytest.raises(ValueError, match=message):
        KVzipPress(**{name: value})
    press = KVzipPress()
    before = getattr(press, name)
    with pytest.raises(ValueError, match=message):
        setattr(press, name, value)
    assert getattr(press, name) is before


@pytest.mark.parametrize("implementation", ["eager", "flex_attention", "paged|sdpa"])
def test_attention_that_can_not_be_routed_is_refused_before_any_forward(model, implementation):
    model.config._attn_implementation = implementation
    with refused(model, "set_attn_implementation.'sdpa'"):
        prefill(model, IDS, make_press())


def test_a_compressed_cache_used_with_eager_attention_raises(family):
    """Eager attention can't see the compressed context: it raises instead of answering from the question alone."""
    model = build_model(family)
    cache = prefill(model, IDS, make_press(ratio=0.3))
    expected = ask(model, cache, QUESTION)
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="can't read a compressed KV cache.*set_attn_implementation.'sdpa'"):
        follow(model, cache, QUESTION)
    model.set_attn_implementation("sdpa")
    cache.crop(IDS.shape[1])
    assert torch.equal(ask(model, cache, QUESTION), expected)
