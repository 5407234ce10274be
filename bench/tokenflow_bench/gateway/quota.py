"""A share of a core for each process, by the bandwidth control of Linux (cgroups 1; needs root)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["NoQuota", "limited"]

_PERIOD_US = 5_000
_ROOT = Path("/sys/fs/cgroup/cpu")


class NoQuota(Exception):
    """Shares cannot be given here, and why."""


@contextmanager
def limited(pids: Iterable[int], *, cores: float) -> Iterator[None]:
    """Each of these processes, with all its threads, has so much of a core until the block ends.

    Raises `NoQuota`.
    """
    groups: list[Path] = []
    try:
        try:
            for pid in pids:
                groups.append(_ROOT / f"tokenflow-bench-{pid}")
                _limit(groups[-1], pid, round(cores * _PERIOD_US))
        except OSError as error:
            raise NoQuota(f"no share of a core can be given: {error}") from error
        yield
    finally:
        for group in groups:
            _give_back(group)


def _limit(group: Path, pid: int, quota_us: int) -> None:
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    (group / "cgroup.procs").write_text(str(pid))


def _give_back(group: Path) -> None:
    """Its process goes on without a limit."""
    with suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            (_ROOT / "cgroup.procs").write_text(pid)
        group.rmdir()
