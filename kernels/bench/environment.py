"""What decides a result and is not in the case: device, threads, versions, commit."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from pathlib import Path

import torch

from ..provenance import device_name, installed_version, package_commit

_MEMORY_INFO = Path("/proc/meminfo")


def environment(device: torch.device) -> dict[str, str]:
    """Columns that are the same in every row of a run."""
    return {
        "device": device_name(device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "triton": installed_version("triton") or "",
        "numba": installed_version("numba") or "",
        "python": platform.python_version(),
        "commit": package_commit() or "unknown",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def available_bytes(device: torch.device) -> int | None:
    """Memory of the device that can still be allocated, None if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = _MEMORY_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024 * kilobytes[0] if kilobytes else None
