import ctypes
import json

import pytest
import torch

from kvzip_press.cache.ragged import RaggedLayer
from kvzip_press.eval import cost
from kvzip_press.eval.command.main import main
from kvzip_press.eval.presses.budget import masked_indices
from kvzip_press.eval.presses.registry import make_press
from kvzip_press.kernels.memory import PeakMemory


def peak_memory():
    memory = PeakMemory(torch.device("cpu"))
    if memory.lap() is None:
        pytest.skip("the high-water mark can't be reset here")
    return memory


def test_peak_memory_sees_what_is_freed_again():
    memory = peak_memory()
    block = torch.ones(20_000_000)
    del block
    peak = memory.lap()
    assert 70_000_000 < peak < 200_000_000
    assert memory.lap() < 40_000_000


def test_freed_memory_that_the_heap_keeps_does_not_count():
    """glibc maps no large block by itself where it finds a hole of that size in its heap."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        pytest.skip("not glibc")
    m_mmap_max = -4
    assert mallopt(m_mmap_max, 0)
    try:
        memory = peak_memory()
        block = torch.ones(20_000_000)
        above = torch.ones(5_000_000)
        del block
        assert memory.lap() > 70_000_000
        assert memory.lap() < 60_000_000
        del above
    finally:
        mallopt(m_mmap_max, 65536)


def test_contexts_have_the_length_asked_for(toy, tmp_path):
    _, tokenizer = toy
    corpus = tmp_path / "short.txt"
    corpus.write_text("Short text.")
    ids = cost.context_of(str(corpus), tokenizer, 500)
    assert ids.shape == (1, 500)
    assert tokenizer.decode(ids[0]).startswith("<s><user>Short text.\n\nShort text.")
    assert torch.equal(ids[:, :300], cost.context_of(str(corpus), tokenizer, 300))
    with pytest.raises(ValueError, match="must be above"):
        cost.context_of(str(corpus), tokenizer, 5)


def test_each_cache_is_decoded_under_its_own_masks(toy, text_dir):
    """kvpress keeps its mask on the model: decoding another cache under it would overwrite that cache's keys."""
    model, tokenizer = toy
    ids = cost.context_of(str(text_dir), tokenizer, 150)
    full = cost.compress(model, ids, None)
    masked = cost.compress(model, ids, make_press("kvpress-kvzip", 0.5, tokenizer))
    assert masked.kept < full.kept == 1 and masked.nbytes > full.nbytes == 150 * 6 * 2 * 16 * 4
    before = [layer.keys.clone() for layer in full.cache.layers]
    cost.decode_interleaved(model, [full, masked], 3)
    for layer, keys in zip(full.cache.layers, before, strict=True):
        assert torch.equal(layer.keys[:, :, :150], keys)
    assert len(full.step_seconds) == len(masked.step_seconds) == 3
    assert masked_indices(model) == [None] * 3


def test_logits_are_held_against_the_reference(toy, text_dir, monkeypatch):
    model, tokenizer = toy
    ids = cost.context_of(str(text_dir), tokenizer, 150)
    assert cost.compress(model, ids, None).logits_off is None
    trial = cost.compress(model, ids, make_press("kvzip-int8", 0.5, tokenizer))
    assert 0 <= trial.logits_off < 1e-5
    assert trial.cache.get_seq_length() == 150
    assert {layer.backend for layer in trial.cache.layers} == {"auto"}
    attend = RaggedLayer.attend

    def doubled(layer, *args, **options):
        return attend(layer, *args, **options) * (1 + (layer.backend == "auto"))

    monkeypatch.setattr(RaggedLayer, "attend", doubled)
    assert cost.logits_off(model, trial.cache) > 0.01


@pytest.fixture
def run(toy_dir, text_dir, tmp_path, capsys):
    def run(*arguments):
        file = tmp_path / "a" / "out.json"
        options = ["--model", str(toy_dir), "--corpus", str(text_dir), "--quiet", "-o", str(file)]
        status = main(["cost", *options, "--ratios", "0.5", "--decode-tokens", "3", *arguments])
        rows = json.loads(file.read_text())["table"] if status == 0 else None
        return status, rows, capsys.readouterr()

    return run


def test_run_writes_a_table_relative_to_the_full_cache(run):
    status, rows, printed = run("--presses", "kvzip", "snapkv", "--lengths", "200", "300", "--repeats", "2")
    assert status == 0 and len(printed.out.splitlines()) == 9
    assert [(row["tokens"], row["press"]) for row in rows] == [
        (length, press) for length in (200, 300) for press in ("full", "kvzip", "snapkv", "empty")
    ]
    for row in rows:
        if row["press"] == "full":
            assert row["kept"] == row["x prefill"] == row["x decoding"] == row["x cache"] == 1
        elif row["press"] == "empty":
            assert row["seconds"] is row["kept"] is None and row["ms/token"] > 0 == row["cache MiB"]
        else:
            assert 0.5 < row["kept"] < 0.6 and row["x cache"] < 1 and row["x prefill"] > 0 and row["ms/token"] > 0


def test_no_speed_is_told_of_wrong_logits(run, monkeypatch):
    monkeypatch.setattr(cost, "logits_off", lambda model, cache: float("nan"))
    status, rows, printed = run("--presses", "kvzip", "--lengths", "200")
    (row,) = [row for row in rows if row["press"] == "kvzip"]
    assert row["seconds"] is row["x prefill"] is row["ms/token"] is row["x decoding"] is None and row["x cache"] < 1
    assert "no times of kvzip at 200" in printed.err


def test_a_random_model_takes_the_place_of_the_loaded_one(run, monkeypatch):
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300}
    monkeypatch.setattr(cost, "LLAMA_8B", {**cost.LLAMA_8B, **small})
    status, rows, _ = run("--presses", "kvzip", "--lengths", "200", "--random-model")
    assert status == 0 and rows[0]["cache MiB"] == 2 * 2 * 2 * 8 * 200 * 4 / 2**20
    assert rows[1]["logits off"] < 1e-5


def test_contexts_beyond_the_model_are_refused(run):
    status, _, printed = run("--lengths", "1021", "--presses", "kvzip")
    assert status == 2 and "lengths must be at most 1020: the model takes 1024 tokens, 4 are decoded" in printed.err
