"""The processes under measurement: engine, gateway, nginx; and what the system says they use."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Program", "find_nginx", "gateway", "get_json", "nginx", "replay_engine"]

_START_S = 20.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Program:
    """A running program that answers HTTP at `url`."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self._process = process
        self._log = log

    @property
    def cpu_s(self) -> float:
        """CPU time of the process so far, user and system, in seconds; ticks of 10 ms."""
        fields = self._proc("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S

    @property
    def waited_s(self) -> float:
        """How long its main thread was ready to run and had no core, in seconds (schedstat)."""
        return int(self._proc("schedstat").split()[1]) / 1e9

    @property
    def resident_bytes(self) -> int:
        """Memory that is really there (RSS)."""
        return int(self._proc("statm").split()[1]) * _PAGE_BYTES

    def check_running(self) -> None:
        """Raises `RuntimeError` with the end of its log if it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self._process.args!r} ended:\n{self._log.read_text()[-2000:]}")

    def _proc(self, name: str) -> str:
        return Path(f"/proc/{self._process.pid}/{name}").read_text()


@contextmanager
def replay_engine(folder: Path, *, rate: float, cpus: Sequence[int] | None = None) -> Iterator[Program]:
    """The recorded engine, every answer at `rate` tokens per second."""
    port = _free_port()
    command = [sys.executable, "-m", "tokenflow_bench.replay", f"--rate={rate}", f"--port={port}"]
    with _running("engine", command, port=port, path="/ready", folder=folder, cpus=cpus) as program:
        yield program


@contextmanager
def gateway(
    folder: Path,
    *,
    engine: Program,
    cpus: Sequence[int] | None = None,
    module: str = "tokenflow_gateway.cli",
) -> Iterator[Program]:
    """`tokenflow serve` in front of one engine without plugin; `module` may be a variant of its command."""
    port = _free_port()
    values = {
        "engines": [{"url": engine.url, "id": "replay", "link": "off"}],
        "port": port,
        "cors_origins": ["*"],
        "shutdown_grace_s": 0,
        "log_level": "warning",
    }
    config = folder / "gateway.yaml"
    config.write_text(json.dumps(values))  # JSON is YAML
    command = [sys.executable, "-m", module, "serve", f"--config={config}"]
    with _running("gateway", command, port=port, path="/health/ready", folder=folder, cpus=cpus) as program:
        yield program


_NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log warn; worker_processes 1; {user}
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/nginx-body; proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi; uwsgi_temp_path {folder}/nginx-uwsgi;
  scgi_temp_path {folder}/nginx-scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass {url};
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $http_host;
      proxy_buffering off;
      proxy_read_timeout 300s;
    }}
  }}
}}
"""


def find_nginx() -> str | None:
    """Its path; Debian keeps it where only root's PATH looks."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def nginx(folder: Path, *, upstream: Program) -> Iterator[Program]:
    """A real nginx in front of the gateway that does not buffer, as for any event stream."""
    binary, port = find_nginx(), _free_port()
    assert binary is not None
    config = folder / "nginx.conf"
    user = "user root;" if os.getuid() == 0 else ""
    config.write_text(_NGINX.format(folder=folder, port=port, url=upstream.url, user=user))
    command = [binary, "-c", str(config), "-p", str(folder), "-e", str(folder / "nginx.log")]
    with _running("nginx", command, port=port, path="/health/ready", folder=folder, cpus=None) as program:
        yield program


def get_json(url: str) -> Any:
    """The JSON document at `url`."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own programs
        return json.load(answer)


@contextmanager
def _running(
    name: str, command: list[str], *, port: int, path: str, folder: Path, cpus: Sequence[int] | None
) -> Iterator[Program]:
    """The program, ready, and ended at the end of the block."""
    if cpus is not None:
        command = ["taskset", "--cpu-list", ",".join(map(str, cpus)), *command]
    log_path = folder / f"{name}.output"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    program = Program(f"http://127.0.0.1:{port}", process, log_path)
    try:
        _wait_until(lambda: _answers(program, path), what=f"{name} is ready")
        yield program
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(program: Program, path: str) -> bool:
    program.check_running()
    try:
        with urllib.request.urlopen(program.url + path, timeout=2) as answer:  # noqa: S310 - our own program
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _wait_until(condition: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {_START_S:.0f} s: {what}")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
