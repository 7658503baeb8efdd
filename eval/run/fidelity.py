"""How far a compressed cache's predictions are from the full cache's, along the full cache's own greedy answers."""

import argparse
import hashlib
import random
from typing import Any

import kvpress
import torch
from torch.nn.functional import log_softmax
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from ..arguments import add_context_arguments, make_parser, prepare
from ..presses.budget import fit_budget, kept_pairs, protected_length
from ..presses.registry import make_press, variants
from ..results.record import Record, RecordLog, format_table, mean_and_error, provenance, write_report
from ..tasks.essays import draw_passage, load_texts
from ..tasks.fidelity import QUESTIONS

COLUMNS = {
    "press": "",
    "ratio": ".2f",
    "kept": ".3f",
    "tokens": "d",
    "KL": ".4f",
    "KL error": ".4f",
    "top-1": ".3f",
    "loss": ".3f",
    "added loss": "+.3f",
}


@torch.no_grad()
def prefill(model: PreTrainedModel, context_ids: torch.Tensor, press: kvpress.BasePress | None) -> Cache:
    """Read a context into a new cache, compressed by the press unless it is None."""
    cache = DynamicCache()
    if press is None:
        model.model(input_ids=context_ids, past_key_values=cache)
        return cache
    with press(model):
        model.model(input_ids=context_ids, past_key_values=cache)
    return cache


@torch.no_grad()
def greedy_answer(
    model: PreTrainedModel, cache: Cache, question_ids: torch.Tensor, context_length: int, max_new_tokens: int
) -> torch.Tensor:
    """Continue a question greedily to an end token or `max_new_tokens`, and remove it from the cache again.

    Returns
    -------
    torch.Tensor
        The answer's tokens, its end token included, shape (1, answer_length).
    """
    eos = model.generation_config.eos_token_id
    stops = eos if isinstance(eos, list) else [eos]
    lengths = layer_lengths(cache)
    ids, position, answer = question_ids, context_length, []
    for _ in range(max_new_tokens):
        logits = _forward(model, cache, ids, position)
        position += ids.shape[1]
        ids = logits[:, -1:].argmax(dim=-1)
        answer.append(ids)
        if ids.item() in stops:
            break
    crop(cache, lengths)
    return torch.cat(answer, dim=1)


@torch.no_grad()
def answer_logprobs(
    model: PreTrainedModel, cache: Cache, question_ids: torch.Tensor, answer_ids: torch.Tensor, context_length: int
) -> torch.Tensor:
    """Log-probabilities at each answer token, all fed in one forward pass that is removed from the cache again.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    cache : Cache
        Full or compressed cache of the context.
    question_ids, answer_ids : torch.Tensor
        Shape (1, question_length) and (1, answer_length).
    context_length : int
        Original length of the context, where positions go on.

    Returns
    -------
    torch.Tensor
        Shape (answer_length, vocabulary_size), float32.
    """
    lengths = layer_lengths(cache)
    logits = _forward(model, cache, torch.cat([question_ids, answer_ids[:, :-1]], dim=1), context_length)
    crop(cache, lengths)
    return log_softmax(logits[0, -answer_ids.shape[1] :].float(), dim=-1)


def _forward(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, position: int) -> torch.Tensor:
    # Explicit positions: a press may have shortened the cache.
    position_ids = torch.arange(position, position + ids.shape[1], device=ids.device).unsqueeze(0)
    return model(input_ids=ids, past_key_values=cache, position_ids=position_ids).logits


def layer_lengths(cache: Cache) -> list[int]:
    """Length of each layer, to be restored by `crop`."""
    return [cache.get_seq_length(i) for i in range(len(cache))]


def crop(cache: Cache, lengths: list[int]) -> None:
    """Cut each layer back to a length, the way kvpress's pipeline removes an answer."""
    for layer, length in zip(cache.layers, lengths, strict=True):
        layer.keys = layer.keys[:, :, :length]
        layer.values = layer.values[:, :, :length]


def compare(reference: torch.Tensor, other: torch.Tensor, answer_ids: torch.Tensor) -> dict[str, float]:
    """Sums over the answer tokens of what two caches predict.

    Parameters
    ----------
    reference, other : torch.Tensor
        Log-probabilities of the full and of the other cache, shape (answer_length, vocabulary_size).
    answer_ids : torch.Tensor
        Shape (1, answer_length).

    Returns
    -------
    dict
        `tokens`, `kl` in nats, `agree` (tokens with the same most likely token), `loss` of the other cache and
        `full_loss` on the answer, all summed.
    """
    # Tokens that the reference excludes (probability 0) add nothing, where 0 * inf would be nan.
    terms = torch.where(reference.isneginf(), 0.0, reference.exp() * (reference - other))
    picked = answer_ids[0].unsqueeze(-1)
    return {
        "tokens": answer_ids.shape[1],
        "kl": float(terms.sum()),
        "agree": int((reference.argmax(dim=-1) == other.argmax(dim=-1)).sum()),
        "loss": -float(other.gather(1, picked).sum()),
        "full_loss": -float(reference.gather(1, picked).sum()),
    }


