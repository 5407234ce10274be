"""One engine per socket file: ZeroMQ itself would bind over the file of an engine that is alive."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TextIO

from tokenflow_engine.control.endpoint import EndpointError

__all__ = ["claim"]


def claim(endpoint: str) -> TextIO | None:
    """Take the lock file beside an ``ipc://`` socket; None for endpoints that lie in no file.

    Held until the returned file is closed, or the process ends, however it does. Raises `EndpointError` if
    another process holds it, or if there cannot be such a file.
    """
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@"):
        return None
    lock = _open(Path(f"{path}.lock"), endpoint)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise EndpointError(
            f"another engine listens at {endpoint}: give this one its own --port, or another endpoint in "
            "TOKENFLOW_LINK"
        ) from error
    return lock


def _open(path: Path, endpoint: str) -> TextIO:
    try:
        return path.open("a")
    except OSError as error:
        raise EndpointError(
            f"cannot listen at {endpoint} ({error.strerror}): name another endpoint in TOKENFLOW_LINK"
        ) from error
