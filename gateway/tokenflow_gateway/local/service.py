"""A server that `tokenflow up` runs as a child: its command, its log, its readiness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.probe import is_ready
from tokenflow_gateway.local.process import Process, log_tail

__all__ = ["Service"]

LINE_CHARACTERS = 200
"""Of a log line that is shown to a person; some engines print their whole configuration in one."""


@dataclass(kw_only=True)
class Service:
    """One server. The owner calls `start` and, on every path, `stop`."""

    name: str
    argv: list[str]
    log: Path
    ready_url: str
    grace_s: float
    """How long it may take to end by itself."""
    environ: Mapping[str, str] | None = None
    """Its whole environment; this process's own by default."""
    _process: Process | None = field(default=None, init=False)

    def start(self) -> None:
        """Start it (again); its output is appended to the log."""
        self._process = Process(self.argv, log=self.log, grace_s=self.grace_s, environ=self.environ)

    def exit_code(self) -> int | None:
        """How it ended, or None while it runs."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.exit_code()

    def is_ready(self) -> bool:
        """Whether it answers as ready now."""
        return is_ready(self.ready_url)

    def require_running(self) -> None:
        """Raise `SetupError` with the end of its log if it has ended."""
        code = self.exit_code()
        if code is not None:
            raise SetupError(self.obituary(code))

    def obituary(self, code: int) -> str:
        """What to tell a person when it has ended with `code`."""
        tail = "".join(f"\n  {line[:LINE_CHARACTERS]}" for line in log_tail(self.log, lines=12))
        return f"The {self.name} ended with code {code}. The end of {self.log}:{tail}"

    def terminate(self) -> None:
        """Ask it to end; does not wait."""
        if self._process is not None:
            self._process.terminate()

    def stop(self) -> None:
        """End it and everything it started."""
        if self._process is not None:
            self._process.stop()
