"""A compressed context lives in its cache alone: no other cache, thread or later forward can touch it."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from harness import all_equal, ask, context_of, counted_calls, follow, generated, make_press, packed_states, prefill
from tiny_models import build_model, random_ids
from transformers import DynamicCache

from kvzip_press import PROMPTS, is_compressed, kept_fraction
from kvzip_press import replay as replay_module
from kvzip_press.cache import eviction
from kvzip_press.models import language_model
from kvzip_press.recorder import PrefillRecorder

CONTEXT_A, CONTEXT_B = random_ids(60, seed=1), random_ids(90, seed=2)
QUESTION = random_ids(5, seed=3)


def test_two_live_caches_answer_as_each_alone(family):
    model, press = build_model(family), make_press(ratio=0.3)
    alone = []
    for ids in (CONTEXT_A, CONTEXT_B):
        fresh = build_model(family)
        alone.append(ask(fresh, prefill(fresh, ids, press), QUESTION))
    assert not torch.equal(*alone)

    cache_a = prefill(model, CONTEXT_A, press)
    first = ask(model, cache_a, QUESTION)
    cache_b = prefill(model, CONTEXT_B, press)
    assert torch.equal(first, alone[0])
    for _ in range(2):
        assert torch.equal(ask(model, cache_a, QUESTION), alone[0])
        assert torch.equal(ask(model, cache_b, QUESTION), alone[1])
        assert not torch.allclose(ask(model, prefill(model, CONTEXT_A), QUESTION), alone[0], atol=1e-2)


def test_tokens_of_two_caches_decoded_in_turn_do_not_mix(model):
    press = make_press(ratio=0.3)
    alone = [follow(model, prefill(model, ids, press), QUESTION, 6) for ids in (CONTEXT_A, CONTEXT_B)]
    caches = [prefill(model, ids, press) for ids in (CONTEXT_A, CONTEXT_B)]
    logits = [[follow(model, cache, QUESTION)] for cache in caches]
    for _ in range(6):
        for cache, steps in zip(caches, logits, strict=True):
            steps.append(follow(model, cache, steps[-1][:, -1:].argmax(-1)))
    for steps, expected in zip(logits, alone, strict=True):
        assert torch.equal(torch.cat(steps, dim=1), expected)


def test_a_foreign_full_cache_is_read_as_by_a_model_that_never_saw_a_press():
    model = build_model("llama")
    untouched = copy.deepcopy(model)
    foreign, expected_cache = prefill(model, CONTEXT_A), prefill(untouched, CONTEXT_A)
    compressed = prefill(model, CONTEXT_B, make_press(ratio=0.2))
    ask(model, compressed, QUESTION)
    assert is_compressed(compressed) and not is_compressed(foreign)
    assert torch.equal(follow(model, foreign, QUESTION, 3), follow(untouched, expected_cache, QUESTION, 3))
    for layer, expected in zip(foreign.layers, expected_cache.layers, strict=True):
        assert torch.equal(layer.keys, expected.keys) and torch.equal(layer.values, expected.values)


def test_questions_change_neither_the_kept_pairs_nor_later_answers(family):
    model = build_model(family)
    cache = prefill(model, CONTEXT_B, make_press(ratio=0.3))
    before = packed_states(cache)
    pointers = [layer.packed_keys.data_ptr() for layer in cache.layers if hasattr(layer, "packed_keys")]
    first = ask(model, cache, QUESTION, 10)
    ask(model, cache, random_ids(70, seed=8), 10)
    assert torch.equal(ask(model, cache, QUESTION, 80)[:, : first.shape[1]], first)
    assert all_equal(packed_states(cache), before)
    assert [layer.packed_keys.data_ptr() for layer in cache.layers if hasattr(layer, "packed_keys")] == pointers


def fingerprint(model) -> list:
    """Every hook and attribute name of every module, and each module's forward."""
    found = []
    for name, module in model.named_modules():
        hooks = [list(value) for key, value in sorted(vars(module).items()) if "_hooks" in key and value is not None]
        found.append((name, sorted(vars(module)), hooks, module.forward.__func__))
    return found


def prepared_model(family: str = "llama"):
    """A model after one forward: kvpress's own attention wrapper marks modules in any prefill."""
    model = build_model(family)
    prefill(model, random_ids(4))
    return model


