"""The truth for ragged caches: a full cache, attended densely, with the evicted pairs masked by -inf."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import Cache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvzip_press.cache.ragged import RaggedLayer

NAME = "dense_masked_reference"


def recover_keep(full_keys: torch.Tensor, layer: RaggedLayer) -> torch.Tensor:
    """Which pairs a ragged layer kept, found by looking its keys up in the full ones: (batch, num_kv_heads, held)."""
    keep = torch.zeros(full_keys.shape[:3], dtype=torch.bool)
    segments = layer.packed_keys.split(layer.cu_seqlens.diff().tolist())
    for keys, kept, segment in zip(full_keys.flatten(0, 1), keep.flatten(0, 1), segments, strict=True):
        position = 0
        for key in segment:
            while not torch.equal(keys[position], key):
                position += 1
            kept[position] = True
            position += 1
    return keep


def _dense_masked_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1).double(), value.repeat_interleave(group, 1).double()
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = query.double() @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        logits = logits + attention_mask[..., : key.shape[2]].double()
    keep = _KEEP.get(module.layer_idx)
    if keep is not None:
        evicted = ~keep.repeat_interleave(group, 1)[:, :, None, :]
        n = min(evicted.shape[-1], logits.shape[-1])
        logits[..., :n].masked_fill_(evicted[..., :n], -torch.inf)
    out = torch.softmax(logits, dim=-1) @ value
    return out.transpose(1, 2).to(query.dtype).contiguous(), None


_KEEP: dict[int, torch.Tensor] = {}
ALL_ATTENTION_FUNCTIONS.register(NAME, _dense_masked_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)


@contextmanager
def dense_masked(model: PreTrainedModel, keep: dict[int, torch.Tensor]) -> Iterator[None]:
    """Attend densely, in float64, with the pairs outside of ``keep`` masked in each layer."""
    before = model.config._attn_implementation
    _KEEP.update(keep)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        _KEEP.clear()


def keep_masks(full: Cache, compressed: Cache) -> dict[int, torch.Tensor]:
    """Keep mask of each evicted layer."""
    return {
        index: recover_keep(full.layers[index].keys, layer)
        for index, layer in enumerate(compressed.layers)
        if isinstance(layer, RaggedLayer)
    }
