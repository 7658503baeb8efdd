"""The command `kvzip-press`: ask a document with and without compression, and score a model's heads."""

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import __version__

# Nothing here imports torch before a command runs: `--help` and wrong arguments are then answered at once.
if TYPE_CHECKING:
    from . import CompressedContext

PROG = "kvzip-press"
LEVELS = ("pair", "pair-layer", "pair-uniform", "head")
SCORERS = ("kvzip", "kvzip-plus", "logit", "l2")
REPLAYS = ("full", "local")
QUANTIZATIONS = ("int8", "int4")
DTYPES = ("float32", "bfloat16", "float16")
# Compressed and asked before anything is timed
WARM_UP = "The museum in the harbour opens at ten. The director has counted nine ships today, and keeps a list."


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all errors of the command are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROG}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; those of the process by default.

    Returns
    -------
    int
        The exit status: 0, 2 after an error that the user can mend, 130 when interrupted.
    """
    arguments = _build_parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return readers_gone()
    except (ValueError, OSError, ImportError) as error:
        print(f"{PROG}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def readers_gone() -> int:
    """
    End quietly when whoever read the output has seen enough, as `head` has.

    Returns
    -------
    int
        The exit status.
    """
    # The interpreter flushes what is left at its end: it must have somewhere to go.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROG, description="Compress the KV cache of a transformers model with KVzip.")
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
        description="Answer questions about a text from the full cache and from the compressed one, side by side.",
    )
    ask.add_argument("document", metavar="DOCUMENT", type=Path, help="a text file in UTF-8")
    ask.add_argument(
        "-q", "--question", dest="questions", action="append", required=True, type=_question, metavar="QUESTION",
        help="a question about the document; repeat it for more",
    )  # fmt: skip
    ask.add_argument(
        "--ratio", type=_ratio, default=0.3, metavar="R", help="fraction of the context's KV pairs to keep (0.3)"
    )
    ask.add_argument(
        "--level",
        choices=LEVELS,
        help="what the budget is shared over: the whole model, layers, heads, or whole heads (pair)",
    )
    ask.add_argument("--head-scores", type=Path, metavar="FILE", help="scores made by `kvzip-press heads score`")
    ask.add_argument("--scorer", choices=SCORERS, help="how the importance of a pair is measured (kvzip)")
    ask.add_argument(
        "--replay",
        choices=REPLAYS,
        help="what the replayed tokens attend to: the whole cache, or their own chunk (local)",
    )
    ask.add_argument("--chunk-size", type=_positive, metavar="N", help="tokens of the context replayed at once (512)")
    ask.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="store the kept pairs in 8 or 4 bits a number (not quantised)"
    )
    ask.add_argument("--max-new-tokens", type=_positive, default=48, metavar="N", help="longest answer, in tokens (48)")
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
    parser.add_argument("--threads", type=_positive, metavar="N", help="CPU threads to use")


def _ratio(text: str) -> float:
    value = _number(text, float)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
    return value


def _positive(text: str) -> int:
    value = _number(text, int)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _number(text: str, kind: Any) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from error


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


def _window(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _check_length(model: Any, tokenizer: Any, text: str, questions: list[str], max_new_tokens: int) -> None:
    """Refuse a document that leaves no room for the longest question and its answer, before any computation."""
    from .context import QUESTION_SEPARATOR
    from .prompts import chat_affixes

    window = _window(model)
    prefix, suffix = chat_affixes(tokenizer)

    def count(content: str) -> int:
        return len(tokenizer.encode(content, add_special_tokens=False, verbose=False))

    longest = max(count(QUESTION_SEPARATOR + question + suffix) for question in questions)
    needed = count(prefix + text) + longest + max_new_tokens
    if window is not None and needed > window:
        raise ValueError(
            f"the document is too long by {needed - window} tokens: with a question and an answer of up to "
            f"{max_new_tokens} tokens it takes {needed}, and the model's context holds {window}; shorten it"
        )


def _ask(arguments: argparse.Namespace) -> int:
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
        return 0
    from .pretrained.terminal import format_report

    print(format_report(report, shutil.get_terminal_size((100, 24)).columns))
    return 0


def _compare(arguments: argparse.Namespace, text: str) -> dict[str, Any]:
    """Build both caches, ask them the questions in turn, and collect answers and measures."""
    from tqdm.auto import tqdm

    with tqdm(total=4 + 2 * len(arguments.questions), desc="loading the model", leave=False, disable=None) as bar:

        def step(description: str) -> None:
            bar.update()
            bar.set_description(description)

        model, tokenizer = _load(arguments)
        press = _build_press(arguments, tokenizer)
        _check_length(model, tokenizer, text, arguments.questions, arguments.max_new_tokens)

        from . import CompressedContext

        step("kernels (the first time they are compiled)")
        _warm_up(model, tokenizer, press)
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
        measure["decode_seconds_per_token"] = _median_seconds(pair[name] for pair in answers)
    return {
        "version": __version__,
        "model": arguments.model or "SmolLM2-135M-Instruct",
        "document": str(arguments.document),
        "ratio": arguments.ratio,
        "quantization": arguments.quantization,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "tokens": compressed.num_tokens,
        **measures,
        "answers": answers,
    }


def _warm_up(model: Any, tokenizer: Any, press: Any) -> None:
    """Have kernels compiled before anything is timed."""
    from . import CompressedContext

    CompressedContext.compress(model, tokenizer, WARM_UP, press=press).answer("How many ships?", max_new_tokens=2)


def _build_press(arguments: argparse.Namespace, tokenizer: Any) -> Any:
    from . import HeadScores, KVzipPress

    options = {name: getattr(arguments, name) for name in ("level", "scorer", "replay", "chunk_size", "quantization")}
    options = {name: value for name, value in options.items() if value is not None}
    if arguments.head_scores is not None:
        options["head_scores"] = HeadScores.load(arguments.head_scores)
    return KVzipPress(ratio=arguments.ratio, tokenizer=tokenizer, **options)


def _answer(context: "CompressedContext", question: str, max_new_tokens: int) -> dict[str, Any]:
    answer = context.answer(question, max_new_tokens=max_new_tokens)
    seconds = answer.seconds_per_token
    return {
        "text": answer.text,
        "tokens": len(answer.token_ids),
        "prefill_seconds": answer.prefill_seconds,
        "seconds_per_token": seconds if math.isfinite(seconds) and len(answer.token_ids) > 1 else None,
    }


def _measures(context: "CompressedContext") -> dict[str, Any]:
    return {
        "bytes": context.nbytes,
        "kept_fraction": context.kept_fraction,
        "prefill_seconds": context.prefill_seconds,
        "compress_seconds": context.compress_seconds,
    }


def _median_seconds(answers: Iterable[dict[str, Any]]) -> float | None:
    # The median: the first answer may pay for a cold cache.
    times = [answer["seconds_per_token"] for answer in answers if answer["seconds_per_token"] is not None]
    return statistics.median(times) if times else None


def _score(arguments: argparse.Namespace) -> int:
    from .head_scores import HeadScores

    texts = [_read_text(path) for path in arguments.texts]
    HeadScores.check_target(arguments.output)
    model, tokenizer = _load(arguments)
    for path, text in zip(arguments.texts, texts, strict=True):
        window = _window(model)
        count = len(tokenizer.encode(text, verbose=False))
        if window is not None and count > window:
            raise ValueError(f"{path} is too long by {count - window} tokens: the model's context holds {window}")

    HeadScores.from_text(model, tokenizer, texts, progress=True).save(arguments.output)
    print(f"scores of {arguments.model or 'SmolLM2-135M-Instruct'} written to {arguments.output}", file=sys.stderr)
    return 0