def measure_press(
    pipe: kvpress.KVPressTextGenerationPipeline,
    context_ids: torch.Tensor,
    questions_ids: list[torch.Tensor],
    references: list[tuple[torch.Tensor, torch.Tensor]],
    name: str,
    ratio: float,
) -> Record:
    """Compress one context with one press and compare it to the full cache on all questions.

    Parameters
    ----------
    pipe : kvpress.KVPressTextGenerationPipeline
        Holds the model and its tokenizer.
    context_ids : torch.Tensor
        Shape (1, context_length).
    questions_ids : list of torch.Tensor
        Shape (1, question_length) each.
    references : list of tuple
        For each question the full cache's answer and its log-probabilities.
    name, ratio
        As in `make_press`.

    Returns
    -------
    dict
        `kept` and `total` pairs, and the sums of `compare` over all questions.
    """
    model = pipe.model
    config = model.config.get_text_config()
    num_layers, num_heads = config.num_hidden_layers, config.num_key_value_heads
    length = context_ids.shape[1]
    press = make_press(name, ratio, pipe.tokenizer)
    fit_budget(press, ratio, length, protected_length(pipe.tokenizer), num_layers, num_heads)
    cache = prefill(model, context_ids, press)
    record: Record = {"kept": kept_pairs(model, cache), "total": length * num_layers * num_heads}
    for question_ids, (answer_ids, reference) in zip(questions_ids, references, strict=True):
        other = answer_logprobs(model, cache, question_ids, answer_ids, length)
        for part, value in compare(reference, other, answer_ids).items():
            record[part] = record.get(part, 0) + value
    return record


def summarise(records: dict[tuple[str, float], list[Record]]) -> list[Record]:
    """One row a press and ratio: means over all answer tokens, and the standard error of the KL over contexts."""
    rows = []
    for (name, ratio), of_variant in records.items():
        total = {part: sum(record[part] for record in of_variant) for part in of_variant[0]}
        rows.append(
            {
                "press": name,
                "ratio": ratio,
                "kept": total["kept"] / total["total"],
                "tokens": total["tokens"],
                "KL": total["kl"] / total["tokens"],
                "KL error": mean_and_error([record["kl"] / record["tokens"] for record in of_variant])[1],
                "top-1": total["agree"] / total["tokens"],
                "loss": total["loss"] / total["tokens"],
                "added loss": (total["loss"] - total["full_loss"]) / total["tokens"],
            }
        )
    return rows


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__, ["kvzip", "kvpress-kvzip", "snapkv"], [0.3])
    add_context_arguments(parser, contexts=12, min_tokens=500, max_tokens=1000)
    parser.add_argument("--answer-tokens", type=int, default=24, help="length of the full cache's answers")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the measurement and print its table."""
    arguments = parse_arguments(argv)
    model, tokenizer = prepare(arguments)
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    texts = load_texts(arguments.text_dir)
    log = RecordLog(arguments.resume)
    origin = provenance(model, arguments)
    to_measure = variants(arguments.presses, arguments.ratios)
    records: dict[tuple[str, float], list[Record]] = {variant: [] for variant in to_measure}

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    with tqdm(total=arguments.contexts * len(to_measure), desc="fidelity", unit="press") as bar:
        for seed in range(arguments.seed, arguments.seed + arguments.contexts):
            rng = random.Random(seed)
            least = rng.randint(arguments.min_tokens, max(arguments.min_tokens, arguments.max_tokens - 100))
            text = " ".join(draw_passage(texts, rng, count_tokens, least, arguments.max_tokens))
            keys = {variant: _key(origin, text, seed, *variant, arguments.answer_tokens) for variant in to_measure}
            missing = [variant for variant, key in keys.items() if log.get(key) is None]
            if missing:
                context_ids, questions_ids = _tokenise(pipe, text)
                references = _reference(model, context_ids, questions_ids, arguments.answer_tokens)
            for variant, key in keys.items():
                record = log.get(key)
                if record is None:
                    record = log.add(key, measure_press(pipe, context_ids, questions_ids, references, *variant))
                records[variant].append(record)
                bar.update()

    rows = summarise(records)
    print(format_table(rows, COLUMNS))
    flat = [{"press": name, "ratio": ratio, **r} for (name, ratio), of_variant in records.items() for r in of_variant]
    write_report(arguments.output, provenance=origin, table=rows, records=flat)


def _tokenise(pipe: kvpress.KVPressTextGenerationPipeline, text: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    questions = [f"\n\n{question}" for question in QUESTIONS]
    prompt = pipe.preprocess(text, questions, answer_prefix="", max_context_length=int(1e10))
    device = pipe.model.device
    return prompt["context_ids"].to(device), [ids.to(device) for ids in prompt["questions_ids"]]


def _reference(
    model: PreTrainedModel, context_ids: torch.Tensor, questions_ids: list[torch.Tensor], answer_tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cache = prefill(model, context_ids, None)
    length = context_ids.shape[1]
    references = []
    for question_ids in questions_ids:
        answer_ids = greedy_answer(model, cache, question_ids, length, answer_tokens)
        references.append((answer_ids, answer_logprobs(model, cache, question_ids, answer_ids, length)))
    return references


def _key(origin: Record, text: str, seed: int, name: str, ratio: float, answer_tokens: int) -> dict[str, Any]:
    asked = text + "".join(QUESTIONS)
    return {
        "script": "fidelity",
        **{part: origin[part] for part in ("model", "dtype", "device", "attention", "versions", "commit")},
        "press": name,
        "ratio": ratio,
        "seed": seed,
        "text": hashlib.sha256(asked.encode()).hexdigest()[:16],
        "answer_tokens": answer_tokens,
    }


if __name__ == "__main__":
    main()
