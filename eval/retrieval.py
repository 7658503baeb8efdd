"""Several facts hidden in a context, asked for after the compression, which never sees the questions."""

import argparse
import hashlib
from typing import Any

import kvpress
from tqdm import tqdm
from transformers import DynamicCache

from .arguments import add_context_arguments, make_parser, prepare
from .facts import FactContext, make_context
from .metrics.registry import includes
from .presses.budget import fit_budget, kept_pairs, protected_length
from .presses.registry import make_press, variants
from .results.record import Record, RecordLog, format_table, mean_and_error, provenance, write_report
from .tasks.essays import load_texts

QUESTION = "\n\nQuestion: {question}"
COLUMNS = {
    "press": "",
    "ratio": ".2f",
    "kept": ".3f",
    "right": "d",
    "questions": "d",
    "rate": ".3f",
    "error": ".3f",
    "of full": ".3f",
    "minus full": "+.3f",
    "its error": ".3f",
}


def ask(
    pipe: kvpress.KVPressTextGenerationPipeline, context: FactContext, name: str, ratio: float, max_new_tokens: int
) -> Record:
    """Compress one context with one press and ask all its questions through kvpress's pipeline.

    Returns
    -------
    dict
        `kept` and `total` pairs, `answers`, and whether each is `right`.
    """
    config = pipe.model.config.get_text_config()
    num_layers, num_heads = config.num_hidden_layers, config.num_key_value_heads
    prompt = pipe.preprocess(context.text, [""], answer_prefix="", max_context_length=int(1e10))
    length = prompt["context_ids"].shape[1]
    press = make_press(name, ratio, pipe.tokenizer)
    fit_budget(press, ratio, length, protected_length(pipe.tokenizer), num_layers, num_heads)

    cache = DynamicCache()
    questions = [QUESTION.format(question=fact.question) for fact in context.facts]
    output = pipe(context.text, questions=questions, press=press, cache=cache, max_new_tokens=max_new_tokens)
    right = [includes(answer, fact.answer) for answer, fact in zip(output["answers"], context.facts, strict=True)]
    return {
        "kept": kept_pairs(pipe.model, cache),
        "total": length * num_layers * num_heads,
        "answers": output["answers"],
        "right": right,
    }


def summarise(records: dict[tuple[str, float], list[Record]]) -> list[Record]:
    """One row a press and ratio; errors are standard errors over contexts, whose questions are not independent."""
    full = records.get(("full", 1.0))
    full_rates = [_rate(record) for record in full] if full else None
    rows = []
    for (name, ratio), of_variant in records.items():
        rates = [_rate(record) for record in of_variant]
        rate, error = mean_and_error(rates)
        row: Record = {
            "press": name,
            "ratio": ratio,
            "kept": sum(r["kept"] for r in of_variant) / sum(r["total"] for r in of_variant),
            "right": sum(sum(r["right"]) for r in of_variant),
            "questions": sum(len(r["right"]) for r in of_variant),
            "rate": rate,
            "error": error,
        }
        if full_rates:
            difference, its_error = mean_and_error([a - b for a, b in zip(rates, full_rates, strict=True)])
            full_rate = sum(full_rates) / len(full_rates)
            share = rate / full_rate if full_rate else None
            row |= {"of full": share, "minus full": difference, "its error": its_error}
        rows.append(row)
    return rows


def _rate(record: Record) -> float:
    return sum(record["right"]) / len(record["right"])


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__, ["full", "kvzip", "kvpress-kvzip", "snapkv"], [0.3])
    add_context_arguments(parser, contexts=24, min_tokens=700, max_tokens=1600)
    parser.add_argument("--facts", type=int, default=8, help="facts hidden in a context")
    parser.add_argument("--asked", type=int, default=4, help="facts asked of those hidden")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="length of an answer")
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

    with tqdm(total=arguments.contexts * len(to_measure), desc="retrieval", unit="press") as bar:
        for seed in range(arguments.seed, arguments.seed + arguments.contexts):
            context = make_context(
                seed,
                texts,
                count_tokens,
                arguments.facts,
                arguments.asked,
                arguments.min_tokens,
                arguments.max_tokens,
            )
            for name, ratio in to_measure:
                key = _key(origin, context, name, ratio, arguments.max_new_tokens)
                record = log.get(key) or log.add(key, ask(pipe, context, name, ratio, arguments.max_new_tokens))
                records[name, ratio].append(record)
                bar.update()

    rows = summarise(records)
    print(format_table(rows, COLUMNS))
    flat = [{"press": name, "ratio": ratio, **r} for (name, ratio), of_variant in records.items() for r in of_variant]
    write_report(arguments.output, provenance=origin, table=rows, records=flat)


def _key(origin: Record, context: FactContext, name: str, ratio: float, max_new_tokens: int) -> dict[str, Any]:
    asked = context.text + "".join(QUESTION.format(question=fact.question) for fact in context.facts)
    return {
        "script": "retrieval",
        **{part: origin[part] for part in ("model", "dtype", "device", "attention", "versions", "commit")},
        "press": name,
        "ratio": ratio,
        "seed": context.seed,
        "text": hashlib.sha256(asked.encode()).hexdigest()[:16],
        "max_new_tokens": max_new_tokens,
    }


if __name__ == "__main__":
    main()
