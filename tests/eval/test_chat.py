import kvpress
import pytest
import torch

from kvzip_press.eval.run.chat import STYLES, SYSTEM, Chat
from kvzip_press.eval.tasks.base import Question, Task
from kvzip_press.prompts import PROMPTS, encode_prompts

CONTEXT = "Anna lives in Oslo. Ben lives in Lima.\n"
INSTRUCTION = Task.instruction


def question(text, prefix=""):
    return Question(text, ("x",), "include", 4, answer_prefix=prefix)


def decode(tokenizer, ids):
    return tokenizer.decode(ids[0])


@pytest.mark.peer
@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("context", [CONTEXT, "  leading space", "ends in a #", "", "a##########b"])
@pytest.mark.parametrize("prefix", ["", " The answer is"])
def test_the_kvpress_style_gives_the_ids_of_kvpress_pipeline(smollm2, monkeypatch, template, context, prefix):
    model, tokenizer = smollm2
    if not template:
        monkeypatch.setattr(tokenizer, "chat_template", None)
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    texts = ["\nWhere does Ben live?", "\n\nAnd Anna?", ""]
    theirs = pipe.preprocess(context, texts, answer_prefix=prefix, max_context_length=int(1e10))
    opened = Chat(tokenizer, "kvpress", INSTRUCTION).open(context)
    assert torch.equal(opened.ids, theirs["context_ids"].long())
    for text, ids in zip(texts, theirs["questions_ids"], strict=True):
        assert torch.equal(opened.question_ids(question(text, prefix)), ids)


@pytest.mark.peer
def test_a_question_compressed_with_its_context_is_kvpress_query_aware(smollm2):
    """Its evaluation script appends the question to the context and leaves an empty one."""
    model, tokenizer = smollm2
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    asked = question("Where does Ben live?", " In")
    theirs = pipe.preprocess(CONTEXT + asked.text, [""], answer_prefix=" In", max_context_length=int(1e10))
    opened = Chat(tokenizer, "kvpress", INSTRUCTION).open(CONTEXT, asked)
    assert torch.equal(opened.ids, theirs["context_ids"])
    assert torch.equal(opened.question_ids(asked, already_read=True), theirs["questions_ids"][0])


def test_a_question_without_its_own_line_break_gets_one_in_the_kvpress_style(smollm2):
    _, tokenizer = smollm2
    opened = Chat(tokenizer, "kvpress", INSTRUCTION).open("Ben lives in Lima.")
    assert decode(tokenizer, opened.question_ids(question("Where?"))).startswith("\n\nWhere?<|im_end|>")
    assert decode(tokenizer, opened.question_ids(question(" Where?"))).startswith(" Where?<|im_end|>")


def test_the_paper_style_by_hand(smollm2):
    _, tokenizer = smollm2
    opened = Chat(tokenizer, "paper", INSTRUCTION).open(CONTEXT)
    before = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{INSTRUCTION}\n\n"
    assert decode(tokenizer, opened.ids) == before + CONTEXT
    assert decode(tokenizer, opened.ids[:, : opened.prefix_length]) == before
    asked = opened.question_ids(question("Where?", "In"))
    assert decode(tokenizer, asked) == "\n\nQ: Where?<|im_end|>\n<|im_start|>assistant\nIn"
    read = Chat(tokenizer, "paper", INSTRUCTION).open(CONTEXT, question("Where?"))
    assert decode(tokenizer, read.ids) == before + CONTEXT + "\n\nQ: Where?"
    assert decode(tokenizer, read.question_ids(question("Where?"), already_read=True)).startswith("<|im_end|>")


def test_a_template_without_a_system_role_gets_the_system_prompt_in_the_users_turn(toy):
    _, tokenizer = toy
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    )
    opened = Chat(tokenizer, "paper", INSTRUCTION).open(CONTEXT)
    assert decode(tokenizer, opened.ids) == f"<user>{SYSTEM}\n\n{INSTRUCTION}\n\n{CONTEXT}"


def test_without_a_template_the_text_is_raw(toy):
    _, tokenizer = toy
    tokenizer.chat_template = None
    paper = Chat(tokenizer, "paper", INSTRUCTION).open(CONTEXT)
    assert decode(tokenizer, paper.ids) == f"<s>{INSTRUCTION}\n\n{CONTEXT}"
    assert decode(tokenizer, paper.question_ids(question("Where?", " In"))) == "\n\nQ: Where?\nA: In"
    assert decode(tokenizer, paper.ids[:, : paper.prefix_length]) == f"<s>{INSTRUCTION}\n\n"
    kvpress_style = Chat(tokenizer, "kvpress", INSTRUCTION).open(CONTEXT)
    assert decode(tokenizer, kvpress_style.ids) == f"<s>{CONTEXT}"
    assert kvpress_style.prefix_length == 1


def test_the_prefix_of_the_kvpress_style_is_the_one_the_press_finds(smollm2):
    _, tokenizer = smollm2
    opened = Chat(tokenizer, "kvpress", INSTRUCTION).open(CONTEXT)
    assert opened.prefix_length == encode_prompts(PROMPTS["default"], tokenizer).find_prefix(opened.ids[0].tolist())
    assert decode(tokenizer, opened.ids[:, : opened.prefix_length]).endswith("<|im_start|>user\n")


def test_only_the_paper_style_ends_at_an_end_token_that_comes_first(toy):
    assert [style for style in STYLES if Chat(toy[1], style, "").stops_at_first_token] == ["paper"]


def test_unknown_styles_are_refused(toy):
    with pytest.raises(ValueError, match="one of paper, kvpress, got 'chat'"):
        Chat(toy[1], "chat", INSTRUCTION)
