"""
Run kvpress's own, unmodified evaluation script with the presses of kvzip-press registered.

The script is in kvpress's source distribution alone, and needs packages of its own:

    pip download --no-binary kvpress --no-deps kvpress==0.5.5
    tar xf kvpress-0.5.5.tar.gz
    pip install "kvpress[eval]==0.5.5"
    python -m kvzip_press.eval.command.kvpress_evaluate kvpress-0.5.5/evaluation/evaluate.py \
        --press_name kvzip_press --compression_ratio 0.7 --model Qwen/Qwen3-8B --dataset ruler --data_dir 4096

All options are the script's own, but for `--data_folder FOLDER`: there the data set is read from, instead of from the
hub (`kvzip-eval export` writes such folders).
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

# The script's neighbour that names presses and data sets
REGISTRY = "evaluate_registry"


def register_presses(registry: dict) -> None:
    """Add the presses of kvzip-press to kvpress's registry, but for the one that needs head scores."""
    from ..presses.registry import PRESSES, is_ours, make_press
    from ..results.kvpress_format import registry_name

    ours = [name for name in PRESSES if is_ours(name) and name != "kvzip-head"]
    registry.update({registry_name(name): make_press(name, 0.5, None) for name in ours})


def main(argv: Sequence[str] | None = None) -> None:
    """Run kvpress's `evaluate.py`, whose path comes first, with the options behind it."""
    parser = argparse.ArgumentParser(
        "kvpress_evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("script", help="kvpress's evaluation/evaluate.py; its options follow")
    parser.add_argument("--data_folder", metavar="FOLDER", help="where the data set is read from (the hub)")
    arguments, its_options = parser.parse_known_args(argv)
    script = Path(arguments.script).resolve()
    if not (script.is_file() and script.with_name(f"{REGISTRY}.py").is_file()):
        parser.error(
            f"{arguments.script!r} is not kvpress's evaluation/evaluate.py: "
            "get it with `pip download --no-binary kvpress --no-deps kvpress==0.5.5` and unpack it"
        )
    # As for a script that is run: its neighbours are imported by their bare names
    sys.path.insert(0, str(script.parent))
    try:
        registry = importlib.import_module(REGISTRY)
    except ImportError as error:
        parser.error(f"{error}: pip install 'kvpress[eval]==0.5.5'")
    register_presses(registry.PRESS_REGISTRY)
    if arguments.data_folder is not None:
        registry.DATASET_REGISTRY.update(dict.fromkeys(registry.DATASET_REGISTRY, arguments.data_folder))
    sys.argv = [str(script), *its_options]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
