"""Who runs where: the engine's scheduler on cores of its own, everything else on the others.

With two cores that is one for the model and one for the engine's HTTP, the gateway and the readers.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["Cores", "pin", "pin_engine", "this_process"]

_ALLOWED = sorted(os.sched_getaffinity(0))
"""Before this process is pinned."""
_SCHEDULER = b"scheduler"


class Cores:
    """The cores this process may use: one for each of the model's `threads`, the others for all else.

    Where none is left, all else shares the last one.
    """

    def __init__(self, *, threads: int = 1) -> None:
        self.threads = threads
        self.all = frozenset(_ALLOWED)
        self.model = frozenset(_ALLOWED[:threads])
        self.others = frozenset(_ALLOWED[threads:] or _ALLOWED[-1:])

    def words(self) -> str:
        """For the report."""
        places = f"scheduler on core {_words(self.model)}, everything else on {_words(self.others)}"
        return f"{places}; {self.threads} OpenMP thread{'s' * (self.threads > 1)}"


def pin(pid: int, cores: frozenset[int]) -> None:
    """All threads of a process, and what they will start."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def this_process(cores: frozenset[int]) -> None:
    """All threads of ours."""
    pin(os.getpid(), cores)


def pin_engine(group: int, cores: Cores) -> None:
    """An engine's processes: those of a process group. Raises `RuntimeError` without a scheduler."""
    pids = [pid for pid in map(_pid, Path("/proc").iterdir()) if pid and _group(pid) == group]
    schedulers = [pid for pid in pids if _SCHEDULER in _command(pid)]
    if not schedulers:
        raise RuntimeError(f"no scheduler among the engine's processes {pids}")
    for pid in pids:
        pin(pid, cores.model if pid in schedulers else cores.others)


def _pid(path: Path) -> int | None:
    return int(path.name) if path.name.isdecimal() else None


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _words(cores: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
