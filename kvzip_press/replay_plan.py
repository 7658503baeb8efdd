"""Which tokens each forward pass of a replay is given, and which pairs of the context it scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .prompts import EncodedPrompts

REPLAYS = ("local", "full")
REPEATS = ("context", "first", "last", "prompt")

# arXiv 2505.23416, section 6.1: the replay of a part of the context feeds a tenth of it
_PARTIAL_REPEAT = 10


@dataclass(frozen=True)
class RowContext:
    """One row of a prefilled cache."""

    row: int
    padding: int  # Columns of the cache before the row's first token
    num_tokens: int
    input_ids: list[int] | None
    inputs_embeds: torch.Tensor | None  # (num_tokens, hidden_size), where ids are not known or not enough (images)
    next_position: int  # Position id of the token after the context
    prefix_length: int  # Leading tokens of the chat template
    protected: int  # Leading tokens that are always kept, and not replayed


@dataclass(frozen=True)
class ReplayPass:
    """One forward pass of the replay."""

    prompt: list[int]  # Token ids fed first
    fed: tuple[int, int]  # Tokens of the context fed after them
    scored: tuple[int, int]  # Tokens of the context whose pairs are scored


def plan_replay(
    context: RowContext, prompts: EncodedPrompts, *, chunk_size: int, repeat: str = "context"
) -> list[ReplayPass]:
    """
    Cut a context into chunks and put a prompt before each; without ids, later prompts have no anchor tokens.

    ``repeat="context"`` replays all of it. The ablations of the paper's section 6.1 replay the ``"first"`` or the
    ``"last"`` tenth, or the ``"prompt"`` alone, in one pass that scores everything.
    """
    protected, num_tokens = context.protected, context.num_tokens
    suffix = prompts.suffix(context.prefix_length)
    if repeat != "context":
        part = max(1, (num_tokens - protected) // _PARTIAL_REPEAT)
        fed = {
            "first": (protected, min(protected + part, num_tokens)),
            "last": (max(protected, num_tokens - part), num_tokens),
            "prompt": (num_tokens, num_tokens),
        }[repeat]
        if not prompts.first + suffix and fed[0] == fed[1]:
            raise ValueError(f"repeat={repeat!r} with an empty prompt feeds nothing; give prompts.first some text")
        return [ReplayPass(prompts.first + suffix, fed, (protected, num_tokens))]
    passes = []
    for start in range(protected, num_tokens, chunk_size):
        chunk, prompt = (start, min(start + chunk_size, num_tokens)), prompts.first
        if start > protected:
            anchor = (context.input_ids or [])[max(protected, start - prompts.anchor_tokens) : start]
            prompt = prompts.later + anchor + prompts.after_anchor
        passes.append(ReplayPass(prompt + suffix, chunk, chunk))
    return passes
