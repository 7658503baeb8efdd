from collections import Counter

import pytest
import torch
from harness import all_equal, packed_states, prefill
from tiny_models import build_model, build_tokenizer

from kvzip_press import HeadScores, ReplayPrompts, cache_nbytes
from kvzip_press.cache.measure import plain_nbytes
from kvzip_press.compressor import Compressor
from kvzip_press.eval.presses.budget import kept_target
from kvzip_press.eval.presses.registry import PRESSES, make_press
from kvzip_press.eval.run.answer import greedy_answer
from kvzip_press.eval.run.chat import Chat
from kvzip_press.eval.run.sweep import ContextSweep, Effort, eager_attention
from kvzip_press.eval.tasks.base import Question, Task

TEXT = "river stone bright under walking seldom paper engine cloud answer winter matter open green " * 8
QUESTION = Question("Which word?", ("river",), "include", 4)
LAYERS, HEADS = 3, 2


@pytest.fixture
def context(toy):
    return Chat(toy[1], "kvpress", Task.instruction).open(TEXT)


def answer(model, context, cache):
    return greedy_answer(model, cache, context.question_ids(QUESTION), context.num_tokens, 4)


@pytest.fixture
def calls(monkeypatch):
    """Forward passes of the decoder over a whole context, and calls of the scorer."""
    counted = Counter()
    score, forward = Compressor.score, ContextSweep._prefill
    monkeypatch.setattr(Compressor, "score", lambda *a: counted.update(replays=1) or score(*a))
    monkeypatch.setattr(ContextSweep, "_prefill", lambda *a: counted.update(prefills=1) or forward(*a))
    return counted


# At 1.0 nothing needs a score; scorers and replays of another kind take their own replay
@pytest.mark.parametrize(
    ("names", "ratios", "replays", "alone"),
    [
        (["kvzip", "kvzip-pair-layer", "kvzip-pair-uniform", "kvzip-int8"], [n / 10 for n in range(1, 11)], 1, 36),
        (["kvzip", "kvzip-l2", "kvzip-l2-pair-layer", "kvzip-full-256", "kvzip-int4"], [0.3], 3, 5),
    ],
)
def test_one_prefill_and_a_replay_for_each_kind_serve_all_ratios_and_levels(
    toy, context, calls, names, ratios, replays, alone
):
    variants = [("full", 1.0)] + [(name, ratio) for name in names for ratio in ratios]
    effort = Effort()
    found = {variant for variant, _ in ContextSweep(toy[0], context, effort).caches(variants)}
    assert found == set(variants)
    assert calls == {"prefills": 1, "replays": replays}
    assert effort == Effort(prefills=1, replays=replays, prefills_alone=len(variants), replays_alone=alone)
    assert f"1 prefills and {replays} replays" in str(effort)


@pytest.mark.parametrize("style", ["paper", "kvpress"])
@pytest.mark.parametrize("name", ["kvzip", "kvzip-pair-layer", "kvzip-l2", "kvzip-head", "kvzip-plus-pair-uniform"])
def test_a_swept_cache_is_the_one_the_press_makes_alone(toy, name, style):
    model, tokenizer = toy
    context = Chat(tokenizer, style, Task.instruction).open(TEXT)
    heads = HeadScores(torch.rand(LAYERS, HEADS))
    variants = [(name, 0.3), (name, 0.6), (name, 1.0)]
    for variant, swept in ContextSweep(model, context, Effort(), head_scores=heads).caches(variants):
        press = make_press(*variant, tokenizer, head_scores=heads)
        if style == "paper":
            press.prompts = ReplayPrompts(prefix_length=context.prefix_length)
        alone = prefill(model, context.ids, press)
        assert all_equal(packed_states(swept.cache), packed_states(alone))
        assert answer(model, context, swept.cache) == answer(model, context, alone)
        n = LAYERS * HEADS * (context.num_tokens - max(4, context.prefix_length))
        assert swept.total_pairs == n
        if name in ("kvzip", "kvzip-l2"):
            assert swept.kept_pairs == round(variant[1] * n)


def test_the_full_cache_is_untouched_by_what_is_evicted_from_its_copies(toy, context):
    model, _ = toy
    swept = ContextSweep(model, context, Effort())
    full = swept.full()
    before = [states.clone() for layer in full.layers for states in (layer.keys, layer.values)]
    alone = answer(model, context, full)
    for variant, kept in swept.caches([("kvzip", 0.2), ("full", 1.0), ("kvzip-l2", 0.2)]):
        given = answer(model, context, kept.cache)
        assert all_equal([states for layer in full.layers for states in (layer.keys, layer.values)], before)
        assert variant[0] != "full" or given == alone


def test_memory_stays_at_the_full_cache_and_one_compressed_one(toy, context):
    """Even if the caller holds on to what it was given."""
    model, _ = toy
    run = ContextSweep(model, context, Effort())
    full = run.full()
    held = []
    for (_, ratio), swept in run.caches([("kvzip", 0.5), ("kvzip", 0.2), ("kvzip-pair-layer", 0.4), ("knorm", 0.5)]):
        held.append(swept.cache)
        alive = cache_nbytes(full, *held)
        expected = swept.nbytes if len(held) == 4 else plain_nbytes(model, context.num_tokens) + swept.nbytes
        assert alive == expected
        assert swept.nbytes < (ratio + 0.4) * plain_nbytes(model, context.num_tokens)


