"""A tiny random model with a chat template in a folder, and artificial texts: no download, no waiting."""

import random

import pytest
import torch
from eval_harness import save_tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "<s>system: help\n{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(model_dir):
    from kvzip_press.pretrained.load import load_model

    return load_model(str(model_dir))


@pytest.fixture(scope="session")
def toy_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def toy(toy_dir):
    """A model that every press runs on, and its tokenizer."""
    from kvzip_press.pretrained.load import load_model

    return load_model(str(toy_dir))


@pytest.fixture(scope="session")
def texts():
    rng = random.Random(7)
    words = "river stone bright under walking seldom paper engine cloud answer winter matter open".split()
    return [[" ".join(rng.choices(words, k=rng.randint(4, 12))) + "." for _ in range(400)] for _ in range(3)]


@pytest.fixture(scope="session")
def text_dir(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i, sentences in enumerate(texts):
        (folder / f"{i}.txt").write_text(" ".join(sentences), encoding="utf-8")
    return folder
