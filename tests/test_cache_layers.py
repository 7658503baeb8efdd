"""The layers of a compressed cache: cropping, other caches, windows, memory, number formats, gradients."""

import gc

import numpy as np
import pytest
import torch
from dense_reference import dense_masked, keep_masks
from harness import TOLERANCE, all_equal, ask, follow, make_press, packed_states, prefill, ragged, refused, scores_of
from tiny_models import WINDOW, build_model, random_ids
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import QuantizedLayer

from kvzip_press import cache_nbytes, is_compressed, kept_fraction
from kvzip_press import press as press_module
from kvzip_press.cache import ragged as cache_module
from kvzip_press.cache.ragged import RaggedLayer
from kvzip_press.cache.window import WindowLayer
from kvzip_press.models import language_model

IDS = random_ids(80, seed=1)
QUESTION = random_ids(6, seed=2)


def test_cropping_into_the_context_raises_and_changes_nothing(family):
    """Evicted pairs can't be counted back: an error that says so; a crop beyond the end does nothing."""
    model = build_model(family)
    cache = prefill(model, IDS, make_press(ratio=0.3))
    expected = ask(model, cache, QUESTION)
    follow(model, cache, QUESTION)
    states = packed_states(cache)
    cache.crop(1000)
    assert cache.get_seq_length() == 86
    for length in (79, 1, 0, -7, -86, -500):
        with pytest.raises(ValueError, match="the first 80 are a compressed context"):
            cache.crop(length)
        assert cache.get_seq_length() == 86
    assert all_equal(packed_states(cache), states)
    cache.crop(80)
    assert torch.equal(ask(model, cache, QUESTION), expected)


def test_cropping_the_tail_equals_never_having_read_it(family):
    model, press = build_model(family), make_press(ratio=0.3)
    later = random_ids(5, seed=3)
    expected_cache = prefill(model, IDS, press)
    follow(model, expected_cache, QUESTION[:, :4])
    expected = follow(model, expected_cache, later, 4)
    for length in (84, -2):
        cache = prefill(model, IDS, press)
        follow(model, cache, QUESTION)
        cache.crop(length)
        assert [layer.get_seq_length() for layer in cache.layers] == [84] * 4
        torch.testing.assert_close(follow(model, cache, later, 4), expected, **TOLERANCE)


def test_an_answer_is_removed_by_assigning_slices(family):
    """layer.keys = layer.keys[:, :, :length], kvpress's way to remove an answer, crops each layer."""
    model = build_model(family)
    cache = prefill(model, IDS, make_press(ratio=0.3))
    expected = ask(model, cache, QUESTION)
    lengths = [cache.get_seq_length(index) for index in range(len(cache))]
    follow(model, cache, QUESTION, 3)
    for layer, length in zip(cache.layers, lengths, strict=True):
        layer.keys = layer.keys[:, :, :length]
        layer.values = layer.values[:, :, :length]
    assert cache.get_seq_length() == 80
    assert torch.equal(ask(model, cache, QUESTION), expected)


def test_the_logical_keys_can_only_be_cropped(model):
    cache = prefill(model, IDS, make_press(ratio=0.3))
    follow(model, cache, QUESTION)
    layer, keys = cache.layers[0], cache.layers[0].keys
    assert keys.shape == keys.size() == (1, 2, 86, 8) and keys.size(2) == 86 and keys.numel() == 2 * 86 * 8
    assert keys.dtype == torch.float32 and keys.device == torch.device("cpu")
    assert keys[..., :83, :].shape == keys[:, :, :-3].shape == (1, 2, 83, 8)
    for index in (np.s_[0], np.s_[:, 0], np.s_[:, :, 5:80], np.s_[:, :, :, :4], np.s_[:, :, ::2]):
        with pytest.raises(TypeError, match="layer.packed_keys"):
            keys[index]
    with pytest.raises(TypeError, match="can only be cropped, got Tensor"):
        layer.keys = torch.zeros(1, 2, 80, 8)
    with pytest.raises(ValueError, match="compressed context"):
        layer.values = layer.values[:, :, :79]
    assert layer.get_seq_length() == 86


class Quantised(QuantizedLayer):
    """Without its quantiser, which is no dependency of ours."""

    _quantize = _dequantize = None


def offloaded_cache(config) -> Cache:
    """Marked by hand: the constructor makes a stream, which a CUDA build of torch can't do without a GPU."""
    cache = DynamicCache(config=config)
    cache.offloading = True
    return cache


FOREIGN = {
    "quantised": lambda config: Cache(layers=[Quantised() for _ in range(4)]),
    "quantised, made by its first update": lambda config: Cache(layer_class_to_replicate=Quantised),
    "static": lambda config: StaticCache(config=config, max_cache_len=128),
    "offloaded": offloaded_cache,
    "encoder-decoder": lambda config: EncoderDecoderCache(DynamicCache(), DynamicCache()),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_caches_that_can_not_be_replaced_are_refused_before_any_forward(model, kind):
    with refused(model, r"can't be compressed.*past_key_values=DynamicCache\(\)"):
        prefill(model, IDS, make_press(), FOREIGN[kind](model.config))


@pytest.mark.parametrize("implementation", ["static", "offloaded", "offloaded_static"])
@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="offloading needs the GPU torch is built for",
)
def test_generate_with_another_cache_implementation_is_refused(model, implementation):
    with refused(model, "use past_key_values=DynamicCache"), make_press()(model):
        model.generate(IDS, max_new_tokens=3, cache_implementation=implementation)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("family", ["gemma3", "gemma3-image-text"])