@pytest.mark.peer
@torch.no_grad()
def test_pyramidkv_layers_of_uneven_length_are_masked_as_if_fed_token_by_token(toy):
    model, tokenizer = toy
    context = Chat(tokenizer, "kvpress", Task.instruction).open(TEXT)
    ids = context.question_ids(QUESTION)
    for _, swept in ContextSweep(model, context, Effort()).caches([("pyramidkv", 0.6)]):
        cache = swept.cache
        lengths = [cache.get_seq_length(index) for index in range(LAYERS)]
        assert len(set(lengths)) == LAYERS
        at_once = greedy_answer(model, cache, ids, context.num_tokens, 1)
        assert [cache.get_seq_length(index) for index in range(LAYERS)] == lengths
        for position, token in enumerate(ids[0], start=context.num_tokens):
            at = torch.tensor([[position]])
            logits = model(input_ids=token.view(1, 1), past_key_values=cache, position_ids=at).logits
        assert at_once == [int(logits[0, -1].argmax())]


def test_equal_budgets_keep_as_many_pairs_plain_ones_what_the_press_makes_of_the_fraction(toy, context):
    model, _ = toy
    n = context.num_tokens
    protected = max(4, context.prefix_length)
    kept = {}
    for budget in ("equal", "plain"):
        (_, swept), *_ = ContextSweep(model, context, Effort(), budget=budget).caches([("knorm", 0.5)])
        kept[budget] = swept.kept_pairs + LAYERS * HEADS * protected
    assert kept["plain"] == LAYERS * HEADS * int(n * 0.5)
    assert abs(kept["equal"] - kept_target(n, protected, LAYERS * HEADS, 0.5)) <= LAYERS * HEADS / 2
    assert kept["equal"] > kept["plain"]


def test_presses_that_look_at_attention_weights_run_eagerly_and_leave_the_model_as_it_was(toy, context):
    model, _ = toy
    seen = {}
    for variant, _ in ContextSweep(model, context, Effort()).caches([("kvzip", 0.5), ("observed-attention", 0.5)]):
        seen[variant[0]] = model.config._attn_implementation
    assert seen == {"kvzip": "sdpa", "observed-attention": "eager"}
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(KeyError), eager_attention(model):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"


def test_what_a_cell_would_have_taken_alone_is_in_its_seconds(toy, context):
    run = ContextSweep(toy[0], context, Effort())
    seconds = {variant: swept.seconds for variant, swept in run.caches([("full", 1.0), ("kvzip", 0.3), ("kvzip", 0.5)])}
    assert seconds["kvzip", 0.3]["score"] == seconds["kvzip", 0.5]["score"] > 0
    assert len({part["prefill"] for part in seconds.values()}) == 1
    assert seconds["full", 1.0]["score"] == seconds["full", 1.0]["evict"] == 0


def test_what_it_cant_do_is_refused_before_any_work(toy, context):
    effort = Effort()
    with pytest.raises(ValueError, match="budget must be one of equal, plain, got 'fair'"):
        ContextSweep(toy[0], context, effort, budget="fair")
    with pytest.raises(ValueError, match="unknown press 'kvzp'"):
        next(ContextSweep(toy[0], context, effort).caches([("full", 1.0), ("kvzp", 0.5)]))
    assert effort == Effort()


def test_hybrid_models_count_their_global_layers():
    model, tokenizer = build_model("gemma3"), build_tokenizer()
    context = Chat(tokenizer, "kvpress", Task.instruction).open(TEXT)
    full = ContextSweep(model, context, Effort())
    shapes = sum(layer.keys.numel() + layer.values.numel() for layer in full.full().layers)
    assert plain_nbytes(model, context.num_tokens) == 4 * shapes
    for (_, ratio), swept in full.caches([("full", 1.0), ("kvzip", 0.25)]):
        assert swept.total_pairs == 2 * 2 * (context.num_tokens - context.prefix_length)
        assert swept.kept_pairs == round(ratio * swept.total_pairs)


@pytest.mark.parametrize("family", ["mistral-sliding", "phi3", "qwen3", "gemma3"])
def test_other_families_give_the_cache_that_the_press_makes_alone(family):
    model, tokenizer = build_model(family), build_tokenizer()
    context = Chat(tokenizer, "kvpress", Task.instruction).open(TEXT)
    for variant, swept in ContextSweep(model, context, Effort()).caches([("full", 1.0), ("kvzip", 0.3)]):
        alone = prefill(model, context.ids, make_press(*variant, tokenizer))
        first = answer(model, context, swept.cache)
        assert answer(model, context, swept.cache) == first == answer(model, context, alone)
        assert all_equal(packed_states(swept.cache), packed_states(alone))


@pytest.mark.peer
@pytest.mark.parametrize("name", [name for name in PRESSES if name != "duo-attention"])
def test_every_press_runs_and_answers(toy, context, name):
    model, _ = toy
    heads = HeadScores(torch.rand(LAYERS, HEADS))
    ratio = 1.0 if name == "full" else 0.4
    for variant, swept in ContextSweep(model, context, Effort(), head_scores=heads).caches([(name, ratio)]):
        assert variant == (name, ratio)
        assert len(answer(model, context, swept.cache)) == 4
        error = 0.1 if name == "kvzip-head" else 0.01
        assert swept.kept_pairs / swept.total_pairs == pytest.approx(ratio, abs=error)
