"""A real SGLang engine with the plugin, in its own process group, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from support.engine_nursery import EngineNursery, ForkedProcess

__all__ = ["EngineDiedError", "RealEngine", "engine_python", "tokenflow_home", "wait_until"]

_START_TIMEOUT_S = 180.0


class EngineDiedError(RuntimeError):
    """The engine ended, or did not become ready; the message carries the end of its log."""


def tokenflow_home() -> Path:
    """Where the engine's environment and the models are."""
    return Path(os.environ.get("TOKENFLOW_HOME") or Path.home() / ".cache" / "tokenflow")


def engine_python() -> str:
    """The interpreter of the engine's environment; ``TOKENFLOW_ENGINE_PYTHON`` names another."""
    given = os.environ.get("TOKENFLOW_ENGINE_PYTHON")
    path = Path(given) if given else tokenflow_home() / "engine" / "bin" / "python"
    if not path.exists():
        raise EngineDiedError(f"no engine at {path}: run `make test`, which installs it")
    return str(path)


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str, every_s: float = 0.02) -> None:
    """Poll `condition` until it holds; AssertionError with `what` when time is up."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(every_s)


class RealEngine:
    """One engine on a free port. Use as a context manager, or `start` and `stop` it.

    `link` is the endpoint gateways connect to and `secret` what they must know; everything the engine
    writes lies in its own temporary folder, `log_path` included.
    """

    def __init__(
        self,
        model: Path,
        *,
        args: Sequence[str] = (),
        env: dict[str, str] | None = None,
        module: str = "tokenflow_engine.sglang.launch",
        port: int | None = None,
        nursery: EngineNursery | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tokenflow-engine-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self.port = port or _free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.link = f"ipc://{folder}/link"
        self.secret = "engine-test-secret"
        self.log_path = folder / "engine.log"
        self._module = module
        self._arguments = [
            "--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port), *args,
        ]  # fmt: skip
        self._nursery = nursery
        self._env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",  # two threads that spin for each other starve when the machine is busy
            "PYTHONUNBUFFERED": "1",
            "TOKENFLOW_LINK": self.link,
            "TOKENFLOW_LINK_SECRET": self.secret,
            "TOKENFLOW_RUNTIME_DIR": str(folder),
            **(env or {}),
        }
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def __enter__(self) -> RealEngine:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the engine and wait until it takes requests. Raises `EngineDiedError` with its last words."""
        self._process = self._launched()
        try:
            wait_until(self._is_ready, timeout_s=_START_TIMEOUT_S, what="the engine is ready", every_s=0.2)
        except AssertionError as error:
            last_words = self.log()[-4000:]
            self.stop()
            raise EngineDiedError(f"{error}:\n{last_words}") from error
        except BaseException:
            self.stop()
            raise

    def _launched(self) -> subprocess.Popen[bytes] | ForkedProcess:
        if self._nursery is not None:
            return self._nursery.start(self._arguments, env=self._env, log=self.log_path)
        command = [engine_python(), "-m", self._module, *self._arguments]
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=self._env, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """Of the main process, which is also the number of the engine's process group."""
        assert self._process is not None
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the main process runs."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """All the engine has written."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def kill(self) -> None:
        """Kill every process of the engine at once (SIGKILL), as a crash of the machine would."""
        self._end(signal.SIGKILL, timeout_s=10.0)

    def stop(self) -> None:
        """Ask the engine to end, kill what is left after ten seconds, remove its folder."""
        if self.is_alive():
            self._end(signal.SIGTERM, timeout_s=10.0)
        self.kill()
        self._folder.cleanup()

    def _end(self, signum: int, *, timeout_s: float) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout_s)

    def _is_ready(self) -> bool:
        if not self.is_alive():
            raise EngineDiedError(f"the engine ended while starting:\n{self.log()[-4000:]}")
        try:
            with urllib.request.urlopen(f"{self.base_url}/ready", timeout=5.0) as answer:  # noqa: S310
                return bool(answer.status == 200) and self._has_warmed_up()
        except (OSError, urllib.error.URLError):
            return False

    def _has_warmed_up(self) -> bool:
        """`/ready` may say yes before the engine's own warm-up request has run."""
        return "The server is fired up and ready to roll" in self.log()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