def test_hybrid_models_evict_their_global_layers_and_shrink_the_sliding_ones(family, known):
    """Global layers become ragged; sliding ones keep what a later token can still see, whole, in both cache kinds."""
    model = build_model(family)
    config = language_model(model).config if known else None
    cache = prefill(model, IDS, make_press(ratio=0.3), DynamicCache(config=config))
    assert [type(layer) for layer in cache.layers] == [WindowLayer, RaggedLayer] * 2
    full = prefill(model, IDS)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, WindowLayer):
            held, _ = layer._tail.view()
            assert torch.allclose(held, full.layers[index].keys[:, :, -(WINDOW - 1) :], atol=1e-5)
            assert layer.nbytes == 2 * 2 * (WINDOW - 1) * 16 * 4
    assert kept_fraction(cache) == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("family", ["mistral-sliding", "phi3-sliding", "gemma3"])
def test_answers_longer_than_the_window_equal_the_masked_dense_reference(family):
    """When the window has left the context behind, a compressed cache still gives the reference's logits."""
    model = build_model(family)
    compressed, full = prefill(model, IDS, make_press(ratio=0.4)), prefill(model, IDS)
    keep = keep_masks(full, compressed)
    ours = follow(model, compressed, QUESTION, 2 * WINDOW)
    with dense_masked(model, keep):
        expected = follow(model, full, QUESTION, 2 * WINDOW)
    torch.testing.assert_close(ours, expected, **TOLERANCE)


def test_a_model_that_slides_everywhere_evicts_within_its_windows():
    """Only the pairs that a later token can see count, and of those the ratio is kept."""
    cache = prefill(build_model("mistral-sliding"), IDS, make_press(ratio=0.5, n_sink=0))
    assert all(isinstance(layer, RaggedLayer) and layer.window == WINDOW for layer in cache.layers)
    assert sum(layer.kept_pairs for layer in cache.layers) == round(0.5 * 4 * 2 * (WINDOW - 1))
    assert min(int(layer.positions.min()) for layer in cache.layers) >= 80 - (WINDOW - 1)


