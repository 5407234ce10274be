"""Starts the workers, starts one again that died, and passes signals on.

Workers are forked from a process that has loaded everything and runs nothing (no thread, no event loop), so
that a new one serves within milliseconds. Each is a process group of its own: Ctrl-C reaches this process
alone, once. When this process dies, they shut down as on SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import structlog

from tokenflow_gateway.local.restarts import RestartBudget

__all__ = ["Supervisor"]

_log = structlog.stdlib.get_logger("tokenflow.workers")

_ENDS = {signal.SIGTERM, signal.SIGINT}
_SIGNALS = {*_ENDS, signal.SIGCHLD, signal.SIGHUP}
_LONG_S = 3600.0
_IN_ORDER = {0, -signal.SIGTERM}
"""How a worker ends that was asked to: uvicorn passes the signal on to itself."""


class Supervisor:
    """Runs `serve(index)` in `count` processes; its result is a worker's exit code."""

    def __init__(
        self,
        count: int,
        serve: Callable[[int], int],
        *,
        budget: Callable[[], RestartBudget] = RestartBudget,
        on_hangup: Callable[[], bool] = lambda: False,
    ) -> None:
        """`budget`: of restarts, for each worker. `on_hangup`: whether they are to hear SIGHUP."""
        self._serve = serve
        self._on_hangup = on_hangup
        self._pids: dict[int, int] = {}
        """Index by process."""
        self._due: dict[int, float] = dict.fromkeys(range(count), 0.0)
        """When a worker is to be started."""
        self._budgets = [budget() for _ in range(count)]
        self._asked = False
        self._failed = False

    def run(self) -> int:
        """Until SIGTERM or Ctrl-C, or a worker that keeps dying, and all have ended. Returns an exit code."""
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._leash, self._hand = os.pipe()
        try:
            while self._pids or self._due:
                self._start_due()
                self._wait()
                self._reap()
        finally:
            os.close(self._leash)
            os.close(self._hand)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
        return 1 if self._failed else 0

    def _start_due(self) -> None:
        now = time.monotonic()
        for index in [index for index, due in self._due.items() if due <= now]:
            del self._due[index]
            self._start(index)

    def _wait(self) -> None:
        within_s = min(self._due.values(), default=time.monotonic() + _LONG_S) - time.monotonic()
        came = signal.sigtimedwait(_SIGNALS, max(0.0, within_s))
        if came is None:
            return
        if came.si_signo in _ENDS:
            self._ask_all()
        elif came.si_signo == signal.SIGHUP and self._on_hangup():
            for pid in self._pids:
                os.kill(pid, signal.SIGHUP)

    def _ask_all(self) -> None:
        """To end in stages. A second time ends the grace."""
        self._asked = True
        self._due.clear()
        for pid in self._pids:
            os.kill(pid, signal.SIGTERM)

    def _reap(self) -> None:
        for pid in list(self._pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._ended(self._pids.pop(pid), os.waitstatus_to_exitcode(status))

    def _ended(self, index: int, code: int) -> None:
        if self._asked:
            self._failed |= code not in _IN_ORDER
            return
        pause_s = self._budgets[index].spend(time.monotonic())
        if pause_s is None:
            _log.error("a worker keeps ending: the gateway ends", index=index, code=code)
            self._failed = True
            self._ask_all()
            return
        _log.error("a worker has ended, its streams with it", index=index, code=code, again_in_s=pause_s)
        self._due[index] = time.monotonic() + pause_s

    # ---- a worker's process ----------------------------------------------------------------------

    def _start(self, index: int) -> None:
        pid = os.fork()
        if pid:
            self._pids[pid] = index
            _log.info("worker started", index=index, pid=pid)
            return
        code = 1
        try:
            code = self._become(index)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001 - nothing of this process's own may run on in its child
            _log.exception("a worker failed", index=index)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _become(self, index: int) -> int:
        os.setpgid(0, 0)
        os.close(self._hand)
        structlog.contextvars.bind_contextvars(worker=index)
        threading.Thread(target=_end_with, args=(self._leash,), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
        return self._serve(index)


def _end_with(leash: int) -> None:
    """Shut down once nobody holds the other end."""
    os.read(leash, 1)
    os.kill(os.getpid(), signal.SIGTERM)
