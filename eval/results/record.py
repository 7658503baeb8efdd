"""Where records come from."""

import argparse
import platform
from datetime import datetime, timezone
from typing import Any

import torch

from ...kernels.provenance import device_name, installed_version, package_commit

Record = dict[str, Any]


def provenance(model: Any, arguments: argparse.Namespace) -> Record:
    """Everything that decides a result and is not in the records: versions, commit, model, options, machine."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": package_commit(),
        "versions": {name: installed_version(name) for name in ("kvzip-press", "kvpress", "transformers", "torch")},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": device_name(model.device) if model.device.type == "cuda" else model.device.type,
        "threads": torch.get_num_threads(),
        "model": model.config.name_or_path,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "arguments": {name: _plain(value) for name, value in vars(arguments).items() if not callable(value)},
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | list | tuple | None) else str(value)
