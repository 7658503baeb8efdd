"""Gemma 3 270M: five layers of a 512-token window to one global layer, compressed on natural text."""

from collections.abc import Callable

import pytest
import torch
from dense_reference import dense_masked, keep_masks
from harness import prefill
from real.gemma3_270m import REMEDY, load_gemma3, missing_packages
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvzip_press import KVzipPress, cache_nbytes, is_compressed, kept_fraction
from kvzip_press.cache.ragged import RaggedLayer
from kvzip_press.cache.window import WindowLayer
from kvzip_press.compressor import Compressor, PrefilledContext
from kvzip_press.eval.tasks.essays import load_texts

pytestmark = [
    pytest.mark.gemma,
    pytest.mark.skipif(
        bool(missing_packages()), reason=f"not installed: {', '.join(missing_packages())}; run `{REMEDY}`"
    ),
]

WINDOW = 512
GLOBAL_LAYERS = [5, 11, 17]
NUM_TOKENS = 1200
FACT = "The secret number for Paris is 48213."
QUESTION = "\n\nThe secret number for Paris is"
ANSWER = "48213"
TOLERANCE = dict(atol=1e-3, rtol=0)
MakeCache = Callable[[PreTrainedModel], Cache]


class RandomPress(KVzipPress):
    """Evicts at random, at the same ratio: what a compression without any sense of the text would answer."""

    def compress_context(self, compressor: Compressor, context: PrefilledContext) -> None:
        keys = context.cache.layers[GLOBAL_LAYERS[0]].keys
        scores = torch.rand(len(GLOBAL_LAYERS), *keys.shape[1:3], generator=torch.Generator().manual_seed(0))
        compressor.evict(context, self.allowance(), level=self.level, scores=[scores])


@pytest.fixture(scope="module")
def gemma() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_gemma3()


@pytest.fixture(params=["plain", "config"])
def make_cache(request: pytest.FixtureRequest) -> MakeCache:
    return lambda model: DynamicCache(config=model.config if request.param == "config" else None)


def essay_ids(tokenizer: PreTrainedTokenizerBase, essay: int, num_tokens: int, fact: str | None = None) -> torch.Tensor:
    """Token ids of whole sentences of an essay, with a fact after the first fifth of them."""
    sentences, length = [], 0
    for sentence in load_texts()[essay]:
        if length >= num_tokens:
            break
        sentences.append(sentence)
        length += len(tokenizer.encode(" " + sentence, add_special_tokens=False))
    if fact is not None:
        sentences.insert(len(sentences) // 5, fact)
    return torch.tensor([tokenizer.encode(" ".join(sentences))])


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    return torch.tensor([tokenizer.encode(text, add_special_tokens=False)])


@torch.no_grad()
def continuation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: Cache, ids: torch.Tensor, steps: int = 7
) -> str:
    tokens = []
    for _ in range(steps):
        ids = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        tokens.append(ids.item())
    return tokenizer.decode(tokens)


@torch.no_grad()
def logits_of(model: PreTrainedModel, cache: Cache, parts: list[torch.Tensor]) -> torch.Tensor:
    """Logits of the last tokens of each part, fed one after the other."""
    return torch.cat([model(input_ids=part, past_key_values=cache, logits_to_keep=16).logits for part in parts], dim=1)


def follow_ups(tokenizer: PreTrainedTokenizerBase) -> list[torch.Tensor]:
    """A question, and then a text beyond the window, whose end sees nothing of the context in sliding layers."""
    long = essay_ids(tokenizer, 8, WINDOW + 50)[:, 1:]
    assert long.shape[1] > WINDOW
    return [encode(tokenizer, QUESTION), encode(tokenizer, " 4"), long]


@torch.no_grad()
def test_loss_on_plain_english(gemma):
    """A wrong tokenizer gives above 10."""
    model, tokenizer = gemma
    ids = essay_ids(tokenizer, 3, NUM_TOKENS)
    text = tokenizer.decode(ids[0], skip_special_tokens=True)
    assert text == " ".join(load_texts()[3])[: len(text)]
    assert len(text) > 4 * ids.shape[1]
    ids = ids[:, :400]
    assert model(input_ids=ids, labels=ids).loss < 3


