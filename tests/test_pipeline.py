"""kvpress's own pipeline, unmodified, with our press."""

import kvpress
import pytest
import torch
from harness import all_equal, counted_calls, make_press, packed_states, prefill
from tiny_models import build_model, build_tokenizer
from transformers import DynamicCache, pipeline

from kvzip_press import KVzipPress, cache_nbytes, is_compressed, kept_fraction

CONTEXT = "The harbour was rebuilt in 1907. The tower burned down in 1911. " * 2
QUESTIONS = ["When did the tower burn down?", "What was rebuilt?", "When did the tower burn down?"]
SUFFIX = "<e><s>assistant:"
OPTIONS = dict(max_new_tokens=8)


def build_pipeline(tmp_path, family: str = "llama", template: bool = True):
    """kvpress's pipeline over a model and tokenizer that were saved to and loaded from a folder."""
    tokenizer, model = build_tokenizer() if template else build_tokenizer(None), build_model(family)
    # Answers of a random model would end nowhere or at once: let them have their full length
    model.generation_config.eos_token_id = VOID
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    return pipeline("kv-press-text-generation", model=loaded, tokenizer=type(tokenizer).from_pretrained(tmp_path))


VOID = 127


@pytest.fixture
def pipe(tmp_path):
    return build_pipeline(tmp_path)


def encode(text: str) -> torch.Tensor:
    return torch.tensor([build_tokenizer().encode(text, add_special_tokens=False)])


CONTEXT_IDS = encode("<s>user:" + CONTEXT)


def generated(model, question: str, press) -> str:
    """The answer of generate with a cache that was compressed by hand."""
    cache = prefill(model, CONTEXT_IDS, press)
    ids = torch.cat([CONTEXT_IDS, encode(question + SUFFIX)], dim=1)
    out = model.generate(ids, past_key_values=cache, do_sample=False, eos_token_id=VOID, **OPTIONS)
    return build_tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma3-image-text", "mistral-sliding"])
@pytest.mark.parametrize("ratio", [0.2, 0.6])
def test_answers_equal_those_of_a_cache_compressed_by_hand(tmp_path, family, ratio):
    pipe, press = build_pipeline(tmp_path, family), make_press(ratio=ratio)
    answers = pipe(CONTEXT, questions=QUESTIONS, press=press, **OPTIONS)["answers"]
    assert answers == [generated(pipe.model, question, press) for question in QUESTIONS]
    assert answers[0] == answers[2]


def test_one_question_and_none(pipe):
    """A single question gives one answer, and no question continues the templated context."""
    press = make_press(ratio=0.3)
    answer = pipe(CONTEXT, question=QUESTIONS[0], press=press, **OPTIONS)["answer"]
    assert answer == generated(pipe.model, QUESTIONS[0], press)
    assert pipe(CONTEXT, press=press, **OPTIONS)["answer"] == generated(pipe.model, "", press)


def test_the_tokenizer_is_found_without_being_given(pipe):
    by_name = pipe(CONTEXT, questions=QUESTIONS, press=KVzipPress(ratio=0.3, chunk_size=32), **OPTIONS)
    assert by_name == pipe(CONTEXT, questions=QUESTIONS, press=make_press(ratio=0.3), **OPTIONS)


def test_at_ratio_one_the_answers_are_those_without_a_press(pipe):
    press = make_press(ratio=1.0)
    plain = pipe(CONTEXT, questions=QUESTIONS, **OPTIONS)
    assert pipe(CONTEXT, questions=QUESTIONS, press=press, **OPTIONS) == plain
    ids = torch.cat([CONTEXT_IDS, encode(QUESTIONS[0] + SUFFIX)], dim=1)
    with press(pipe.model):
        out = pipe.model.generate(ids, do_sample=False, eos_token_id=VOID, **OPTIONS)
    inside = build_tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert inside == plain["answers"][0]


def test_a_context_without_chat_template(tmp_path):
    """With a tokenizer that has no template kvpress puts BOS and a line break; the BOS token is kept."""
    pipe = build_pipeline(tmp_path, template=False)
    cache = DynamicCache()
    press = KVzipPress(ratio=0.2, n_sink=0, tokenizer=build_tokenizer(None))
    answer = pipe(CONTEXT, question=QUESTIONS[0], press=press, cache=cache, **OPTIONS)["answer"]
    assert isinstance(answer, str)
    assert cache.get_seq_length() == 1 + len(CONTEXT) and cache.layers[0].prefix_pairs == [2]
    assert kept_fraction(cache) == pytest.approx(0.2, abs=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-sliding"])
def test_the_given_cache_is_compressed_and_unchanged_by_questions(tmp_path, family):
    pipe, press, cache = build_pipeline(tmp_path, family), make_press(ratio=0.3), DynamicCache()
    answers = pipe(CONTEXT, questions=QUESTIONS, press=press, cache=cache, **OPTIONS)["answers"]
    expected = prefill(pipe.model, CONTEXT_IDS, press)
    assert is_compressed(cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [CONTEXT_IDS.shape[1]] * 4
    assert all_equal(packed_states(cache), packed_states(expected))
    lengths = [cache.get_seq_length(index) for index in range(len(cache))]
    again = pipe.generate_answer(encode(QUESTIONS[1] + SUFFIX), cache, CONTEXT_IDS.shape[1], 8)
    pipe._remove_answer_from_cache(cache, lengths)
    assert again == answers[1]
    assert all_equal(packed_states(cache), packed_states(expected))


def test_the_bytes_of_the_given_cache_fall(pipe):
    full, compressed = DynamicCache(), DynamicCache()
    pipe(CONTEXT * 6, question=QUESTIONS[0], cache=full, **OPTIONS)
    pipe(CONTEXT * 6, question=QUESTIONS[0], cache=compressed, press=make_press(ratio=0.1), **OPTIONS)
    assert cache_nbytes(compressed) < 0.25 * cache_nbytes(full)


def test_every_call_of_the_head_gives_one_logit_and_the_log_tells_the_logical_length(pipe, caplog):
    """Neither prefill nor replay compute logits, question and answer one each; kvpress logs the context's length."""
    with counted_calls(pipe.model.lm_head) as shapes, caplog.at_level("DEBUG", logger="kvpress.pipeline"):
        pipe(CONTEXT, questions=QUESTIONS[:2], press=make_press(ratio=0.3), **OPTIONS)
    assert [shape[1] for shape in shapes] == [1] * 16
    assert f"Context Length: {CONTEXT_IDS.shape[1]}" in [record.message for record in caplog.records]


@pytest.mark.parametrize("baseline", ["SnapKVPress", "KnormPress", "ExpectedAttentionPress"])
def test_baselines_of_kvpress_work_unchanged_after_ours(pipe, baseline):

    def run():
        cache, press = DynamicCache(), getattr(kvpress, baseline)(compression_ratio=0.4)
        answers = pipe(CONTEXT, questions=QUESTIONS, cache=cache, press=press, **OPTIONS)
        return answers, [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]

    expected, states = run()
    pipe(CONTEXT, questions=QUESTIONS, press=make_press(ratio=0.3), **OPTIONS)
    answers, states_after = run()
    assert answers == expected and all_equal(states, states_after)
