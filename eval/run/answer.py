"""What is asked of a cache, full or compressed, which afterwards is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import log_softmax
from transformers import Cache, PreTrainedModel

from ...cache.measure import is_compressed
from ...decoding import forgetting, greedy, read
from ...models import ModelLayout


@contextmanager
def _asking(model: PreTrainedModel, cache: Cache) -> Iterator[None]:
    """
    Forget what is asked, and cut the mask, which transformers sizes by the first layer, to each layer's own length.

    PyramidKV keeps fewer tokens in later layers; several tokens fed at once would not fit their mask otherwise.
    """

    def cut(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 4:
            columns = cache.get_seq_length(module.layer_idx) + mask.shape[-2]  # type: ignore[arg-type]
            kwargs["attention_mask"] = mask[..., -columns:]
        return args, kwargs

    lengths = {cache.get_seq_length(index) for index in range(len(cache.layers))}
    uneven = len(lengths) > 1 and not is_compressed(cache)
    modules = ModelLayout.of(model).attention if uneven else []
    handles = [module.register_forward_pre_hook(cut, with_kwargs=True) for module in modules]
    try:
        with forgetting(cache):
            yield
    finally:
        for handle in handles:
            handle.remove()


def greedy_answer(
    model: PreTrainedModel,
    cache: Cache,
    question_ids: torch.Tensor,
    context_length: int,
    max_new_tokens: int,
    *,
    stop_at_first: bool = True,
) -> list[int]:
    """The greedy answer to a question with its end token, see :func:`kvzip_press.decoding.greedy`."""
    with _asking(model, cache):
        return list(greedy(model, cache, question_ids, context_length, max_new_tokens, stop_at_first=stop_at_first))


def answer_logprobs(
    model: PreTrainedModel, cache: Cache, question_ids: torch.Tensor, answer_ids: torch.Tensor, context_length: int
) -> torch.Tensor:
    """
    Log-probabilities at each token of an answer, which is read with its question in one forward pass.

    Of ids of shape (1, question_length) and (1, answer_length) they have shape (answer_length, vocab_size) and are
    float32. Positions go on from `context_length`, the original length of the context.
    """
    ids = torch.cat([question_ids.to(model.device), answer_ids[:, :-1]], dim=1)
    with _asking(model, cache):
        logits = read(model, cache, ids, context_length, logits_to_keep=answer_ids.shape[1])
    return log_softmax(logits[0].float(), dim=-1)


def compare(reference: torch.Tensor, other: torch.Tensor, answer_ids: torch.Tensor) -> dict[str, float]:
    """
    How far what a cache predicts along an answer is from what the full cache does.

    Of their log-probabilities, shape (answer_length, vocab_size), and the answer's ids, shape (1, answer_length):
    `answer_tokens`, and means over them: `kl` in nats, `agreement` (share of tokens with the same most likely token),
    `loss` of the other cache on the answer and `added_loss`, how much above the full cache's it is.
    """
    # Tokens that the reference excludes (probability 0) add nothing, where 0 * inf would be nan
    terms = torch.where(reference.isneginf(), 0.0, reference.exp() * (reference - other))
    loss, full_loss = (
        -float(logprobs.gather(1, answer_ids[0].unsqueeze(-1)).mean()) for logprobs in (other, reference)
    )
    return {
        "answer_tokens": answer_ids.shape[1],
        "kl": float(terms.sum(dim=-1).mean()),
        "agreement": float((reference.argmax(dim=-1) == other.argmax(dim=-1)).float().mean()),
        "loss": loss,
        "added_loss": loss - full_loss,
    }
