"""A compressed cache gives the logits of the full cache with the evicted pairs masked out."""

import pytest
import torch
from dense_reference import dense_masked, keep_masks
from harness import TOLERANCE, context_of, follow, make_press, pad, prefill
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, build_model, build_tokenizer, random_ids
from transformers import DynamicCache

from kvzip_press import HeadScores, is_compressed
from kvzip_press.models import TESTED_MODELS, ModelLayout
from kvzip_press.selection import LEVELS, Allowance


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("replay", ["local", "full"])
def test_logits_equal_the_masked_dense_reference(family, level, replay):
    model, ids, options = build_model(family), random_ids(100), {}
    if level == "head":
        shape = (len(ModelLayout.of(model).evicted), 2)
        options = {"head_scores": HeadScores(torch.rand(shape, generator=torch.Generator().manual_seed(3)))}
    compressed = prefill(model, ids, make_press(level=level, ratio=0.4, replay=replay, **options))
    full = prefill(model, ids)
    keep = keep_masks(full, compressed)
    assert keep and any(0 < mask.float().mean() < 1 for mask in keep.values())
    for length, steps in ((1, 0), (7, 20), (64, 0)):
        question = random_ids(length, seed=length)
        ours = follow(model, compressed, question, steps)
        compressed.crop(ids.shape[1])
        reference_cache = prefill(model, ids)
        with dense_masked(model, keep):
            expected = follow(model, reference_cache, question, steps)
        torch.testing.assert_close(ours, expected, **TOLERANCE)


def test_ratio_one_equals_the_full_cache(family):
    model, ids, question = build_model(family), random_ids(80), random_ids(9, seed=1)
    compressed = prefill(model, ids, make_press(ratio=1.0))
    assert is_compressed(compressed)
    expected = follow(model, prefill(model, ids), question, 5)
    torch.testing.assert_close(follow(model, compressed, question, 5), expected, **TOLERANCE)


def test_bfloat16_at_ratio_one_is_within_eager_error():
    """Error against float64 no larger than that of eager attention in bfloat16."""
    model = build_model("llama").bfloat16()
    ids, question = random_ids(80), random_ids(9, seed=1)
    ours = follow(model, prefill(model, ids, make_press(ratio=1.0)), question).double()
    full = prefill(model, ids)
    model.set_attn_implementation("eager")
    eager = follow(model, full, question).double()
    exact_model = build_model("llama")
    exact_model.load_state_dict(model.state_dict())
    exact_model = exact_model.double()
    exact = follow(exact_model, prefill(exact_model, ids), question)
    assert (ours - exact).abs().mean() <= 1.25 * (eager - exact).abs().mean()


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3"])
def test_cache_with_known_sliding_layers(family):
    """A DynamicCache built from the config drops what its windows can't reach; the compressed one agrees."""
    model = build_model(family)
    ids, question = random_ids(70), random_ids(5, seed=2)
    ours, expected = (
        follow(model, prefill(model, ids, make_press(ratio=0.5), cache), question, 4)
        for cache in (DynamicCache(config=model.config), DynamicCache())
    )
    torch.testing.assert_close(ours, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [(family, None) for family in ("llama", "gemma3", "gemma3-image-text", "mistral-sliding")]
    + [("llama", "int8"), ("llama", "int4")],
)
def test_batch_with_left_padding_equals_each_row_alone(family, quantization):
    """Rows with padding are selected, and quantised, each by itself."""
    model, lengths = build_model(family), (90, 61, 40)
    rows = [random_ids(length, seed=length) for length in lengths]
    ids, mask = pad(rows)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    press = make_press(ratio=0.4, quantization=quantization)
    batched = prefill(model, ids, press, attention_mask=mask, position_ids=positions)
    question = random_ids(6, batch_size=3, seed=9)
    with torch.no_grad():
        logits = model(
            input_ids=question,
            past_key_values=batched,
            attention_mask=torch.cat([mask, torch.ones(3, 6, dtype=torch.long)], dim=1),
            position_ids=torch.tensor(lengths)[:, None] + torch.arange(6),
        ).logits
    for index, row in enumerate(rows):
        alone = follow(model, prefill(model, row, press), question[index : index + 1])
        torch.testing.assert_close(logits[index : index + 1], alone, **TOLERANCE)


def test_a_positional_attention_mask_is_seen(model):
    """Padding given as a positional argument of the whole model is evicted like any other."""
    ids, mask = random_ids(30, batch_size=2), torch.ones(2, 30, dtype=torch.long)
    mask[1, :12] = 0
    caches = []
    for args, kwargs in (((ids, mask), {}), ((ids,), {"attention_mask": mask})):
        cache = DynamicCache()
        with torch.no_grad(), make_press(ratio=0.5)(model):
            model(*args, **kwargs, past_key_values=cache)
        caches.append(cache)
    assert caches[0].layers[0].context_pairs == caches[1].layers[0].context_pairs == [2 * 26, 2 * 14]


@st.composite
def keep_patterns(draw):
    """Keep masks (layers, heads, tokens) with empty heads, heads of one entry and full heads among random ones."""
    tokens, generator = draw(st.integers(2, 40)), torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand((4, 2, tokens), generator=generator) < draw(st.floats(0.0, 1.0))
    for head in mask.flatten(0, 1):
        kind = draw(st.sampled_from(["random", "empty", "one", "all"]))
        if kind != "random":
            head[:] = kind == "all"
        if kind == "one":
            head[draw(st.integers(0, tokens - 1))] = True
    return mask


LLAMA = build_model("llama")


@settings(max_examples=40, deadline=None)
@given(mask=keep_patterns(), q_len=st.integers(1, 5))
def test_any_keep_mask(mask, q_len):
    """Eviction of any mask, through the compressor, by scores that are the mask itself."""
    ids, question = random_ids(mask.shape[-1], seed=mask.shape[-1]), random_ids(q_len, seed=5)
    compressor = make_press(tokenizer=build_tokenizer(None), n_sink=0).compressor(LLAMA)
    context, full = context_of(LLAMA, ids), prefill(LLAMA, ids)
    allowance = Allowance(ratio=mask.float().mean().item())
    compressor.evict(context, allowance, level="pair", scores=[mask.float()])
    keep = keep_masks(full, context.cache)
    assert torch.equal(torch.cat([keep[layer] for layer in range(4)]), mask)
    ours = follow(LLAMA, context.cache, question, 2)
    with dense_masked(LLAMA, keep):
        expected = follow(LLAMA, full, question, 2)
    torch.testing.assert_close(ours, expected, **TOLERANCE)


def test_every_family_of_kvpress_is_covered():
    assert {type(build()) for build in FAMILIES.values()} == set(TESTED_MODELS)
