"""How far a compressed cache's predictions are from the full cache's, along the full cache's own answers."""

import copy
import math

import kvpress
import pytest
import torch
from eval_harness import EvaluationRun, ToyTask
from harness import prefill

from kvzip_press.eval.presses.budget import fit_budget
from kvzip_press.eval.presses.registry import make_press
from kvzip_press.eval.run.answer import answer_logprobs, compare, greedy_answer
from kvzip_press.eval.tasks.base import Request


def test_comparison_by_hand():
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.6, 0.4]]).log()
    result = compare(reference, other, torch.tensor([[0, 1]]))
    kl = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75) + 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    loss, full_loss = -math.log(0.25) - math.log(0.4), -math.log(0.5) - math.log(0.1)
    expected = {"kl": kl / 2, "agreement": 0.5, "loss": loss / 2, "added_loss": (loss - full_loss) / 2}
    assert result == pytest.approx({"answer_tokens": 2, **expected}, abs=1e-6)


def test_excluded_tokens_add_nothing():
    reference = torch.tensor([[1.0, 0.0]]).log()
    assert compare(reference, reference, torch.tensor([[0]]))["kl"] == 0


def test_positions_go_on_from_the_original_length_when_the_cache_is_shorter(toy):
    model, _ = toy
    context, question = torch.randint(2, 250, (2, 90), generator=torch.Generator().manual_seed(1)).split(1)
    cache = prefill(model, context, kvpress.KnormPress(compression_ratio=0.5))
    at, elsewhere = (answer_logprobs(model, cache, question, question, position) for position in (90, 45))
    assert [cache.get_seq_length(index) for index in range(3)] == [45] * 3
    assert not torch.allclose(at, elsewhere, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("press", "ratio"),
    [("kvzip", 0.4), ("knorm", 0.4), ("adakv-snapkv", 0.4), ("kvpress-kvzip", 0.4), ("kvzip", 1.0), ("full", 1.0)],
)
def test_fidelity_is_what_it_is_by_hand(toy, tmp_path, press, ratio):
    """From kvpress's prompts, forward passes over the whole text, and a press that keeps as many pairs as ours."""
    model, tokenizer = toy
    task = ToyTask("fidelity", metric="fidelity")
    run = EvaluationRun(toy, tmp_path)
    (cell,) = run(task, presses=(press,), ratios=(ratio,), prompt="kvpress", limit=1).records
    # A press that compresses during the prefill leaves no full cache to compare with
    assert run.engine.effort.prefills == (1 if press in ("kvzip", "full") else 2)
    (sample,) = task.load(Request(limit=1))
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    asked = [f"\n\n{question.text}" for question in sample.questions]
    prompt = pipe.preprocess(sample.context, asked, answer_prefix="It is", max_context_length=int(1e10))
    context = prompt["context_ids"]
    length = context.shape[1]
    full = prefill(model, context)
    answers = [torch.tensor([greedy_answer(model, full, ids, length, 4)]) for ids in prompt["questions_ids"]]
    read = [torch.cat([ids, a[:, :-1]], dim=1) for ids, a in zip(prompt["questions_ids"], answers, strict=True)]
    whole = [model(torch.cat([context, ids], dim=1)).logits[0] for ids in read]
    # kvpress's masks stay on the model until the next prefill
    compressor = make_press(press, ratio, tokenizer)
    fit_budget(compressor, ratio, length, 1 + len("<user>"), 3, 2)
    cache = prefill(model, context, compressor)
    for answer, ids, logits, record in zip(answers, read, whole, cell["questions"], strict=True):
        count = answer.shape[1]
        reference = logits[-count:].log_softmax(-1)
        assert torch.equal(reference.argmax(-1), answer[0])
        positions = torch.arange(length, length + ids.shape[1])[None]
        logits = model(input_ids=ids, past_key_values=copy.deepcopy(cache), position_ids=positions).logits[0]
        other = logits[-count:].log_softmax(-1)
        kl = torch.nn.functional.kl_div(other, reference, log_target=True, reduction="batchmean")
        losses = [float(torch.nn.functional.nll_loss(each, answer[0])) for each in (other, reference)]
        assert record["prediction"] == tokenizer.decode(answer[0], skip_special_tokens=True)
        agreement = float((other.argmax(-1) == reference.argmax(-1)).float().mean())
        figures = {"kl": float(kl), "agreement": agreement, "loss": losses[0], "added_loss": losses[0] - losses[1]}
        assert record["details"] == pytest.approx({"answer_tokens": count, **figures}, rel=1e-3, abs=1e-5)
        assert record["score"] == record["details"]["agreement"]
        assert record["details"]["kl"] > 1e-5 if ratio < 1 else abs(record["details"]["kl"]) < 1e-6
    assert ratio < 1 or cell["score"] == 1
