"""What decides a result and is not in the case: device, threads, versions, commit."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")
_MEMORY_INFO = Path("/proc/meminfo")


def environment(device: torch.device) -> dict[str, str]:
    """Columns that are the same in every row of a run."""
    return {
        "device": device_name(device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numba": _version("numba"),
        "python": platform.python_version(),
        "commit": commit(Path(__file__).resolve()),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    """The product's name, as far as the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


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


def commit(file: Path) -> str:
    """
    The commit that ``file`` belongs to, with ``-dirty`` behind it if tracked files were changed, or ``"unknown"``.

    A package installed somewhere inside of another repository does not belong to that one.
    """
    try:
        _git(file, "ls-files", "--error-unmatch", file.name)
        return _git(file, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(file: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=file.parent, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
