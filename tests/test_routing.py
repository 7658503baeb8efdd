"""Routing: attention reaches ragged layers whatever wrapped it before or after, and nobody else notices."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from harness import TOLERANCE, ask, follow, make_press, prefill
from kvpress.attention_patch import attention_patch
from tiny_models import build_model, random_ids
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvzip_press.routing import RoutedTensor, _route, install_routing

IDS, QUESTION = random_ids(60), random_ids(5, seed=3)


@pytest.fixture
def registry(monkeypatch):
    """The attention registry, put back as it was afterwards."""
    mappings = ALL_ATTENTION_FUNCTIONS._local_mapping, ALL_ATTENTION_FUNCTIONS._global_mapping
    before = [dict(mapping) for mapping in mappings]
    yield ALL_ATTENTION_FUNCTIONS
    for mapping, saved in zip(mappings, before, strict=True):
        mapping.clear()
        mapping.update(saved)


def run_python(code: str) -> str:
    """Run code in a new interpreter that can import the tests' models."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


OUTPUTS = """
import json, sys
{imports}
import torch
torch.set_num_threads(1)
from tiny_models import build_model, random_ids
from transformers import DynamicCache
found = []
for family in ("llama", "gemma3", "phi3"):
    model, cache = build_model(family), DynamicCache()
    with torch.no_grad():
        for ids in (random_ids(30), random_ids(4, seed=1), random_ids(1, seed=2)):
            found.append(model(input_ids=ids, past_key_values=cache).logits.double().sum().item().hex())
            found.append(model(input_ids=ids, past_key_values=cache).logits.double().abs().max().item().hex())
    found.append(bytes(model.generate(random_ids(9), max_new_tokens=6, do_sample=False)[0].tolist()).hex())
{after}
print(json.dumps({{"found": found}}))
"""


PRESSED = """
import time
start = time.perf_counter()
import kvzip_press.press
found.append(time.perf_counter() - start)
from harness import ask, make_press, prefill
model = build_model("llama")
cache = prefill(model, random_ids(60), make_press(ratio=0.3))
found.append(ask(model, cache, random_ids(5, seed=3)).flatten().tolist())
"""
OURS_FIRST = (
    "from kvzip_press.routing import install_routing\ninstall_routing()\n"
    "assert 'kvpress' not in sys.modules\nimport kvpress"
)


def test_importing_changes_nothing_for_others_and_the_order_does_not_matter():
    """Models that never meet a press give bit-equal outputs with and without our import, which may come first."""
    programs = [OUTPUTS.format(imports="import kvpress", after=""), OUTPUTS.format(imports=OURS_FIRST, after=PRESSED)]
    with ThreadPoolExecutor() as pool:
        alone, ours = (json.loads(line) for line in pool.map(run_python, programs))
    assert len(alone["found"]) == 21
    *plain, seconds, pressed = ours["found"]
    assert plain == alone["found"]
    print(f"import kvzip_press.press after torch, transformers and kvpress: {seconds:.2f} s")
    assert seconds < 5
    model = build_model("llama")
    expected = ask(model, prefill(model, IDS, make_press(ratio=0.3)), QUESTION)
    torch.testing.assert_close(torch.tensor(pressed), expected.flatten(), **TOLERANCE)


def test_importing_the_package_alone_imports_nothing_heavy():
    """`import kvzip_press` is immediate; torch and transformers are imported on first use of what needs them."""
    code = """
import sys, time
start = time.perf_counter()
import kvzip_press
seconds = time.perf_counter() - start
heavy = [name for name in ("torch", "transformers", "kvpress", "numba") if name in sys.modules]
assert not heavy, heavy
assert "KVzipPress" in dir(kvzip_press)
print(seconds)
"""
    seconds = float(run_python(code))
    print(f"import kvzip_press: {1000 * seconds:.1f} ms")
    assert seconds < 0.5


def test_routing_is_idempotent():
    install_routing()
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    install_routing()
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == before


@pytest.mark.parametrize(
    "chain",
    [(_route,), (_route, attention_patch), (attention_patch, _route), (_route, attention_patch, _route)],
    ids=["ours", "kvpress after ours", "ours after kvpress", "ours around both"],
)
def test_any_order_of_wrappers_gives_the_same_answers(registry, chain):
    model = build_model("llama")
    compressed, full = prefill(model, IDS, make_press(ratio=0.3)), prefill(model, IDS)
    expected = ask(model, compressed, QUESTION), ask(model, full, QUESTION)
    function = sdpa_attention_forward
    for wrapper in chain:
        function = wrapper(function)
    registry["sdpa"] = function
    assert torch.equal(ask(model, compressed, QUESTION), expected[0])
    full.crop(IDS.shape[1])
    assert torch.equal(ask(model, full, QUESTION), expected[1])


