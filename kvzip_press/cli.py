"""The command `kvzip-press`: ask a document with and without compression, and score a model's heads."""

import argparse
import contextlib
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .arguments import CommandParser, positive, ratio
from .terminal import format_report

# Nothing here imports torch before a command runs: `--help` and wrong arguments are then answered at once.
if TYPE_CHECKING:
    from . import CompressedContext

PROG = "kvzip-press"
PACKAGED = "SmolLM2-135M-Instruct"
DTYPES = ("float32", "bfloat16", "float16")
# Options of `KVzipPress`, which knows their values and refuses others
PRESS_OPTIONS = {
    "level": "what the budget is shared over: the whole model, layers, heads, or whole heads (pair)",
    "scorer": "how the importance of a pair is measured (kvzip)",
    "replay": "what the replayed tokens attend to: the whole cache, or their own chunk (local)",
    "quantization": "store the kept pairs in 8 or 4 bits a number (not quantised)",
}
# Compressed and asked before anything is timed
WARM_UP = "The museum in the harbour opens at ten. The director has counted nine ships today, and keeps a list."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, see :meth:`kvzip_press.arguments.CommandParser.run`."""
    return _build_parser().run(argv)


def _build_parser() -> CommandParser:
    parser = CommandParser(prog=PROG, description="Compress the KV cache of a transformers model with KVzip.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_ask(commands)
    heads = commands.add_parser("heads", help="scores of heads, computed once for a model")
    _add_score(heads.add_subparsers(required=True, metavar="COMMAND"))
    return parser


def _add_ask(commands: Any) -> None:
    ask = commands.add_parser(
        "ask",
        help="ask a document questions, with the full and with the compressed cache",
        description="Answer questions about a text from the full cache and from the compressed one, side by side. "
        "An unknown level, scorer, replay or quantization is answered with those that there are.",
    )
    ask.add_argument("document", metavar="DOCUMENT", type=Path, help="a text file in UTF-8")
    ask.add_argument(
        "-q", "--question", dest="questions", action="append", required=True, type=_question, metavar="QUESTION",
        help="a question about the document; repeat it for more",
    )  # fmt: skip
    ask.add_argument(
        "--ratio", type=ratio, default=0.3, metavar="R", help="fraction of the context's KV pairs to keep (0.3)"
    )
    for name, about in PRESS_OPTIONS.items():
        ask.add_argument(f"--{name}", help=about)
    ask.add_argument("--head-scores", type=Path, metavar="FILE", help="scores made by `kvzip-press heads score`")
    ask.add_argument("--chunk-size", type=positive, metavar="N", help="tokens of the context replayed at once (512)")
    ask.add_argument("--max-new-tokens", type=positive, default=48, metavar="N", help="longest answer, in tokens (48)")
    ask.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    _add_model_options(ask)
    ask.set_defaults(command=_ask)


def _add_score(commands: Any) -> None:
    score = commands.add_parser(
        "score",
        help="compute context-independent scores of a model's heads from sample texts",
        description="Score the KV heads of a model on sample texts, for `kvzip-press ask --level head --head-scores`.",
    )
    score.add_argument("texts", metavar="TEXT", nargs="+", type=Path, help="text files in UTF-8")
    score.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="the safetensors file to write")
    _add_model_options(score)
    score.set_defaults(command=_score)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="NAME_OR_PATH", help="a folder or a hub name; by default the packaged SmolLM2-135M-Instruct"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of the weights (float32)")
    parser.add_argument("--device", default="cpu", help="for instance cpu or cuda:0 (cpu)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads to use")


def _question(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: write what to ask about the document")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError("is not UTF-8: check the terminal's encoding") from error
    return text.strip()


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ValueError(f"no such file: {path}") from error
    except IsADirectoryError as error:
        raise ValueError(f"{path} is a folder: name a text file in it") from error
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}): convert it, for instance with iconv") from error
    if not text.strip():
        raise ValueError(f"{path} is empty: name a file with text")
    return text


def _load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    import torch
    from transformers.utils import logging

    from .pretrained.load import load_model

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    return load_model(arguments.model, dtype=getattr(torch, arguments.dtype), device=arguments.device)


def _check_length(model: Any, tokenizer: Any, text: str, questions: list[str], max_new_tokens: int) -> None:
    """Refuse a document that leaves no room for the longest question and its answer, before any computation."""
    from .context import context_ids, longest_context, question_ids

    window = longest_context(model)
    longest = max(question_ids(tokenizer, question).shape[1] for question in questions)
    needed = context_ids(tokenizer, text).shape[1] + longest + max_new_tokens
    if window is not None and needed > window:
        raise ValueError(
            f"the document is too long by {needed - window} tokens: with a question and an answer of up to "
            f"{max_new_tokens} tokens it takes {needed}, and the model's context holds {window}; shorten it"
        )


def _ask(arguments: argparse.Namespace) -> None:
    text = _read_text(arguments.document).strip()
    if (arguments.level == "head") != (arguments.head_scores is not None):
        raise ValueError(f"--level head and --head-scores FILE go together; `{PROG} heads score` makes the file")
    if arguments.head_scores is not None and not arguments.head_scores.is_file():
        raise ValueError(f"no such file: {arguments.head_scores}; `{PROG} heads score` makes one")
    # In JSON mode stdout carries the object alone, whatever the libraries print.
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        report = _compare(arguments, text)
    if arguments.json:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        print(format_report(report, shutil.get_terminal_size((100, 24)).columns))


def _compare(arguments: argparse.Namespace, text: str) -> dict[str, Any]:
    """Build both caches, ask them the questions in turn, and collect answers and measures."""
    from tqdm.auto import tqdm

    with tqdm(total=4 + 2 * len(arguments.questions), desc="loading the model", leave=False, disable=None) as bar:

        def step(description: str) -> None:
            bar.update()
            bar.set_description(description)

        from . import CompressedContext

        press = _build_press(arguments)
        model, tokenizer = _load(arguments)
        _check_length(model, tokenizer, text, arguments.questions, arguments.max_new_tokens)
        step("kernels (the first time they are compiled)")
        CompressedContext.compress(model, tokenizer, WARM_UP, press=press).ask("How many ships?", max_new_tokens=2)
        step("prefill")
        full = CompressedContext.full(model, tokenizer, text)
        step("compression")
        compressed = CompressedContext.compress(model, tokenizer, text, press=press)
        # Before the answers, whose tokens take memory of their own.
        measures = {"full": _measures(full), "compressed": _measures(compressed)}
        answers: list[dict[str, Any]] = []
        for question in arguments.questions:
            pair: dict[str, Any] = {"question": question}
            for name, context in (("full", full), ("compressed", compressed)):
                step("answers")
                pair[name] = _answer(context, question, arguments.max_new_tokens)
            answers.append(pair)
        bar.update()

    for name, measure in measures.items():
        # The median: the first answer may pay for a cold cache.
        times = [pair[name]["seconds_per_token"] for pair in answers if pair[name]["seconds_per_token"] is not None]
        measure["decode_seconds_per_token"] = statistics.median(times) if times else None
    return {
        "version": __version__,
        "model": arguments.model or PACKAGED,
        "document": str(arguments.document),
        "ratio": arguments.ratio,
        "quantization": arguments.quantization,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "tokens": compressed.num_tokens,
        **measures,
        "answers": answers,
    }


def _build_press(arguments: argparse.Namespace) -> Any:
    from . import HeadScores, KVzipPress

    options = {name: getattr(arguments, name) for name in (*PRESS_OPTIONS, "chunk_size")}
    options = {name: value for name, value in options.items() if value is not None}
    if arguments.head_scores is not None:
        options["head_scores"] = HeadScores.load(arguments.head_scores)
    return KVzipPress(ratio=arguments.ratio, **options)


def _answer(context: "CompressedContext", question: str, max_new_tokens: int) -> dict[str, Any]:
    answer = context.answer(question, max_new_tokens=max_new_tokens)
    return {
        "text": answer.text,
        "tokens": len(answer.token_ids),
        "prefill_seconds": answer.prefill_seconds,
        "seconds_per_token": answer.seconds_per_token if len(answer.token_ids) > 1 else None,
    }


def _measures(context: "CompressedContext") -> dict[str, Any]:
    names = ("kept_fraction", "prefill_seconds", "compress_seconds")
    return {"bytes": context.nbytes, **{name: getattr(context, name) for name in names}}


def _score(arguments: argparse.Namespace) -> None:
    from .context import longest_context
    from .head_scores import HeadScores

    texts = [_read_text(path) for path in arguments.texts]
    HeadScores.check_target(arguments.output)
    model, tokenizer = _load(arguments)
    window = longest_context(model)
    for path, text in zip(arguments.texts, texts, strict=True):
        count = len(tokenizer.encode(text, verbose=False))
        if window is not None and count > window:
            raise ValueError(f"{path} is too long by {count - window} tokens: the model's context holds {window}")

    HeadScores.from_text(model, tokenizer, texts, progress=True).save(arguments.output)
    print(f"scores of {arguments.model or PACKAGED} written to {arguments.output}", file=sys.stderr)