@pytest.mark.parametrize("scorer", ["kvzip", "kvzip-plus"])
def test_the_model_is_left_as_it_was(scorer):
    model = prepared_model()
    parameters = [parameter.clone() for parameter in model.parameters()]
    before = fingerprint(model)
    with torch.no_grad(), make_press(scorer=scorer)(model):
        assert fingerprint(model) != before
        prefill(model, CONTEXT_A)
    assert fingerprint(model) == before
    assert all_equal(list(model.parameters()), parameters)


class Cancelled(BaseException):
    """Like KeyboardInterrupt, no Exception."""


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Cancelled])
def test_an_exception_in_the_block_leaves_model_and_cache_whole(error):
    model, cache = prepared_model(), DynamicCache()
    before = fingerprint(model)
    with pytest.raises(error), torch.no_grad(), make_press(ratio=0.3)(model):
        prefill(model, CONTEXT_A, cache=cache)
        raise error("stop")
    assert fingerprint(model) == before
    assert not is_compressed(cache)
    assert torch.equal(ask(model, cache, QUESTION), ask(model, prefill(model, CONTEXT_A), QUESTION))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("scorer", ["kvzip", "kvzip-plus"])
@pytest.mark.parametrize("generate", [False, True])
def test_an_exception_in_the_replay_leaves_model_and_cache_whole(monkeypatch, error, scorer, generate):
    model, cache = prepared_model(), DynamicCache()
    before, calls, replay_attention = fingerprint(model), [], replay_module.replay_attention
    expected = generated(model, CONTEXT_A)

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise error("out of memory")
        return replay_attention(*args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(error), torch.no_grad():
        patched.setattr(replay_module, "replay_attention", failing)
        with make_press(ratio=0.3, scorer=scorer)(model):
            (model.generate if generate else model.model)(CONTEXT_A, past_key_values=cache)
    assert len(calls) == 6
    assert fingerprint(model) == before
    assert not is_compressed(cache) and cache.get_seq_length() == CONTEXT_A.shape[1]
    assert torch.equal(ask(model, cache, QUESTION), ask(model, prefill(model, CONTEXT_A), QUESTION))
    assert torch.equal(generated(model, CONTEXT_A), expected)


def test_an_eviction_that_is_cut_off_leaves_a_cache_that_works(monkeypatch, family):
    """If the eviction fails in the middle, the layers that are still full and the ragged ones work together."""
    model, cache, built = build_model(family), DynamicCache(), []

    def build(constructor, *args, **kwargs):
        if len(built) == 2:
            raise MemoryError("no memory left")
        built.append(constructor)
        return constructor(*args, **kwargs)

    for name in ("RaggedLayer", "WindowLayer"):
        monkeypatch.setattr(eviction, name, partial(build, getattr(eviction, name)))
    with pytest.raises(MemoryError), torch.no_grad(), make_press(ratio=1.0)(model):
        language_model(model)(input_ids=CONTEXT_A, past_key_values=cache)
    assert len(built) == 2
    expected = follow(model, prefill(model, CONTEXT_A), QUESTION, 3)
    torch.testing.assert_close(follow(model, cache, QUESTION, 3), expected, atol=1e-4, rtol=1e-4)


def test_presses_left_in_another_order_than_entered_leave_no_trace():
    model = prepared_model()
    before = fingerprint(model)
    first, second = make_press(ratio=0.3)(model), make_press(ratio=0.5)(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    generated(model, CONTEXT_A, max_new_tokens=3, past_key_values=(cache := DynamicCache()))
    second.__exit__(None, None, None)
    assert kept_fraction(cache) == pytest.approx(0.5, abs=0.01)
    assert fingerprint(model) == before


def compressed_and_asked(model, seed):
    cache = prefill(model, random_ids(80 + 7 * seed, seed=seed), make_press(ratio=0.3))
    return [*packed_states(cache), ask(model, cache, QUESTION)]


def generated_under_a_press(model, seed):
    cache, press = DynamicCache(), make_press(ratio=(0.2, 0.8)[seed % 2])
    out = generated(model, CONTEXT_B, press, max_new_tokens=4, past_key_values=cache)
    return [*packed_states(cache), out]


@pytest.mark.parametrize("work", [compressed_and_asked, generated_under_a_press])
def test_two_threads_work_as_one_after_the_other(work):
    """Contexts that two threads compress, each by its own press, and ask at once give serial results bit for bit."""
    model = prepared_model()
    before = fingerprint(model)
    serial = [work(model, seed) for seed in range(6)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        parallel = list(pool.map(partial(work, model), range(6)))
    assert all(map(all_equal, parallel, serial))
    assert fingerprint(model) == before


def test_a_block_of_another_thread_that_ends_during_generate_disturbs_no_other(model):
    """Each block still open is told of the prefill once, though another's end takes it off the list meanwhile."""
    told, entered, leave = [], threading.Event(), threading.Event()

    def watch(told):
        return PrefillRecorder(model, model.model).watch(told)

    def other():
        with watch(lambda cache: None):
            entered.set()
            leave.wait(60)

    def inner(cache):
        told.append("inner")
        leave.set()
        thread.join()

    thread = threading.Thread(target=other)
    with watch(lambda cache: told.append("outer")):
        thread.start()
        entered.wait(60)
        with watch(inner):
            generated(model, CONTEXT_A, max_new_tokens=2)
    assert told == ["inner", "outer"]


def test_a_thread_that_meets_hooks_half_put_on_is_not_disturbed(monkeypatch, model):
    """torch notes a hook and that it wants keyword arguments in two steps; between them another thread may call it."""
    met, replay_attention = [], replay_module.replay_attention

    def meet():
        for module in model.modules():
            met.extend(hook(module, ()) for hook in module._forward_pre_hooks.values())
            met.extend(hook(module, (), (1,)) for hook in module._forward_hooks.values())

    def meeting(*args, **kwargs):
        if not met:
            with ThreadPoolExecutor() as pool:
                pool.submit(meet).result()
        return replay_attention(*args, **kwargs)

    monkeypatch.setattr(replay_module, "replay_attention", meeting)
    expected = packed_states(prefill(model, CONTEXT_A, make_press(ratio=0.3)))
    # Those of the recorder on the model and its decoder, and of the replay on four layers
    assert met == [None] * (3 + 2 * 4)
    assert all_equal(packed_states(prefill(model, CONTEXT_A, make_press(ratio=0.3))), expected)


def test_a_press_ignores_forwards_of_other_threads(model):
    foreign, mine = DynamicCache(), DynamicCache()

    def other():
        prefill(model, CONTEXT_A, cache=foreign)
        # Refused under a press
        model.model(input_ids=CONTEXT_A, use_cache=False)

    with torch.no_grad(), make_press(ratio=0.3)(model):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        prefill(model, CONTEXT_B, cache=mine)
    assert is_compressed(mine)
    assert not is_compressed(foreign) and foreign.get_seq_length() == CONTEXT_A.shape[1]


@pytest.mark.parametrize("replay", ["local", "full"])
def test_the_replay_adds_nothing_to_the_cache_and_computes_no_logits(family, replay):
    model, press = build_model(family), make_press(ratio=0.3, replay=replay)
    with counted_calls(model.lm_head) as logits, counted_calls(language_model(model).norm) as passes:
        context = context_of(model, CONTEXT_B)
        cache, passes[:] = context.cache, []
        tensors = [states for layer in cache.layers for states in (layer.keys, layer.values)]
        before = [states.clone() for states in tensors]
        press.compressor(model).score(context)
    assert logits == [] and len(passes) == 3
    after = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    assert all(a is b for a, b in zip(after, tensors, strict=True)) and all_equal(after, before)


@pytest.mark.parametrize("replay", ["local", "full"])
def test_the_replay_never_copies_the_full_cache(monkeypatch, model, replay):
    ids, longest, cat = random_ids(400), [], torch.cat

    def spy(tensors, *args, **kwargs):
        out = cat(tensors, *args, **kwargs)
        if out.ndim == 4:
            longest.append(out.shape[2])
        return out

    with torch.no_grad(), make_press(ratio=0.3, replay=replay)(model):
        prefill(model, ids)
        monkeypatch.setattr(torch, "cat", spy)
    # Prefix or sinks, chunk and replayed tokens: the prompt's text is 63 characters, one token each
    assert longest and max(longest) < 4 + 32 + 32 + 100 < ids.shape[1]


def test_replay_cost_is_one_pass_over_the_context(model):
    with counted_calls(model.model.embed_tokens) as shapes:
        prefill(model, random_ids(200), make_press(ratio=0.3, chunk_size=100))
    # One token a character
    prompts = len(f"{PROMPTS['default'].first}\n{PROMPTS['default'].later}\n") + 8
    assert shapes[0][1] == 200 and sum(shape[1] for shape in shapes[1:]) == 196 + prompts
