"""
On a real model, ours against kvpress's own KVzipPress.

Where the definitions differ: kvpress's softmax holds the first ``n_sink`` tokens, ours the whole chat prefix (or the
first ``n_sink`` tokens of a raw context); kvpress's budget is taken over prefix and context together, ours over the
context behind the prefix, which is kept. With kvpress's ``n_sink`` set to the prefix length both scores are the same.
"""

import kvpress
import pytest
import torch
from harness import context_of
from transformers import pipeline

from kvzip_press import KVzipPress
from kvzip_press.context import context_ids
from kvzip_press.eval.presses.budget import kept_target, prefix_length, ratio_removing
from kvzip_press.selection import Allowance

pytestmark = pytest.mark.peer

QUESTIONS = ["What is this text about?", "Who is it for?", "Name one thing the author warns of."]


class ScoringPress(kvpress.KVzipPress):
    """kvpress's press, with its scores kept for comparison."""

    def compress_post(self, model):
        self.seen_scores = self.score_val.clone()
        super().compress_post(model)


def kept_masks(model, num_tokens: int) -> torch.Tensor:
    """What kvpress's press left visible: (num_layers, num_kv_heads, num_tokens)."""
    config = model.config
    keep = torch.ones(config.num_hidden_layers, config.num_key_value_heads, num_tokens, dtype=torch.bool)
    for layer in model.model.layers:
        _, heads, columns = layer.self_attn.masked_key_indices
        keep[layer.self_attn.layer_idx, heads, columns] = False
    return keep


class FixedMask(KVzipPress):
    """Ours, keeping given pairs."""

    def compress_context(self, compressor, context):
        scores = [self.mask.float()]
        target = self.mask[..., self.prefix :].float().mean().item()
        compressor.evict(context, Allowance(ratio=target), level="pair", scores=scores)


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [300, 1500, 5000])
def test_scores_and_answers_equal_those_of_kvpress(smollm2, essay, num_tokens):
    model, tokenizer = smollm2
    text = essay(num_tokens)
    ids = context_ids(tokenizer, text)
    total, prefix = ids.shape[1], prefix_length(tokenizer)
    heads = model.config.num_hidden_layers * model.config.num_key_value_heads
    pairs, ratio = heads * total, 0.3
    removed = pairs - kept_target(total, prefix, heads, ratio)
    theirs = ScoringPress(compression_ratio=ratio_removing(removed, pairs), n_sink=prefix)
    ask = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
    their_answers = ask(text, questions=QUESTIONS, press=theirs, max_new_tokens=16)["answers"]
    keep = kept_masks(model, total)
    assert int(keep.sum()) == pairs - removed

    press = KVzipPress(ratio=ratio, replay="full", chunk_size=2048, tokenizer=tokenizer)
    context = context_of(model, ids)
    compressor = press.compressor(model)
    scores = compressor.score(context)[0]
    expected = theirs.seen_scores[:, 0, :, prefix:]
    torch.testing.assert_close(scores[..., prefix:], expected, atol=1e-4, rtol=0)

    same_pairs = FixedMask(tokenizer=tokenizer)
    same_pairs.mask, same_pairs.prefix = keep, prefix
    assert ask(text, questions=QUESTIONS, press=same_pairs, max_new_tokens=16)["answers"] == their_answers

    compressor.evict(context, press.allowance(), level="pair", scores=[scores])
    ours = torch.stack([layer.head_lengths[0] for layer in context.cache.layers])
    # Scores agree to rounding, so at most a few pairs at the threshold differ
    assert (ours - keep.sum(-1)).abs().sum() <= 1e-3 * removed
    assert ask(text, questions=QUESTIONS, press=press, max_new_tokens=16)["answers"] == their_answers
