"""Writing a file so that whoever reads it finds the old one or the new one, whole."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """
    Write a text (in UTF-8) or bytes through a temporary file in the same folder.

    A failure leaves the old file and no temporary one. Permissions are those of any new file, by the process's umask.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    file = open(temporary, "xb")
    try:
        with file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink()
        raise
