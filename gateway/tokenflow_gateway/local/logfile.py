"""Log files that only this user can read: they may quote what people asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_log"]


def open_log(path: Path, *, afresh: bool = False) -> BinaryIO:
    """Open a log to append to it, emptied first if `afresh`. Makes its directory where there is none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if afresh else 0)
    file = os.fdopen(os.open(path, flags, 0o600), "ab")
    os.fchmod(file.fileno(), 0o600)  # it may be there already, made with other rights
    return file
