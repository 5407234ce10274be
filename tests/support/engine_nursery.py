"""Engines in a third of the time: forked from a process that has imported what SGLang imports.

The import takes ten seconds of CPU time in each of an engine's three processes. Here the modules of others
are imported once for all engines; SGLang's own and ours, which read the environment as they are imported,
once for the processes of an engine. All else is as with `tokenflow_engine.sglang.launch`.

Run by the engine's Python: ``python -m support.engine_nursery FD``, with a socket on which orders come.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import popen_fork
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["EngineNursery", "ForkedProcess"]

_IMPORTED = (
    "torch._inductor.compile_fx",
    "transformers.modeling_layers",
    "openai.types.responses",
    "fastapi",
)
"""Which bring all that takes long."""
_ORDER_BYTES = 1 << 17


class ForkedProcess:
    """An engine's main process, which another process has forked: what is used of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Zero when it has ended, however it did, else None."""
        return 0 if select.select([self._fd], [], [], 0.0)[0] else None

    def wait(self, timeout: float) -> int:
        """Wait for its end, `timeout` seconds at most. Raises `subprocess.TimeoutExpired`."""
        if not select.select([self._fd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"engine {self.pid}", timeout)
        return 0


class EngineNursery:
    """The process that forks engines. A context manager; started by its first engine."""

    def __init__(self, python: str, python_path: str) -> None:
        self._command = [python, "-m", "support.engine_nursery"]
        self._env = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._stack = contextlib.ExitStack()
        self._orders: socket.socket | None = None
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> EngineNursery:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def start(self, arguments: Sequence[str], *, env: Mapping[str, str], log: Path) -> ForkedProcess:
        """Fork an engine that leads a session of its own. `arguments` are SGLang's; its words go to `log`."""
        order = {"arguments": list(arguments), "env": dict(env), "log": str(log)}
        with self._one_at_a_time:
            orders = self._orders = self._orders or self._start()
            orders.send(json.dumps(order).encode())
            pid = orders.recv(_ORDER_BYTES)
        assert pid, "the nursery has ended; its last words are on standard error"
        return ForkedProcess(int(pid))

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            process = subprocess.Popen([*self._command, str(fd)], env=self._env, pass_fds=[fd])
        self._stack.enter_context(process)  # which waits for its end
        return self._stack.enter_context(ours)  # closed first: the end of orders ends it


def _serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each order. In that process: its order; in this one, after the last order, None."""
    with orders:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
        while data := orders.recv(_ORDER_BYTES):
            if (pid := os.fork()) == 0:
                order: dict[str, Any] = json.loads(data)
                return order
            orders.send(str(pid).encode())
    return None


def _become(order: dict[str, Any]) -> None:
    """What `subprocess.Popen` would have done for an engine, then the engine."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Path(order["log"]).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(order["env"])
    SpawnProcess._Popen = staticmethod(_Child)  # type: ignore[method-assign, assignment]
    from tokenflow_engine.sglang import launch

    launch.main(order["arguments"])


class _Child(popen_fork.Popen):
    """A process of an engine, as a copy of its main process, which has imported all it needs."""

    def _launch(self, process: BaseProcess) -> None:
        handler = signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # the main process' own
        super()._launch(process)  # type: ignore[misc]
        signal.signal(signal.SIGQUIT, handler)


def _main() -> None:
    from tokenflow_engine.sglang import cpu_compat

    cpu_compat.install()
    for name in _IMPORTED:
        importlib.import_module(name)
    title = importlib.import_module("setproctitle")
    title.getproctitle()  # now: it looks for its place beside the environment as it was given
    if order := _serve(socket.socket(fileno=int(sys.argv[1]))):
        _become(order)


if __name__ == "__main__":
    _main()
