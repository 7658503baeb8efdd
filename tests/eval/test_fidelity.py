import json
import math

import kvpress
import pytest
import torch

from kvzip_press.eval.run import fidelity
from kvzip_press.eval.run.fidelity import (
    answer_logprobs,
    compare,
    greedy_answer,
    layer_lengths,
    measure_press,
    prefill,
)


@pytest.fixture
def ids(tiny):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 250, (1, n), generator=generator) for n in (90, 7)]


def test_comparison_by_hand():
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.6, 0.4]]).log()
    result = compare(reference, other, torch.tensor([[0, 1]]))
    kl = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75) + 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    assert result["tokens"] == 2
    assert result["kl"] == pytest.approx(kl, abs=1e-6)
    assert result["agree"] == 1
    assert result["loss"] == pytest.approx(-math.log(0.25) - math.log(0.4), abs=1e-6)
    assert result["full_loss"] == pytest.approx(-math.log(0.5) - math.log(0.1), abs=1e-6)


def test_excluded_tokens_add_nothing():
    reference = torch.tensor([[1.0, 0.0]]).log()
    assert compare(reference, reference, torch.tensor([[0]]))["kl"] == 0


def test_teacher_forcing_agrees_with_decoding_and_leaves_the_cache_as_it_was(tiny, ids):
    model, _ = tiny
    context, question = ids
    cache = prefill(model, context, None)
    lengths = layer_lengths(cache)
    answer = greedy_answer(model, cache, question, context.shape[1], 6)
    assert layer_lengths(cache) == lengths
    logprobs = answer_logprobs(model, cache, question, answer, context.shape[1])
    assert layer_lengths(cache) == lengths
    assert torch.equal(logprobs.argmax(dim=-1), answer[0])

    whole = torch.cat([context, question, answer[:, :-1]], dim=1)
    with torch.no_grad():
        expected = model(whole).logits[0, -answer.shape[1] :].log_softmax(dim=-1)
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)


def test_positions_go_on_from_the_original_length_when_the_cache_is_shorter(tiny, ids):
    model, _ = tiny
    context, question = ids
    cache = prefill(model, context, kvpress.KnormPress(compression_ratio=0.5))
    assert layer_lengths(cache) == [45] * 3
    at = answer_logprobs(model, cache, question, question, context.shape[1])
    elsewhere = answer_logprobs(model, cache, question, question, 45)
    assert layer_lengths(cache) == [45] * 3
    assert not torch.allclose(at, elsewhere, atol=1e-4)


@pytest.mark.parametrize(("name", "ratio"), [("full", 1.0), ("kvzip", 1.0), ("kvpress-kvzip", 1.0)])
def test_a_cache_that_lost_nothing_has_no_divergence(tiny, ids, name, ratio):
    model, tokenizer = tiny
    context, question = ids
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    references = fidelity._reference(model, context, [question], 5)
    record = measure_press(pipe, context, [question], references, name, ratio)
    assert record["kl"] == pytest.approx(0, abs=0 if name == "full" else 1e-5)
    assert record["agree"] == record["tokens"]
    assert record["kept"] == record["total"]


def test_compression_is_seen(tiny, ids):
    model, tokenizer = tiny
    context, question = ids
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    references = fidelity._reference(model, context, [question], 5)
    record = measure_press(pipe, context, [question], references, "knorm", 0.3)
    assert record["kl"] > 1e-5 and record["kept"] < record["total"]


def test_run_writes_a_report_and_resumes(model_dir, text_dir, tmp_path, monkeypatch, capsys):
    options = ["--model", str(model_dir), "--text-dir", str(text_dir), "--contexts", "2", "--min-tokens", "200"]
    options += ["--max-tokens", "400", "--presses", "full", "kvzip", "knorm", "--ratios", "0.5", "--answer-tokens", "3"]
    options += ["--resume", str(tmp_path / "log.jsonl"), "--output", str(tmp_path / "out.json")]
    fidelity.main(options)
    first = capsys.readouterr().out
    full, kvzip, knorm = json.loads((tmp_path / "out.json").read_text())["table"]
    assert full["KL"] == 0 and full["top-1"] == 1 and full["added loss"] == 0
    assert kvzip["KL"] > 0 and knorm["KL"] > 0

    monkeypatch.setattr(fidelity, "measure_press", lambda *args: pytest.fail("measured again"))
    fidelity.main(options)
    assert capsys.readouterr().out == first
