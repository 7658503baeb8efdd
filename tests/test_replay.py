"""The plan of a replay: what is fed in each pass, and what it scores."""

import pytest
import torch
from harness import context_of, counted_calls, make_press, prefill, scores_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import random_ids

from kvzip_press.prompts import EncodedPrompts
from kvzip_press.replay_plan import REPEATS, ReplayPass, RowContext, plan_replay

PROMPTS = EncodedPrompts(
    first=[900],
    later=[901, 902],
    after_anchor=[903],
    anchor_tokens=3,
    chat_prefix=[1, 2, 3, 4, 5, 6],
    chat_suffix=[904, 905],
    raw_suffix=[906],
    bos_token_id=1,
    prefix_length=None,
)
IDS = list(range(100, 120))


def plan(ids=IDS, protected=4, prefix_length=0, chunk_size=7, num_tokens=20, **options) -> list[ReplayPass]:
    context = RowContext(0, 0, num_tokens, ids, None, num_tokens, prefix_length, protected)
    return plan_replay(context, PROMPTS, chunk_size=chunk_size, **options)


def test_chunks_and_anchors_worked_by_hand():
    """Twenty tokens, four protected, chunks of seven: the second and third pass begin where the one before ended."""
    assert plan() == [
        ReplayPass([900, 906], (4, 11), (4, 11)),
        ReplayPass([901, 902, 108, 109, 110, 903, 906], (11, 18), (11, 18)),
        ReplayPass([901, 902, 115, 116, 117, 903, 906], (18, 20), (18, 20)),
    ]


def test_a_context_inside_the_chat_uses_the_chats_suffix():
    """With the chat prefix found, the answer is opened as the template opens it."""
    passes = plan(protected=6, prefix_length=6)
    assert passes[0] == ReplayPass([900, 904, 905], (6, 13), (6, 13))
    assert passes[1].prompt == [901, 902, 110, 111, 112, 903, 904, 905]


def test_an_anchor_never_reaches_into_the_prefix():
    """Chunks shorter than the anchor: it holds the replayed tokens there are, not the prefix; without ids none."""
    assert plan(chunk_size=2)[1].prompt == [901, 902, 104, 105, 903, 906]
    assert plan(chunk_size=2)[2].prompt == [901, 902, 105, 106, 107, 903, 906]
    assert [step.prompt for step in plan(ids=None)] == [[900, 906]] + [[901, 902, 903, 906]] * 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), st.integers(1, 25))
def test_every_pair_is_scored_exactly_once(protected, chunk_size):
    scored = [column for step in plan(protected=protected, chunk_size=chunk_size) for column in range(*step.scored)]
    assert scored == list(range(protected, 20))


@pytest.mark.parametrize(
    ("repeat", "fed", "fed_of_204"),
    [("first", (4, 5), (4, 24)), ("last", (19, 20), (184, 204)), ("prompt", (20, 20), (204, 204))],
)
def test_ablations_feed_a_part_and_score_everything(repeat, fed, fed_of_204):
    """The first tenth, the last tenth, or the prompt alone, in a single pass that scores every pair."""
    assert plan(repeat=repeat) == [ReplayPass([900, 906], fed, (4, 20))]
    assert plan(ids=None, num_tokens=204, repeat=repeat) == [ReplayPass([900, 906], fed_of_204, (4, 204))]


@pytest.mark.parametrize("repeat", REPEATS)
def test_what_is_planned_is_what_is_fed(model, repeat):
    """Through the press: the ids of each pass, at positions that continue after the context, in local replay too."""
    ids, fed = random_ids(60), []
    compressor, context = make_press(repeat=repeat, chunk_size=30).compressor(model), context_of(model, ids)
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append((kwargs["input_ids"], kwargs["position_ids"])), with_kwargs=True
    )
    scores = compressor.score(context)[0]
    passes = plan_replay(*context.rows(compressor.prompts, 4), compressor.prompts, chunk_size=30, repeat=repeat)
    assert len(fed) == len(passes) == (2 if repeat == "context" else 1)
    for (tokens, positions), step in zip(fed, passes, strict=True):
        assert tokens[0].tolist() == step.prompt + ids[0, slice(*step.fed)].tolist()
        assert positions[0].tolist() == list(range(60, 60 + tokens.shape[1]))
    assert torch.isfinite(scores[..., 4:]).all()


def test_what_is_repeated_decides_what_is_kept(model):
    scores = [scores_of(model, random_ids(100), repeat=repeat)[..., 4:] for repeat in REPEATS]
    assert all(not torch.allclose(a, b, atol=1e-3) for index, a in enumerate(scores) for b in scores[:index])


def test_chunks_of_a_local_replay_do_not_depend_on_each_other(model):
    ids = random_ids(100)
    other = torch.cat([ids[:, :52], random_ids(48, seed=9)], dim=1)
    scores = [scores_of(model, tokens, chunk_size=48) for tokens in (ids, other)]
    torch.testing.assert_close(scores[0][..., 4:52], scores[1][..., 4:52], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(scores[0][..., 52:], scores[1][..., 52:], atol=1e-2)


def test_equal_rows_are_replayed_once(model):
    """Beams and repeated rows hold the same context: one replay serves them all."""
    rows = torch.cat([random_ids(60, seed=seed) for seed in (0, 1, 0)])
    with counted_calls(model.model) as passes:
        cache = prefill(model, rows, make_press(ratio=0.3, chunk_size=30))
    assert len(passes) == 1 + 2 * 2
    lengths = cache.layers[0].head_lengths
    assert lengths[0].tolist() == lengths[2].tolist() != lengths[1].tolist()
