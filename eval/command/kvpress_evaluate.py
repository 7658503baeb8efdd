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

import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

REMEDY = "get it with `pip download --no-binary kvpress --no-deps kvpress==0.5.5` and unpack it"


def register_presses(registry: dict) -> list[str]:
    """
    Add the presses of kvzip-press to kvpress's registry.

    Returns
    -------
    list of str
        Their names there.
    """
    from ... import KVzipPress
    from ..presses.registry import PRESSES, PressOptions, is_ours
    from ..results.kvpress_format import registry_name

    added = []
    for name, kind in PRESSES.items():
        if not is_ours(name) or name == "kvzip-head":
            continue
        press = kind.make(0.5, PressOptions(tokenizer=None))
        assert isinstance(press, KVzipPress)
        registry[registry_name(name)] = press
        added.append(registry_name(name))
    return added


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the script.

    Parameters
    ----------
    argv : sequence of str, optional
        Path of kvpress's `evaluate.py`, then its options.

    Returns
    -------
    int
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    try:
        script = check_script(arguments.pop(0))
        data_folder = _take_option(arguments, "--data_folder")
        # As for a script that is run: its neighbours are imported by their bare names
        sys.path.insert(0, str(script.parent))
        registry = importlib.import_module("evaluate_registry")
    except ValueError as error:
        print(f"kvpress_evaluate: error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"kvpress_evaluate: error: {error}: pip install 'kvpress[eval]==0.5.5'", file=sys.stderr)
        return 2
    register_presses(registry.PRESS_REGISTRY)
    if data_folder is not None:
        for name in registry.DATASET_REGISTRY:
            registry.DATASET_REGISTRY[name] = data_folder
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
    return 0


def check_script(path: str) -> Path:
    """
    Return the path of kvpress's evaluation script.

    Raises
    ------
    ValueError
        If it is not there.
    """
    script = Path(path).resolve()
    if not script.is_file() or not (script.parent / "evaluate_registry.py").is_file():
        raise ValueError(f"{path!r} is not kvpress's evaluation/evaluate.py: {REMEDY}")
    return script


def _take_option(arguments: list[str], name: str) -> str | None:
    """Remove an option from the arguments and return its value."""
    for index, argument in enumerate(arguments):
        if argument == name:
            if index + 1 == len(arguments):
                raise ValueError(f"{name} needs a folder")
            del arguments[index]
            return arguments.pop(index)
        if argument.startswith(f"{name}="):
            del arguments[index]
            return argument.partition("=")[2]
    return None


if __name__ == "__main__":
    sys.exit(main())
