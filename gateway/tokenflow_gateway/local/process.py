"""Child processes whose output goes to a log file and that end with us, whatever happens to us."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenflow_gateway.local.logfile import open_log
from tokenflow_gateway.local.warden import warden_argv

__all__ = ["Process", "Runner", "log_tail", "run_logged"]

POLL_S = 0.2
KILL_WAIT_S = 3.0

Runner = Callable[[list[str], Path, Callable[[str], None]], int]
"""Runs a command to its end: (argv, log to append to, called with the newest line of output) -> exit code."""


class Process:
    """A running command. The owner calls `stop`; without that it ends when this process does."""

    def __init__(
        self, argv: list[str], *, log: Path, grace_s: float, environ: Mapping[str, str] | None = None
    ) -> None:
        self._grace_s = grace_s
        self._asked = False
        with open_log(log) as output:
            self._popen = subprocess.Popen(
                warden_argv(argv, grace_s=grace_s),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """How it ended (128 + n for signal n), or None while it runs."""
        return self._popen.poll()

    def terminate(self) -> None:
        """Ask it to end within its grace. Does not wait, and asks only once: a second time ends the grace."""
        if not self._asked:
            self._asked = True
            self._popen.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End it and all it started: asks, waits for the grace, kills. Ctrl-C meanwhile ends the grace."""
        try:
            self.terminate()
            self._popen.wait(self._grace_s + KILL_WAIT_S)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            self._popen.send_signal(signal.SIGTERM)
            self._popen.wait(KILL_WAIT_S)


def run_logged(argv: list[str], log: Path, on_line: Callable[[str], None]) -> int:
    """The real `Runner`. An exception (Ctrl-C) while it waits ends the command."""
    process = Process(argv, log=log, grace_s=2.0, environ={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        while (code := process.exit_code()) is None:
            on_line(_newest(log_tail(log, lines=20)))
            time.sleep(POLL_S)
    except BaseException:
        process.stop()
        raise
    return code


def _newest(lines: list[str]) -> str:
    """What the running command last said: nothing from before its own line, which begins with a dollar."""
    said = ""
    for line in lines:
        if line.startswith("$ "):
            said = ""
        elif not line.startswith("WARNING"):
            said = line.strip()
    return said


def log_tail(log: Path, *, lines: int) -> list[str]:
    """The last non-empty lines of a log file, oldest first."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 16_384))
        text = file.read().decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
