"""Scores against whole attention matrices in float64, taken from a plain forward pass of the model."""

import pytest
import torch
from harness import context_of, make_press, prefill, scores_of
from tiny_models import build_model, build_tokenizer, random_ids
from torch import nn
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvzip_press import KVzipPress
from kvzip_press.kernels.replay import torch as torch_replay
from kvzip_press.models import ModelLayout
from kvzip_press.scoring import SCORERS, inverse_hidden_norm, value_output_norm

NAME = "recording_reference"
CHUNK, SINKS, LENGTH = 40, 4, 90
RECORDED: dict[int, tuple[torch.Tensor, ...]] = {}


def recording_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Attention written out, that remembers the queries, keys and values of each layer."""
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ keys.transpose(-1, -2) * scaling
    RECORDED[module.layer_idx] = (logits, value)
    if attention_mask is not None:
        logits = logits + attention_mask[..., : key.shape[2]]
    return (torch.softmax(logits, dim=-1) @ values).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, recording_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)


@torch.no_grad()
def materialised_scores(model, ids, scorer: str, local: bool) -> torch.Tensor:
    """
    KVzip's scores from its definition: replay each chunk after the whole context, look at whole attention matrices.

    A local replay is the same with a mask that shows sinks, chunk and replayed tokens alone.
    """
    wordings = (
        "\n\nRepeat the previous context exactly.",
        "\n\nRepeat the part of the previous context exactly, starting with",
        "\n",
    )
    first, later, newline = (build_tokenizer().encode(text, add_special_tokens=False) for text in wordings)
    context, model, reduction = ids[0].tolist(), model.double(), SCORERS[scorer].reduction
    config, attention = model.model.config, ModelLayout.of(model).attention
    scores = torch.full((config.num_hidden_layers, config.num_key_value_heads, LENGTH), -torch.inf).double()
    inputs: dict[int, torch.Tensor] = {}

    def note(module, args, kwargs):
        inputs[module.layer_idx] = kwargs["hidden_states"]

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in attention]
    model.set_attn_implementation(NAME)
    for start in range(SINKS, LENGTH, CHUNK):
        end = min(start + CHUNK, LENGTH)
        prompt = first if start == SINKS else later + context[start - 8 : start]
        fed = torch.tensor([prompt + newline + context[start:end]])
        n = fed.shape[1]
        columns = torch.arange(LENGTH + n)
        seen = (columns < SINKS) | ((columns >= start) & (columns < end)) | (columns >= LENGTH)
        causal = columns <= torch.arange(LENGTH, LENGTH + n).unsqueeze(-1)
        cache = DynamicCache()
        model.model(input_ids=ids, past_key_values=cache)
        mask = None
        if local:
            mask = torch.zeros(1, 1, n, LENGTH + n, dtype=torch.float64).masked_fill(~(causal & seen), -torch.inf)
        model.model(input_ids=fed, past_key_values=cache, attention_mask=mask)
        for layer, (logits, value) in RECORDED.items():
            weights = torch.softmax(logits.masked_fill(~(causal & seen), -torch.inf), dim=-1)
            if reduction == "logit":
                weights = logits
            if reduction == "sum_of_squares":
                weights = weights.square()
            if SCORERS[scorer].normalized:
                blocks = attention[layer].o_proj.weight.split(value.shape[-1], dim=1)
                for head, block in enumerate(blocks):
                    kv_head = head * value.shape[1] // weights.shape[1]
                    weights[0, head] *= (value[0, kv_head] @ block.T).norm(dim=-1)
                weights /= inputs[layer].norm(dim=-1)[:, None, :, None]
            by_group = weights[0].unflatten(0, (config.num_key_value_heads, -1))[..., start:end]
            scores[layer, :, start:end] = (by_group.sum if "sum" in reduction else by_group.amax)(dim=(1, 2))
    for handle in handles:
        handle.remove()
    return scores


@pytest.mark.parametrize("local", [True, False], ids=["local", "full"])
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_scores_equal_those_of_whole_attention_matrices(family, scorer, local):
    model, ids, replay = build_model(family), random_ids(LENGTH), "local" if local else "full"
    scores = scores_of(model, ids, chunk_size=CHUNK, n_sink=SINKS, scorer=scorer, replay=replay)
    assert scores.dtype == torch.float32 and scores.shape == (4, 2, LENGTH)
    assert (scores[..., :SINKS] == -torch.inf).all() and torch.isfinite(scores[..., SINKS:]).all()
    expected = materialised_scores(model, ids, scorer, local)
    torch.testing.assert_close(scores[..., SINKS:].double(), expected[..., SINKS:], atol=2e-5, rtol=2e-4)


def test_scorers_rank_pairs_differently(model):
    ids = random_ids(LENGTH)
    halves = []
    for scorer in SCORERS:
        scores = scores_of(model, ids, scorer=scorer, chunk_size=CHUNK)[..., SINKS:].flatten()
        halves.append((scores > scores.median()).tolist())
    assert all(a != b for index, a in enumerate(halves) for b in halves[:index])


@pytest.mark.parametrize(("family", "expected"), [("gemma3", (2, 2, LENGTH)), ("mistral-sliding", (4, 2, 23))])
def test_only_layers_that_are_evicted_are_scored(family, expected):
    """A hybrid model scores its global layers; one that slides everywhere its last window."""
    model = build_model(family)
    assert scores_of(model, random_ids(LENGTH), chunk_size=CHUNK).shape == expected
    assert len(ModelLayout.of(model).evicted) == expected[0]


def test_the_whole_attention_matrix_never_exists(monkeypatch, model):
    """No block of logits in the replay exceeds the bound, though queries x keys is many times as much."""
    bound, sizes, bmm = 1 << 14, [], torch.bmm
    monkeypatch.setitem(torch_replay._BLOCK_ELEMENTS, "cpu", bound)

    def spy(*args, **kwargs):
        out = bmm(*args, **kwargs)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(torch, "bmm", spy)
    ids = random_ids(300)
    blocked = scores_of(model, ids, chunk_size=296, backend="torch")
    keys, queries = 4 + 2 * 296 + 39, 296 + 39
    # Never fewer rows than 16 in a block
    assert max(sizes) <= max(bound, 8 * 16 * keys) < 8 * queries * keys / 10
    monkeypatch.undo()
    torch.testing.assert_close(scores_of(model, ids, chunk_size=296, backend="torch"), blocked)


class Watched(KVzipPress):
    """Counts the calls of its forward hook, with the hooks that are on the model then."""

    def forward_hook(self, module, input, kwargs, output):
        self.seen.append((module.layer_idx, len(module._forward_hooks)))
        return super().forward_hook(module, input, kwargs, output)


@pytest.mark.parametrize(("family", "layers"), [("llama", [0, 1, 2, 3]), ("gemma3", [1, 3])])
def test_scores_are_collected_in_the_presss_forward_hook(family, layers):
    """Once a scored layer and pass, while the replay lasts; other caches that run meanwhile don't concern it."""
    model, ids = build_model(family), random_ids(LENGTH)
    press = Watched(tokenizer=build_tokenizer(), chunk_size=CHUNK)
    press.seen, other, context = [], prefill(model, ids), context_of(model, ids)
    compressor = press.compressor(model)

    def meanwhile(module, args, output):
        if "other" not in press.seen:
            press.seen.append("other")
            model.model(input_ids=ids[:, :3], past_key_values=other)

    attention = ModelLayout.of(model).attention
    handle = attention[1].register_forward_hook(meanwhile)
    scores = compressor.score(context)[0]
    handle.remove()
    calls = [call for call in press.seen if call != "other"]
    assert [layer for layer, _ in calls] == layers * 3 and min(hooks for _, hooks in calls) >= 1
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in attention)
    assert torch.equal(scores, scores_of(model, ids, chunk_size=CHUNK))


