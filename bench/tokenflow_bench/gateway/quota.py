"""A share of a core for each process, by the bandwidth control of Linux (cgroups; needs root)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["NoQuota", "limited"]

_PERIOD_US = 5_000
_V1 = Path("/sys/fs/cgroup/cpu")
_V2 = Path("/sys/fs/cgroup")


class NoQuota(Exception):
    """Shares cannot be given here, and why."""


@contextmanager
def limited(pids: Iterable[int], *, cores: float) -> Iterator[None]:
    """Each of these processes, with all its threads, has so much of a core until the block ends.

    Raises `NoQuota`.
    """
    groups: list[Path] = []
    root = _V1 if (_V1 / "cpu.cfs_quota_us").exists() or (_V1 / "tasks").exists() else _V2
    try:
        try:
            for pid in pids:
                groups.append(root / f"tokenflow-bench-{pid}")
                _limit(groups[-1], pid, round(cores * _PERIOD_US))
        except OSError as error:
            raise NoQuota(f"no share of a core can be given: {error}") from error
        yield
    finally:
        for group in groups:
            _give_back(group, root)


def _limit(group: Path, pid: int, quota_us: int) -> None:
    group.mkdir()
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    (group / "cgroup.procs").write_text(str(pid))


def _give_back(group: Path, root: Path) -> None:
    """Its process goes on without a limit."""
    with suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(pid)
        group.rmdir()
