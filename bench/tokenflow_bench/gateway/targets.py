"""The gateways under measurement, each pinned to one core, and what the system says they use."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tokenflow_bench.gateway import events
from tokenflow_bench.processes import find_nginx
from tokenflow_gateway.store.keys import KEYS_FILE, KeyStore
from tokenflow_gateway.tenants.keys import KeyRecord, new_key

__all__ = [
    "PACKAGES",
    "TARGETS",
    "Missing",
    "Target",
    "our_target",
    "running",
    "running_link",
    "running_workers",
]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_START_S = 90.0
_INSTALL_S = 900.0
_TENANT = "bench"
_KEY = new_key()
"""The one key that TokenFlow knows here."""
_LIMITS = {
    "requests_per_minute": 10**9,
    "tokens_per_minute": 10**15,
    "concurrent_streams": 10**6,
    "budget_tokens": 10**15,
}
"""Of the tenant: counted for each request, and never reached."""
_HELD = re.compile(r"^tokenflow_held_bytes (\S+)$", re.MULTILINE)

PACKAGES = {
    "sglang-router": ("sglang-router==0.3.2",),
    "smg": ("smg==1.13.0",),
    "LiteLLM": ("litellm[proxy]==1.106.0",),
    "FastAPI + httpx": (
        "fastapi==0.165.0",
        "httpx==0.28.1",
        "sniffio==1.3.1",  # without it httpcore retries a failing import on every request
        "uvicorn==0.54.0",
        "uvloop==0.23.0",
        "httptools==0.9.0",
    ),
}
"""What is installed for a peer into a virtual environment of its own. Pinned: the peers of one comparison."""


class Missing(Exception):
    """The peer cannot be measured here, and why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running gateway; all processes of its session count."""

    name: str
    port: int
    pid: int
    key: str = events.KEY
    """What its clients show."""
    metrics_key: str | None = None
    """What opens its metrics; None where there are none that say what it holds."""

    def cpu_s(self) -> float:
        """CPU time of all its threads so far, in seconds (schedstat: nanoseconds)."""
        spent_ns = 0
        for pid in self.pids():
            for task in _listed(Path(f"/proc/{pid}/task")):
                spent_ns += int((_text(task / "schedstat") or "0").split()[0])
        return spent_ns / 1e9

    def resident_bytes(self) -> int:
        """Memory that is really there (RSS)."""
        return (
            sum(int((_text(Path(f"/proc/{pid}/statm")) or "0 0").split()[1]) for pid in self.pids())
            * _PAGE_BYTES
        )

    def held_bytes(self) -> float | None:
        """What waits in it for its clients, by its own count; None where it does not say."""
        if self.metrics_key is None:
            return None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/metrics", headers={"authorization": f"Bearer {self.metrics_key}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310 - our own program
                found = _HELD.search(answer.read().decode())
        except OSError:
            return None
        return None if found is None else float(found[1])

    def pids(self) -> list[int]:
        """Its processes."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                fields = _text(path / "stat").rpartition(")")[2].split()
                if fields and int(fields[3]) == self.pid:
                    found.append(int(path.name))
        return found


Command = Callable[[Path, int, str], list[str]]


def our_target(name: str, port: int) -> Target:
    """Not yet running."""
    return Target(name, port, -1, key=_KEY.text, metrics_key=events.KEY)


def _tokenflow(folder: Path, port: int, engine: str, **settings: object) -> list[str]:
    state = folder / f"state-{port}"
    with KeyStore(state / KEYS_FILE) as store:
        store.add(KeyRecord(id=_KEY.key.id, hash=_KEY.key.hash, tenant=_TENANT, created_at=time.time()))
    values = {
        "engines": [{"url": engine, "id": "bench", "link": _link_endpoint(folder)}],
        "port": port,
        "state_dir": str(state),
        "admin_token": events.KEY,
        "tenants": {_TENANT: {"limits": _LIMITS}},
        "shutdown_grace_s": 0,
        "log_level": "warning",
        **settings,
    }
    config = folder / "gateway.yaml"
    config.write_text(json.dumps(values))  # JSON is YAML
    return [sys.executable, "-m", "tokenflow_gateway.cli", "serve", f"--config={config}"]


_NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log warn; worker_processes 1; {user}
worker_rlimit_nofile 8192;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/nginx-body; proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi; uwsgi_temp_path {folder}/nginx-uwsgi;
  scgi_temp_path {folder}/nginx-scgi;
  keepalive_requests 1000000;
  upstream engine {{ server {engine}; keepalive 1024; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 300s;
    }}
  }}
}}
"""


def _nginx(folder: Path, port: int, engine: str) -> list[str]:
    binary = find_nginx()
    if binary is None:
        raise Missing("not installed: apt-get install nginx-light")
    config = folder / "nginx.conf"
    user = "user root;" if os.getuid() == 0 else ""
    address = engine.removeprefix("http://")
    config.write_text(_NGINX.format(folder=folder, port=port, engine=address, user=user))
    return [binary, "-c", str(config), "-p", str(folder), "-e", str(folder / "nginx.log")]


def _sglang_router(folder: Path, port: int, engine: str) -> list[str]:
    python = _installed("sglang-router") / "bin/python"
    ports = (f"--prometheus-port={_free_port()}",)
    return [str(python), "-m", "sglang_router.launch_router", "--worker-urls", engine, "--host=127.0.0.1",
            f"--port={port}", "--policy=round_robin", "--log-level=error", *ports]  # fmt: skip


def _smg(folder: Path, port: int, engine: str) -> list[str]:
    program = _installed("smg") / "bin/smg"
    return [str(program), "launch", "--worker-urls", engine, "--host=127.0.0.1", f"--port={port}",
            "--policy=round_robin", "--log-level=error", f"--prometheus-port={_free_port()}"]  # fmt: skip


def _litellm(folder: Path, port: int, engine: str) -> list[str]:
    program = _installed("LiteLLM") / "bin/litellm"
    model = {"model": f"openai/{events.MODEL}", "api_base": f"{engine}/v1", "api_key": "none"}
    config = folder / "litellm.yaml"
    values = {
        "model_list": [{"model_name": events.MODEL, "litellm_params": model}],
        "general_settings": {"master_key": events.KEY},
    }
    config.write_text(json.dumps(values))
    return [str(program), "--config", str(config), "--host=127.0.0.1", f"--port={port}", "--num_workers=1"]


def _naive(folder: Path, port: int, engine: str) -> list[str]:
    python = _installed("FastAPI + httpx") / "bin/python"
    shutil.copy(Path(__file__).with_name("naive.py"), folder / "naive.py")
    return [str(python), "-m", "uvicorn", "naive:app", f"--app-dir={folder}", "--host=127.0.0.1",
            f"--port={port}", "--log-level=error", "--no-access-log"]  # fmt: skip


TARGETS: dict[str, tuple[Command | None, str]] = {
    "TokenFlow": (_tokenflow, "/health/ready"),
    "nginx": (_nginx, "/v1/models"),
    "sglang-router": (_sglang_router, "/v1/models"),
    "smg": (_smg, "/v1/models"),
    "LiteLLM": (_litellm, "/health/readiness"),
    "FastAPI + httpx": (_naive, "/v1/models"),
    "no gateway": (None, ""),
}
"""How each is started, and where it answers once it is ready."""


@contextmanager
def running(name: str, folder: Path, *, engine_port: int, cpu: int) -> Iterator[Target]:
    """The gateway, ready, on one core; ended at the end of the block. Raises `Missing`."""
    command, path = TARGETS[name]
    if command is None:
        yield Target(name, engine_port, -1)
        return
    folder = folder / name.replace(" ", "")
    folder.mkdir()
    port = _free_port()
    words = command(folder, port, f"http://127.0.0.1:{engine_port}")
    environment = {**os.environ, "ENGINE_URL": f"http://127.0.0.1:{engine_port}", "NO_PROXY": "127.0.0.1"}
    if name != "TokenFlow":
        environment.pop("PYTHONPATH", None)
    pinned = ["taskset", "--cpu-list", str(cpu), *words]
    target = our_target(name, port) if name == "TokenFlow" else Target(name, port, -1)
    with _started(target, pinned, path, folder, environment) as started:
        yield started


@contextmanager
def running_workers(count: int, folder: Path, *, engine_port: int) -> Iterator[Target]:
    """TokenFlow in `count` workers on all cores, each linked to the engine's end in `folder`.

    They pass on each chunk at once: where the next one waits for it, a wait for more is lost.
    """
    port = _free_port()
    words = _tokenflow(folder, port, f"http://127.0.0.1:{engine_port}", coalesce_ms=0)
    target = our_target(f"workers-{count}", port)
    with _started(target, [*words, f"--workers={count}"], "/health/ready", folder, {**os.environ}) as started:
        yield started


@contextmanager
def _started(
    target: Target, words: list[str], path: str, folder: Path, environment: dict[str, str]
) -> Iterator[Target]:
    log = folder / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
            cwd=folder,
        )
    try:
        _wait_ready(process, f"http://127.0.0.1:{target.port}{path}", log)
        yield replace(target, pid=process.pid)
    finally:
        _end(process)


@contextmanager
def running_link(folder: Path, *, cpus: str) -> Iterator[None]:
    """The engine's end of the link, which the measured gateway reports to."""
    words = [sys.executable, "-m", "tokenflow_bench.gateway.link", _link_endpoint(folder / "TokenFlow")]
    process = subprocess.Popen(["taskset", "--cpu-list", cpus, *words], start_new_session=True)
    try:
        yield
    finally:
        _end(process)


def _link_endpoint(folder: Path) -> str:
    return f"ipc://{folder}.link"


def _end(process: subprocess.Popen[bytes]) -> None:
    """With everything that it has started."""
    for signum, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, signum)
            process.wait(patience_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - our own program
                if answer.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.1)
    raise Missing("did not start: " + log.read_text(errors="replace")[-600:].strip())


def _installed(name: str) -> Path:
    """The peer's own virtual environment, made if it is not there. Raises `Missing`."""
    home = Path(os.environ.get("TOKENFLOW_HOME", "~/.cache/tokenflow")).expanduser() / "bench"
    folder = home / name.replace(" ", "")
    stamp = folder / ".installed"
    wanted = " ".join(PACKAGES[name])
    if _text(stamp) == wanted:
        return folder
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, capture_output=True)
        subprocess.run(
            [folder / "bin/pip", "install", "-qq", "--disable-pip-version-check", *PACKAGES[name]],
            check=True,
            capture_output=True,
            timeout=_INSTALL_S,
        )
    except subprocess.CalledProcessError as error:
        raise Missing(f"not installable here: {error.stderr.decode()[-300:].strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise Missing(f"not installed within {_INSTALL_S:.0f} s") from error
    stamp.write_text(wanted)
    return folder


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
