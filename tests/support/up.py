"""`tokenflow up` in a process of its own, with everything that comes of it under watch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["END_S", "READY_S", "Run", "wait_until"]

ROOT = Path(__file__).parents[2]
READY_S = 180.0
END_S = 10.0
"""How long an end may take, by the requirement."""
_DEAF = 'trap "" INT; exec "$@"'
"""How a shell without job control starts what runs in the background: Ctrl-C must work all the same."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s:.0f} s: {what}"
        time.sleep(0.1)


class Run:
    """One `tokenflow up` on free ports, and all processes that come of it.

    They are known by a mark in their environment, and, because some overwrite that with a title, by having
    been seen as descendants.
    """

    def __init__(self, directory: Path, *, port: int | None = None) -> None:
        self.port = port or free_port()
        self.engine_port = free_port()
        self.output = directory / "output"
        self._mark = uuid.uuid4().hex
        self._seen: set[tuple[str, str]] = set()
        environ = {
            **os.environ,
            "TOKENFLOW_HOME": os.environ.get("TOKENFLOW_HOME", str(ROOT / ".tokenflow")),
            "TOKENFLOW_RUNTIME_DIR": str(directory / "run"),
            "TOKENFLOW_PORT": str(self.port),
            "TOKENFLOW_ENGINE_PORT": str(self.engine_port),
            "TOKENFLOW_TEST_MARK": self._mark,
        }
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                ["sh", "-c", _DEAF, "sh", sys.executable, "-m", "tokenflow_gateway.cli", "up"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environ,
                process_group=0,  # so that a test can do what Ctrl-C does: signal the foreground group
            )

    def said(self) -> str:
        return self.output.read_text()

    def wait_until_ready(self) -> None:
        def settled() -> bool:
            return "TokenFlow is ready" in self.said() or self.process.poll() is not None

        wait_until(settled, timeout_s=READY_S, what=f"not ready:\n{self.said()}")
        assert self.process.poll() is None, self.said()

    def alive(self) -> list[str]:
        """Command lines of what is left of this run."""
        return [_command(entry) for entry in self._processes()]

    def pid_of(self, words: str) -> int:
        """The one process of this run, wardens aside, whose command line has these words."""
        lines = {int(entry.name): _command(entry) for entry in self._processes()}
        (found,) = [pid for pid, line in lines.items() if words in line and "local.warden" not in line]
        return found

    def kill_rest(self) -> None:
        for entry in self._processes():
            os.kill(int(entry.name), signal.SIGKILL)
        self.process.wait()

    def _processes(self) -> list[Path]:
        table = {entry: _stat(entry) for entry in Path("/proc").glob("[0-9]*")}
        living = {entry: stat for entry, stat in table.items() if stat is not None and stat.state != "Z"}
        family = {str(self.process.pid)}
        for entry, stat in sorted(living.items(), key=lambda item: int(item[1].started_at)):
            if entry.name in family or stat.parent in family or self._mark in _read(entry / "environ"):
                family.add(entry.name)
                self._seen.add((entry.name, stat.started_at))
        return [entry for entry, stat in living.items() if (entry.name, stat.started_at) in self._seen]


class Stat(NamedTuple):
    state: str
    parent: str
    started_at: str


def _stat(entry: Path) -> Stat | None:
    fields = _read(entry / "stat").rpartition(")")[2].split()
    return Stat(fields[0], fields[1], fields[19]) if fields else None


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _command(entry: Path) -> str:
    return _read(entry / "cmdline").replace("\0", " ")
