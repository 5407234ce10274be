"""A process that runs a command and leaves nothing of it behind.

``python -m tokenflow_gateway.local.warden --parent PID --grace SECONDS -- COMMAND...`` runs COMMAND in a
session of its own and exits with its code. When it is told to stop (SIGTERM), or when the process that
started it is gone, even by SIGKILL, it passes SIGTERM on to COMMAND, waits for the grace, and then kills
COMMAND and all its descendants: they are found because orphans fall to the nearest subreaper, which the
warden is. A second SIGTERM ends the grace. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

__all__ = ["warden_argv"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
AWAITED = {signal.SIGTERM, signal.SIGCHLD}
FAR_S = 3600.0


def warden_argv(argv: list[str], *, grace_s: float) -> list[str]:
    """The command line that runs `argv` under a warden of this process."""
    warden = [sys.executable, "-m", "tokenflow_gateway.local.warden"]
    return [*warden, "--parent", str(os.getpid()), "--grace", str(grace_s), "--", *argv]


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _start(argv: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
        os.execvp(argv[0], argv)  # noqa: S606  # the caller's command, as a list
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
    os._exit(127)


def _reap(pid: int) -> int | None:
    """Collect what has ended; the wait status of `pid` if it is among them."""
    found = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not ended:
            return found
        if ended == pid:
            found = status


def _children() -> list[int]:
    parent = os.getpid()
    return [int(entry.name) for entry in Path("/proc").iterdir() if _parent_of(entry) == parent]


def _parent_of(entry: Path) -> int | None:
    if not entry.name.isdigit():
        return None
    try:
        stat = (entry / "stat").read_text()
    except OSError:  # it ended meanwhile
        return None
    # pid (name) state ppid ...: the name may contain anything, parentheses too
    return int(stat.rpartition(")")[2].split()[1])


def _kill_descendants() -> None:
    """Kill layer by layer: the children of what was killed fall to us, the subreaper."""
    while children := _children():
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _watch(pid: int, *, grace_s: float) -> int | None:
    """Wait until `pid` ends; None if its grace is over first."""
    deadline: float | None = None
    while True:
        status = _reap(pid)
        if status is not None:
            return status
        timeout_s = FAR_S if deadline is None else deadline - time.monotonic()
        if timeout_s <= 0:
            return None
        received = signal.sigtimedwait(AWAITED, timeout_s)
        if received is None or received.si_signo != signal.SIGTERM:
            continue
        if deadline is not None:
            return None
        deadline = time.monotonic() + grace_s
        os.kill(pid, signal.SIGTERM)


def main() -> NoReturn:
    """Run one command; see the module's description."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which tells us
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != options.parent:  # it died before the signal was set
        sys.exit(1)
    status = _watch(_start(options.argv), grace_s=options.grace)
    _kill_descendants()
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