@pytest.mark.parametrize("length", [1, 5, WINDOW - 1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3"])
def test_contexts_around_the_window_at_ratio_one_equal_the_full_cache(family, length):
    model = build_model(family)
    ids = random_ids(length, seed=length)
    ours = follow(model, prefill(model, ids, make_press(ratio=1.0)), QUESTION, WINDOW)
    torch.testing.assert_close(ours, follow(model, prefill(model, ids), QUESTION, WINDOW), **TOLERANCE)


@pytest.mark.parametrize("replay", ["local", "full"])
def test_bytes_fall_with_the_kept_fraction(family, replay):
    """The storages alive after compression are those of the kept pairs, counted by hand, and some bookkeeping."""
    model = build_model(family)
    ids = random_ids(600)
    cache = prefill(model, ids, make_press(ratio=0.1, replay=replay, chunk_size=300))
    expected = 0
    for layer in cache.layers:
        if isinstance(layer, RaggedLayer):
            pairs = int(layer.head_lengths.sum())
            assert len(layer.packed_keys) == len(layer.packed_values) == pairs
            expected += 2 * pairs * layer.head_dims[0] * 4 + (0 if layer.window is None else 4 * pairs) + 3 * 8
        else:
            expected += 2 * 2 * (WINDOW - 1) * layer.head_dims[0] * 4
    assert cache_nbytes(cache) == expected < 0.15 * cache_nbytes(prefill(model, ids))


def full_tensors_alive() -> int:
    """Tensors anywhere in the process that hold 83 tokens of a layer densely."""
    return sum(type(item) is torch.Tensor and item.shape == (1, 2, 83, 8) for item in gc.get_objects())


def test_the_full_tensors_are_released(model):
    with torch.no_grad(), make_press(ratio=0.1)(model):
        cache = prefill(model, random_ids(83))
        assert full_tensors_alive() >= 8
    assert is_compressed(cache) and full_tensors_alive() == 0


def test_decoding_reads_the_kept_pairs_alone(monkeypatch, model):
    read, decode_attention = [], cache_module.decode_attention

    def spy(query, packed_key, *args, **kwargs):
        read.append(len(packed_key))
        return decode_attention(query, packed_key, *args, **kwargs)

    monkeypatch.setattr(cache_module, "decode_attention", spy)
    follow(model, prefill(model, random_ids(204), make_press(ratio=0.1)), QUESTION[:, :1], 1)
    assert sum(read) == 2 * (round(0.1 * 200 * 8) + 4 * 8)


def test_the_tail_grows_without_copies_per_token(model):
    cache = prefill(model, IDS, make_press(ratio=0.3))
    pointers = []
    for token in random_ids(300)[0]:
        follow(model, cache, token.view(1, 1))
        pointers.append(cache.layers[0]._tail.view()[0].data_ptr())
    assert cache.layers[0].tail_length == 300
    changes = sum(a != b for a, b in zip(pointers, pointers[1:], strict=False))
    assert 1 <= changes <= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_half_precision_gives_finite_logits_near_the_reference(family, dtype):
    model = build_model(family).to(dtype)
    compressed, full = prefill(model, IDS, make_press(ratio=0.3)), prefill(model, IDS)
    assert all(layer.packed_keys.dtype == dtype for layer in ragged(compressed))
    keep = keep_masks(full, compressed)
    ours = ask(model, compressed, QUESTION, 0).float()
    assert torch.isfinite(ours).all()
    with dense_masked(model, keep):
        expected = follow(model, full, QUESTION).float()
    scale = expected.abs().max()
    assert (ours - expected).abs().max() < 16 * torch.finfo(dtype).eps * scale


def test_large_activations_in_float16_give_no_nan():
    """Keys and queries near the end of float16's range: logits beyond it are computed in float32."""
    model = build_model("llama", scale=2000.0).half()
    cache = prefill(model, IDS, make_press(ratio=0.3))
    logits = follow(model, cache, QUESTION, 5)
    assert torch.isfinite(logits).all()
    assert max(float(layer.packed_keys.abs().max()) for layer in cache.layers) > 300


def test_overflowed_attention_is_an_error_not_a_selection(model):
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    cache = DynamicCache()
    with pytest.raises(ValueError, match="NaN.*bfloat16 or float32"):
        prefill(model, IDS, make_press(), cache)
    assert not is_compressed(cache)


def test_bfloat16_scores_are_distinct_so_that_ties_do_not_decide():
    scores = scores_of(build_model("llama").bfloat16(), random_ids(400), chunk_size=200)
    assert scores.dtype == torch.float32
    scored = scores[..., 4:].flatten()
    assert len(scored.unique()) > 0.98 * len(scored)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-sliding"])
@pytest.mark.parametrize("compress_mode", ["inference", "no_grad", "grad"])
@pytest.mark.parametrize("ask_mode", ["inference", "no_grad", "grad"])
def test_compressed_and_asked_in_any_gradient_mode(family, compress_mode, ask_mode):
    """No tensor of the cache carries a graph, and the mode of the compression does not bind that of the question."""
    modes = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}
    model, cache = build_model(family), DynamicCache()
    with modes[compress_mode](), make_press(ratio=0.3)(model):
        language_model(model)(input_ids=IDS, past_key_values=cache)
    expected = follow(model, prefill(model, IDS, make_press(ratio=0.3)), QUESTION)
    with modes[ask_mode]():
        for _ in range(2):
            logits = model(input_ids=QUESTION, past_key_values=cache).logits
            torch.testing.assert_close(logits.detach(), expected, **TOLERANCE)
            cache.crop(80)
    tensors = [tensor for layer in cache.layers for tensor in layer._tail._buffers]
    tensors += [getattr(layer, name) for layer in ragged(cache) for name in ("packed_keys", "packed_values")]
    assert not any(tensor.requires_grad or tensor.grad_fn is not None or tensor.is_inference() for tensor in tensors)


def test_training_with_dropout_is_refused(model):
    cache = prefill(model, IDS, make_press(ratio=0.3))
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()
    with pytest.raises(NotImplementedError, match=r"model.eval\(\)"):
        model(input_ids=QUESTION, past_key_values=cache)


@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
def test_a_named_backend_runs(model, backend):
    cache = prefill(model, IDS, make_press(ratio=0.3, backend=backend))
    assert {layer.backend for layer in cache.layers} == {backend}
    expected = follow(model, prefill(model, IDS, make_press(ratio=0.3)), QUESTION, 3)
    torch.testing.assert_close(follow(model, cache, QUESTION, 3), expected, **TOLERANCE)


def test_a_named_backend_that_can_not_run_raises_and_flash_decodes_while_auto_replays(monkeypatch, model):
    """No other backend runs instead, and no work is done; backend='flash' names the decode kernel alone."""
    press = make_press(backend="flash")
    with refused(model, "backend 'flash' runs on CUDA GPUs only"):
        prefill(model, IDS, press)
    double = build_model("llama").double()
    with refused(double, "backend 'cpu' takes float32, bfloat16, float16, got float64; use"):
        prefill(double, IDS, make_press(backend="cpu"))
    checked = []
    monkeypatch.setattr(press_module, "decode_module", lambda *arguments: checked.append(arguments))
    compressor = press.compressor(model)
    assert checked == [("flash", torch.device("cpu"), torch.float32, torch.float32, 8, False)]
    assert (compressor.decode_backend, compressor.replay_backend) == ("flash", "auto")