def test_a_function_registered_later_is_routed_when_a_press_is_entered(registry, model):
    """Someone's own attention, registered after our import, works with compressed caches and is used elsewhere."""
    calls = []

    def mine(module, query, key, value, attention_mask, *args, **kwargs):
        calls.append(type(key))
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)

    expected = ask(model, prefill(model, IDS, make_press(ratio=0.3)), QUESTION)
    registry.register("mine", mine)
    ALL_MASK_ATTENTION_FUNCTIONS.register("mine", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("mine")
    cache = prefill(model, IDS, make_press(ratio=0.3))
    assert len(calls) == 4
    torch.testing.assert_close(ask(model, cache, QUESTION), expected, **TOLERANCE)
    assert set(calls) == {torch.Tensor} and len(calls) == 4


def test_plain_tensors_pass_through_untouched():
    seen = []

    def function(*args, **kwargs):
        seen.append((args, kwargs))
        return "output", "weights"

    tensors = [torch.zeros(1) for _ in range(4)]
    assert _route(function)("module", *tensors, 0.1, scaling=2, custom="x") == ("output", "weights")
    args, kwargs = seen[0]
    assert all(a is b for a, b in zip(args[1:5], tensors, strict=True))
    assert args[0] == "module" and args[5:] == (0.1,) and kwargs == {"scaling": 2, "custom": "x"}


@pytest.mark.parametrize(
    "operation",
    [
        *("t + 1", "1 + t", "t.sum()", "torch.matmul(torch.ones(4, 4), t)", "torch.einsum('bhnd->bhn', t)"),
        *("t[:, 0]", "t[0, 0, 0, 0].item()", "t.__setitem__(0, 1)", "t.view(-1)", "t.transpose(1, 2)"),
        *("t.expand(2, -1, -1, -1)", "t.float()", "t.contiguous()", "t.clone()", "t.detach()", "t.to('cpu')"),
        *("t.numpy()", "t.data", "torch.cat([t, t])", "torch.add(torch.zeros(1, 2, 3, 4), 1, out=t)"),
        "torch.nn.functional.scaled_dot_product_attention(t, t, t)",
    ],
)
def test_a_routed_tensor_can_not_be_computed_with(operation):
    """Any operation on a routed tensor raises with the remedy: it would silently leave out the context."""
    tensor = RoutedTensor.wrap(torch.randn(1, 2, 3, 4), layer=None)
    with pytest.raises(RuntimeError, match="can't read a compressed KV cache.*set_attn_implementation"):
        eval(operation, {"t": tensor, "torch": torch})


def test_shape_dtype_and_device_of_a_routed_tensor_can_be_read():
    """What kvpress's wrapper and transformers ask of keys is answered; the plain tensor is one step away."""
    plain = torch.randn(1, 2, 3, 4)
    tensor = RoutedTensor.wrap(plain, layer=None)
    assert tensor.shape == plain.shape == tensor.size() and tensor.size(2) == 3 and len(tensor) == 1
    assert tensor.dtype == plain.dtype and tensor.device == plain.device and tensor.dim() == tensor.ndim == 4
    assert type(tensor.unwrap()) is torch.Tensor and torch.equal(tensor.unwrap(), plain)
    assert tensor.unwrap().data_ptr() == plain.data_ptr()


@pytest.mark.parametrize("argument", ["s_aux", "position_bias", "head_mask"])
def test_features_that_are_not_computed_are_refused(model, argument):
    query, key = torch.zeros(1, 8, 1, 8), torch.zeros(1, 2, 1, 8)
    keys, values = prefill(model, IDS, make_press(ratio=0.3)).layers[0].update(key, key)
    with pytest.raises(NotImplementedError, match=argument):
        ALL_ATTENTION_FUNCTIONS["sdpa"](model, query, keys, values, None, **{argument: torch.zeros(1)})


def test_without_routing_a_compressed_cache_raises_instead_of_answering(registry, model):
    """If someone puts an unwrapped function back, the next question is an error; any press brings the routing back."""
    cache = prefill(model, IDS, make_press(ratio=0.3))
    expected = ask(model, cache, QUESTION)
    registry["sdpa"] = sdpa_attention_forward
    with pytest.raises(RuntimeError, match="can't read a compressed KV cache"):
        follow(model, cache, QUESTION)
    install_routing()
    cache.crop(IDS.shape[1])
    assert torch.equal(ask(model, cache, QUESTION), expected)
