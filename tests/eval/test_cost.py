import ctypes
import json

import pytest
import torch
from transformers import DynamicCache

from kvzip_press.eval import cost
from kvzip_press.eval.memory import cache_nbytes
from kvzip_press.eval.presses.budget import masked_indices
from kvzip_press.eval.presses.registry import make_press
from kvzip_press.kernels.memory import PeakMemory


def test_storages_count_once_and_whole():
    whole = torch.zeros(100)
    assert cache_nbytes(whole[:10]) == 400
    assert cache_nbytes([whole, whole[:10], {"same": (whole.view(10, 10), torch.zeros(2))}]) == 408
    assert cache_nbytes(torch.nn.Linear(3, 3), "text", 5, torch.float32) == 0


def test_full_cache_holds_its_keys_and_values(tiny):
    model, _ = tiny
    cache = DynamicCache()
    with torch.no_grad():
        model.model(input_ids=torch.arange(2, 52).unsqueeze(0), past_key_values=cache)
    layers, heads, head_dim = 3, 2, 8
    assert cache_nbytes(cache) == layers * 2 * heads * 50 * head_dim * 4


def test_peak_memory_sees_what_is_freed_again():
    memory = PeakMemory(torch.device("cpu"))
    if memory.lap() is None:
        pytest.skip("the high-water mark can't be reset here")
    block = torch.ones(20_000_000)
    del block
    peak = memory.lap()
    assert 70_000_000 < peak < 200_000_000
    assert memory.lap() < 40_000_000


@pytest.fixture
def blocks_from_the_heap():
    """Have glibc map no large block by itself, as when it finds a hole of that size in its heap."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        pytest.skip("not glibc")
    m_mmap_max = -4
    assert mallopt(m_mmap_max, 0)
    yield
    mallopt(m_mmap_max, 65536)


def test_freed_memory_that_the_heap_keeps_does_not_count(blocks_from_the_heap):
    memory = PeakMemory(torch.device("cpu"))
    if memory.lap() is None:
        pytest.skip("the high-water mark can't be reset here")
    block = torch.ones(20_000_000)
    above = torch.ones(5_000_000)
    del block
    assert memory.lap() > 70_000_000
    assert memory.lap() < 60_000_000
    del above


def test_contexts_have_the_length_asked_for(tiny, texts):
    _, tokenizer = tiny
    ids = cost.context_of([["Short text."]], tokenizer, 500)
    assert ids.shape == (1, 500)
    assert tokenizer.decode(ids[0]).startswith("<s>system: help\nuser: Short text.\n\nShort text.")
    assert torch.equal(cost.context_of(texts, tokenizer, 300), cost.context_of(texts, tokenizer, 400)[:, :300])
    with pytest.raises(ValueError, match="must be above"):
        cost.context_of(texts, tokenizer, 5)


def test_each_cache_is_decoded_under_its_own_masks(tiny, texts):
    """kvpress keeps its mask on the model: decoding another cache under it would overwrite that cache's keys."""
    model, tokenizer = tiny
    ids = cost.context_of(texts, tokenizer, 150)
    full = cost.compress(model, ids, None)
    masked = cost.compress(model, ids, make_press("kvpress-kvzip", 0.5, tokenizer))
    assert masked.kept < full.kept == 150 * 6
    before = [layer.keys.clone() for layer in full.cache.layers]
    cost.decode_interleaved(model, [full, masked], 150, 3)
    for layer, keys in zip(full.cache.layers, before, strict=True):
        assert torch.equal(layer.keys[:, :, :150], keys)
    assert len(full.step_seconds) == len(masked.step_seconds) == 3
    assert masked_indices(model) == [None] * 3


def test_run_writes_a_table_relative_to_the_full_cache(model_dir, text_dir, tmp_path):
    options = ["--model", str(model_dir), "--text-dir", str(text_dir), "--presses", "kvzip", "snapkv"]
    options += ["--ratios", "0.5", "--lengths", "200", "300", "--repeats", "2", "--decode-tokens", "3"]
    cost.main([*options, "--output", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["table"]
    assert [(row["tokens"], row["press"]) for row in rows] == [
        (length, press) for length in (200, 300) for press in ("full", "kvzip", "snapkv")
    ]
    for row in rows:
        if row["press"] == "full":
            assert row["kept"] == row["x prefill"] == row["x decoding"] == row["x cache"] == 1
        else:
            assert 0.5 < row["kept"] < 0.6 and row["x cache"] < 1
