"""Where the user's text begins in a chat, and what the model is told before it repeats a chunk."""

import pytest
from tiny_models import TEMPLATE, build_model, build_tokenizer
from transformers import PreTrainedTokenizerFast

from kvzip_press.prompts import PROMPTS, ReplayPrompts, chat_affixes, encode_prompts, find_tokenizer

PREFIX = "<s>user:"
SUFFIX = "<e><s>assistant:"
DEFAULT = ReplayPrompts()


def ids_of(text: str, tokenizer: PreTrainedTokenizerFast | None = None) -> list[int]:
    return (tokenizer or build_tokenizer()).encode(text, add_special_tokens=False)


THINKING = (
    "<s>system:Be brief.<e>{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}<e>{% endfor %}"
    "<s>assistant:{% if enable_thinking is defined and not enable_thinking %}[no thoughts]{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "bos", "affixes"),
    [
        # The two parts around the user's text, the opening of the answer included
        (TEMPLATE, "<s>", (PREFIX, SUFFIX)),
        # BOS before the text and a line break after it, as kvpress's pipeline does
        (None, "<s>", ("<s>", "\n")),
        (None, None, ("", "\n")),
        # A default system prompt belongs to the prefix; thinking is switched off where the template knows it
        (THINKING, "<s>", ("<s>system:Be brief.<e><s>user:", SUFFIX + "[no thoughts]")),
    ],
)
def test_affixes_are_what_the_template_puts_around_a_message(template, bos, affixes):
    tokenizer = build_tokenizer(template)
    tokenizer.bos_token = bos
    assert chat_affixes(tokenizer) == affixes


@pytest.mark.parametrize(("template", "times"), [("{{ messages[0]['content'] }}" * 2, 2), ("nothing", 0)])
def test_a_template_that_does_not_hold_the_message_once_is_refused(template, times):
    """Without one place for the text there is no prefix: an error that names the way to give it."""
    with pytest.raises(ValueError, match=rf"{times} times; pass prompts=ReplayPrompts\(prefix_length"):
        chat_affixes(build_tokenizer(template))


def encoded(template: str | None = TEMPLATE, prompts: ReplayPrompts = DEFAULT):
    return encode_prompts(prompts, build_tokenizer(template))


MERGED = [*ids_of(PREFIX)[:-1], 99, *ids_of("text")]


@pytest.mark.parametrize(
    ("template", "ids", "length", "suffix"),
    [
        # All tokens of the prefix, none of the text, and the chat's suffix for the replay
        (TEMPLATE, ids_of(PREFIX + "some text"), 6, SUFFIX),
        (TEMPLATE, ids_of(PREFIX), 6, SUFFIX),
        # Tokenizers may merge the prefix's last character with the text's first: all but that token still match
        (TEMPLATE, MERGED, 5, SUFFIX),
        # Text that does not begin like the template has none, and a line break as suffix
        (TEMPLATE, ids_of("some text"), 0, "\n"),
        (TEMPLATE, ids_of("user:some text"), 0, "\n"),
        (TEMPLATE, [], 0, "\n"),
        # After BOS a text that is no message of the chat keeps its BOS token and nothing of the text
        (TEMPLATE, ids_of("<s>some text"), 1, "\n"),
        (TEMPLATE, ids_of("<s>useful text"), 1, "\n"),
        (None, ids_of("<s>some text"), 1, "\n"),
        # A conversation that begins otherwise than the template's single message
        (TEMPLATE, ids_of("<s>system:Be brief.<e><s>user:text"), 1, "\n"),
    ],
)
def test_the_prefix_is_found_in_the_contexts_own_tokens(template, ids, length, suffix):
    prompts = encoded(template)
    assert prompts.find_prefix(ids) == length
    assert prompts.suffix(length) == ids_of(suffix)


def test_a_given_prefix_length_needs_no_search():
    """prefix_length is taken as it is, but for a context that is shorter."""
    prompts = encoded(prompts=ReplayPrompts(prefix_length=9))
    assert prompts.find_prefix(ids_of("some other text")) == 9
    assert prompts.find_prefix(ids_of("abc")) == 3
    assert prompts.suffix(9) == ids_of(SUFFIX)


def test_the_wordings_are_those_of_the_released_code_and_of_the_paper():
    """The words that the published results were measured with."""
    default, paper = (encode_prompts(PROMPTS[name], build_tokenizer()) for name in ("default", "paper"))
    assert default.first == ids_of("\n\nRepeat the previous context exactly.")
    assert default.later == ids_of("\n\nRepeat the part of the previous context exactly, starting with")
    assert default.after_anchor == [] and default.anchor_tokens == 8
    assert paper.first == ids_of("\n\nRepeat the previous context:")
    assert paper.later == ids_of("\n\nRepeat the previous context starting with ")
    assert paper.after_anchor == ids_of(":")


def test_a_suffix_of_ones_own_replaces_both():
    for suffix, ids in (("!", ids_of("!")), ("", []), ([7, 8], [7, 8])):
        prompts = encoded(prompts=ReplayPrompts(suffix=suffix))
        assert prompts.suffix(6) == prompts.suffix(0) == ids


def test_which_prompts_need_a_tokenizer():
    ids_only = dict(first=[1], later=[2], suffix=[3], prefix_length=0)
    assert not ReplayPrompts(**ids_only).needs_tokenizer
    assert not ReplayPrompts(**ids_only | {"suffix": ""}).needs_tokenizer
    for change in ({"first": "text"}, {"after_anchor": ":"}, {"suffix": None}, {"prefix_length": None}):
        assert ReplayPrompts(**ids_only | change).needs_tokenizer
    assert encode_prompts(ReplayPrompts(**ids_only), None).suffix(0) == [3]
    with pytest.raises(ValueError, match="a tokenizer is needed for the replay prompt 'text'.*tokenizer="):
        encode_prompts(ReplayPrompts(**ids_only | {"first": "text"}), None)


@pytest.mark.parametrize("name", ["anchor_tokens", "prefix_length"])
def test_negative_counts_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
        ReplayPrompts(**{name: -1})


def test_the_tokenizer_of_a_folder_is_loaded_once(tmp_path):
    model = build_model("llama")
    model.config._name_or_path = str(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = find_tokenizer(model)
    assert tokenizer.encode("abc") == ids_of("abc")
    assert find_tokenizer(model) is tokenizer
