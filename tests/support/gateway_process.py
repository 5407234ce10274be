"""The gateway as people run it: `tokenflow serve` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from support.real_engine import RealEngine, wait_until

__all__ = ["GatewayProcess"]


class GatewayProcess:
    """`tokenflow serve` in front of one engine. A context manager; `kill` and `start` may be repeated."""

    def __init__(self, engine: RealEngine, folder: Path) -> None:
        self._engine = engine
        self.port = _free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log_path = folder / "gateway.log"
        self._config = folder / "gateway.yaml"
        self._config.write_text(
            f"engines: [{{url: '{engine.base_url}', id: e, link: '{engine.link}'}}]\nport: {self.port}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> GatewayProcess:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end(signal.SIGTERM)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it is ready."""
        command = [sys.executable, "-m", "tokenflow_gateway.cli", "serve", "--config", str(self._config)]
        env = {**os.environ, "TOKENFLOW_LINK_SECRET": self._engine.secret}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        wait_until(self.is_ready, timeout_s=20, what="the gateway is ready")

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self._end(signal.SIGKILL)

    def is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log_path.read_text()
        with contextlib.suppress(OSError, urllib.error.URLError):
            return bool(self._get("/health/ready").status == 200)
        return False

    def engine(self) -> dict[str, Any]:
        """The engine as ``/admin/engines`` shows it."""
        shown: dict[str, Any] = json.load(self._get("/admin/engines"))["engines"][0]
        return shown

    def streams(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.load(self._get("/admin/streams"))["streams"]
        return listed

    def is_idle(self) -> bool:
        """Nothing is on record here, nothing queued or running in the engine."""
        engine = self.engine()
        return not self.streams() and (engine["running"], engine["waiting"]) == (0, 0)

    def metric(self, sample: str) -> float:
        """The value of one sample as Prometheus names it, labels included; 0 where there is none."""
        for line in self._get("/metrics").read().decode().splitlines():
            if line.startswith(f"{sample} "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def _get(self, path: str) -> Any:
        return urllib.request.urlopen(self.base_url + path, timeout=5)  # noqa: S310

    def _end(self, signum: int) -> None:
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait(40)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
