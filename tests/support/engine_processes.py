"""A real engine seen from outside, by its processes: who they are, where they listen, what they cost."""

from __future__ import annotations

import os
from pathlib import Path

from support.real_engine import RealEngine

__all__ = ["cpu_s", "is_running", "listening_addresses", "processes", "the_process"]

_LISTENS = "0A"


def processes(engine: RealEngine) -> dict[int, str]:
    """Command lines of the engine's processes by pid: its session, which the main process leads."""
    table = {int(entry.name): _read(entry / "cmdline") for entry in Path("/proc").glob("[0-9]*")}
    return {pid: line for pid, line in table.items() if _session(pid) == engine.pid}


def the_process(engine: RealEngine, part: str) -> int:
    """The one that SGLang calls `part`: ``scheduler``, ``detokenizer``."""
    (found,) = [pid for pid, line in processes(engine).items() if line.startswith(f"sglang::{part}")]
    return found


def is_running(pid: int) -> bool:
    """Whether the process is there, and not as a zombie."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] not in ([], ["Z"])


def cpu_s(pid: int) -> float:
    """CPU time the process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def listening_addresses(engine: RealEngine) -> set[str]:
    """Local IP addresses, in hexadecimal as the kernel shows them, at which the engine listens."""
    mine = {socket for pid in processes(engine) for socket in _sockets(pid)}
    tables = [_read(Path("/proc/net") / name).splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1].partition(":")[0] for row in rows if row[3] == _LISTENS and f"socket:[{row[9]}]" in mine}


def _sockets(pid: int) -> list[str]:
    return [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]


def _session(pid: int) -> int | None:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[3]) if fields else None


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:  # it ended meanwhile
        return ""
