"""Where a measurement comes from: the machine, the versions, the commit."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")


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


def installed_version(package: str) -> str | None:
    """Version of an installed package, None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def package_commit() -> str | None:
    """Commit of this package's own checkout, see :func:`commit_of`."""
    return commit_of(Path(__file__).resolve())


def commit_of(file: Path) -> str | None:
    """
    The commit that ``file`` belongs to, with ``-dirty`` behind it if tracked files were changed; None if to none.

    A package installed somewhere inside of another repository does not belong to that one.
    """
    try:
        _git(file, "ls-files", "--error-unmatch", file.name)
        return _git(file, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(file: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=file.parent, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()