@pytest.mark.parametrize("essay", [0, 16])
def test_half_of_the_cache_keeps_the_answer(gemma, essay):
    """The fact lies beyond the sliding window of the question: the global layers must have kept it."""
    model, tokenizer = gemma
    ids, question = essay_ids(tokenizer, essay, NUM_TOKENS, FACT), encode(tokenizer, QUESTION)
    after_fact = ids.shape[1] - len(tokenizer.encode(tokenizer.decode(ids[0]).split(FACT)[0])) - 20
    assert after_fact > WINDOW
    full = continuation(model, tokenizer, prefill(model, ids), question)
    assert ANSWER in full
    press = KVzipPress(ratio=0.5, tokenizer=tokenizer)
    assert continuation(model, tokenizer, prefill(model, ids, press), question) == full
    at_random = prefill(model, ids, RandomPress(ratio=0.5, tokenizer=tokenizer))
    assert ANSWER not in continuation(model, tokenizer, at_random, question)


def test_only_the_global_layers_are_evicted(gemma, make_cache):
    model, tokenizer = gemma
    ids = essay_ids(tokenizer, 16, NUM_TOKENS)
    num_tokens, config = ids.shape[1], model.config
    full_nbytes = cache_nbytes(prefill(model, ids, cache=make_cache(model)))
    press = KVzipPress(ratio=0.3, tokenizer=tokenizer)
    cache = prefill(model, ids, press, make_cache(model))
    assert is_compressed(cache)
    kinds = {"full_attention": RaggedLayer, "sliding_attention": WindowLayer}
    assert [type(layer) for layer in cache.layers] == [kinds[layer_type] for layer_type in config.layer_types]
    assert [i for i, layer in enumerate(cache.layers) if isinstance(layer, RaggedLayer)] == GLOBAL_LAYERS

    ragged = [cache.layers[index] for index in GLOBAL_LAYERS]
    subject = len(GLOBAL_LAYERS) * config.num_key_value_heads * (num_tokens - press.n_sink)
    assert sum(sum(layer.context_pairs) for layer in ragged) == subject
    assert sum(layer.kept_pairs for layer in ragged) == round(0.3 * subject)
    assert kept_fraction(cache) == round(0.3 * subject) / subject
    assert len({layer.kept_pairs for layer in ragged}) > 1

    pair_nbytes = 2 * config.head_dim * 4
    for layer in cache.layers:
        assert layer.get_seq_length() == num_tokens
        if isinstance(layer, WindowLayer):
            assert cache_nbytes(layer) == (WINDOW - 1) * config.num_key_value_heads * pair_nbytes
        else:
            assert cache_nbytes(layer) == len(layer.packed_keys) * pair_nbytes + layer.cu_seqlens.nbytes
    assert cache_nbytes(cache) == sum(cache_nbytes(layer) for layer in cache.layers) < full_nbytes


def test_a_question_leaves_no_more_than_the_context(gemma):
    """After question and answer are cropped away the cache is as small as before, sliding layers included."""
    model, tokenizer = gemma
    ids, question = essay_ids(tokenizer, 16, NUM_TOKENS), encode(tokenizer, QUESTION)
    cache = prefill(model, ids, KVzipPress(ratio=0.3, tokenizer=tokenizer))
    before = cache_nbytes(cache)
    first = continuation(model, tokenizer, cache, question)
    cache.crop(ids.shape[1])
    assert cache_nbytes(cache) == before
    assert continuation(model, tokenizer, cache, question) == first


def test_ratio_one_equals_the_full_cache(gemma, make_cache):
    model, tokenizer = gemma
    ids, parts = essay_ids(tokenizer, 16, NUM_TOKENS), follow_ups(tokenizer)
    compressed = prefill(model, ids, KVzipPress(ratio=1.0, tokenizer=tokenizer), make_cache(model))
    assert is_compressed(compressed)
    expected = logits_of(model, prefill(model, ids), parts)
    torch.testing.assert_close(logits_of(model, compressed, parts), expected, **TOLERANCE)


def test_logits_equal_the_masked_dense_reference(gemma, make_cache):
    model, tokenizer = gemma
    ids, parts = essay_ids(tokenizer, 16, NUM_TOKENS), follow_ups(tokenizer)
    compressed = prefill(model, ids, KVzipPress(ratio=0.4, tokenizer=tokenizer), make_cache(model))
    full = prefill(model, ids)
    keep = keep_masks(full, compressed)
    assert sorted(keep) == GLOBAL_LAYERS
    with dense_masked(model, keep):
        expected = logits_of(model, full, parts)
    ours = logits_of(model, compressed, parts)
    torch.testing.assert_close(ours, expected, **TOLERANCE)
    assert (ours - logits_of(model, prefill(model, ids), parts)).abs().max() > 100 * TOLERANCE["atol"]
