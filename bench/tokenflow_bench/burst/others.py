"""What else computes on this machine during a run: it slows down what is measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["MAX_OTHERS", "Others", "group_cpu_s", "objection", "process_cpu_s"]

MAX_OTHERS = 0.25
"""Cores. A machine with nothing else to do spends a few hundredths of one."""
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_BUSY = (1, 2, 3, 6, 7, 8)
"""Fields of the first line of /proc/stat: user, nice, system, irq, softirq, and what the host took away."""


class Others:
    """From its making on. `own_cpu_s`: CPU seconds so far of all that belongs to the run."""

    def __init__(self, own_cpu_s: Callable[[], float]) -> None:
        self._own_cpu_s = own_cpu_s
        self._began = self._now()

    def cores(self) -> float:
        """How many cores' worth of time went to others, so far."""
        at, busy_s, own_s = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return max(busy_s - own_s, 0.0) / max(at, _TICK_S)

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), _busy_s(), self._own_cpu_s()


def objection(cores: float, *, most: float) -> str | None:
    """Why figures of a run beside so much else mean nothing; None if they do."""
    if cores <= most:
        return None
    return f"other programs took {cores:.2f} of a core meanwhile ({most:.2f} are allowed)"


def group_cpu_s(group: int) -> float:
    """CPU seconds of a process group so far, of those of its processes that still live."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return sum(process_cpu_s(pid) for pid in pids if _group(pid) == group)


def process_cpu_s(pid: int) -> float:
    """0 for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (ProcessLookupError, FileNotFoundError):
        return 0.0
    return _TICK_S * (int(fields[11]) + int(fields[12]))


def _busy_s() -> float:
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()
    return _TICK_S * sum(int(fields[column]) for column in _BUSY)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