def test_scores_that_no_hook_collects_are_an_error(model):
    """A forward hook of one's own that forgets the press's leaves no scores: an error, not a selection by position."""
    press = make_press()
    object.__setattr__(press, "forward_hook", lambda module, args, kwargs, output: output)
    with pytest.raises(RuntimeError, match="have it call KVzipPress.forward_hook"):
        prefill(model, random_ids(LENGTH), press)


def test_a_models_layout_is_resolved_once(monkeypatch, model):
    asked, resolve = [], ModelLayout.of
    monkeypatch.setattr(ModelLayout, "of", lambda model: asked.append(1) or resolve(model))
    prefill(model, random_ids(LENGTH, batch_size=2), make_press(ratio=0.3))
    assert asked == [1]


def test_value_output_norm_equals_the_projected_vector():
    """||W_O v|| by head, from the definition: the part of o_proj that belongs to the head, times the value."""
    torch.manual_seed(0)
    module = nn.Module()
    module.o_proj = nn.Linear(24, 20, bias=False)  # 6 heads of 4
    values = torch.randn(2, 3, 5, 4)
    expected = torch.empty(2, 3, 2, 5)
    for head in range(6):
        vectors = torch.zeros(2, 5, 24)
        vectors[..., head * 4 : head * 4 + 4] = values[:, head // 2]
        expected[:, head // 2, head % 2] = module.o_proj(vectors).norm(dim=-1)
    torch.testing.assert_close(value_output_norm(module, values), expected)


def test_inverse_hidden_norm_is_computed_in_float32():
    """Hidden states whose squares overflow float16 still have a norm."""
    hidden = torch.full((1, 2, 4), 300.0, dtype=torch.float16)
    assert inverse_hidden_norm(hidden).tolist() == [[pytest.approx(1 / 600)] * 2]


def test_a_model_without_a_readable_output_projection_is_refused_for_kvzip_plus():
    """Quantised weights have no norm of W_O v: the error names the scorer that needs none."""
    module = nn.Module()
    module.o_proj = nn.Module()
    module.o_proj.weight = torch.zeros(4, 4, dtype=torch.int8)
    with pytest.raises(ValueError, match="floating-point o_proj.weight; use scorer='kvzip'"):
        value_output_norm(module, torch.zeros(1, 1, 1, 4))
