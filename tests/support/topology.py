"""What docker/compose.gpu.yaml starts, as processes of this machine: proxy, two gateways, Redis, engines.

The proxy runs with the very files that compose ships, the gateways with the very settings; only addresses,
ports and paths are other ones. Engines are recordings, without the plugin, unless the caller has others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support.deployment import DOCKER, ROOT
from support.redis_server import RedisServer, needs_redis, redis_server
from tokenflow_bench.processes import find_nginx

__all__ = ["READY_S", "Part", "Topology", "needs_topology", "topology"]

needs_topology = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_nginx() is None, reason="nginx is missing: apt-get install nginx-light"),
    needs_redis,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is missing: apt-get install openssl"),
]

READY_S = 30.0
_PROXYS_FOLDERS = re.compile(r"/etc/nginx/conf\.d\b|/var/log/nginx\b|/tmp\b")


@dataclass
class Part:
    """One program, which may be ended and started again."""

    name: str
    command: list[str]
    url: str
    ready: str
    """What answers 200 once it serves."""
    folder: Path
    verify: Path | None = None
    """Whom to trust, where it speaks TLS."""
    stop: int = signal.SIGKILL
    """Ends it at once, and all of it."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def client(self) -> httpx.AsyncClient:
        """A client of this part alone."""
        verify = False if self.verify is None else ssl.create_default_context(cafile=self.verify)
        return httpx.AsyncClient(base_url=self.url, verify=verify, timeout=READY_S, trust_env=False)

    async def start(self) -> None:
        """Returns once it serves."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: ASYNC220 - the test has nothing else to do
                self.command, stdout=log, stderr=subprocess.STDOUT, env=self.environment()
            )
        async with asyncio.timeout(READY_S), self.client() as client:
            while not await self._serves(client):
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                await asyncio.sleep(0.05)

    def environment(self) -> dict[str, str]:
        """Nothing of this user's own is used, or changed."""
        runtime = self.folder / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])
        return {
            **os.environ,
            "TOKENFLOW_HOME": str(self.folder),
            "TOKENFLOW_RUNTIME_DIR": str(runtime),
            "TOKENFLOW_STATE_DIR": str(self.folder / "state"),
            "PYTHONPATH": path,
        }

    async def end(self, signum: int = signal.SIGTERM) -> None:
        """Tell it to end, and wait until it has."""
        assert self.process is not None
        self.process.send_signal(signum)
        await asyncio.to_thread(self.process.wait, READY_S)

    def tell(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    async def _serves(self, client: httpx.AsyncClient) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await client.get(self.ready)).status_code == 200
        return False


@dataclass
class Topology:
    """All parts, running."""

    proxy: Part
    redis: RedisServer
    gateways: list[Part]
    engines: list[Part]

    @property
    def parts(self) -> list[Part]:
        return [*self.engines, *self.gateways, self.proxy]


@asynccontextmanager
async def topology(
    folder: Path,
    *,
    tokens_per_s: float | None = None,
    settings: Mapping[str, Any] | None = None,
    entry: Mapping[str, Any] | None = None,
    shared: bool = True,
) -> AsyncIterator[Topology]:
    """Each engine says its recordings at this pace, to any number of clients; None: `settings` names others.

    `settings`: more of the gateways' than compose ships; `entry`: of each engine's in these. Unless `shared`
    they know of no Redis.
    """
    engines = [] if tokens_per_s is None else [_engine(folder, number, tokens_per_s) for number in (1, 2)]
    with redis_server(folder) as redis:
        more = {**(settings or {}), **({"redis": {"url": redis.url}} if shared else {})}
        entries = [{"url": e.url, "id": e.name, "link": "off", **(entry or {})} for e in engines]
        gateways = [_gateway(folder, number, entries, more) for number in (1, 2)]
        running = Topology(_proxy(folder, gateways), redis, gateways, engines)
        try:
            await asyncio.gather(*(engine.start() for engine in engines))
            await asyncio.gather(*(gateway.start() for gateway in gateways))
            await running.proxy.start()
            yield running
        finally:
            for part in running.parts:
                if part.process is not None and part.process.poll() is None:
                    await part.end(part.stop)


def _engine(folder: Path, number: int, tokens_per_s: float) -> Part:
    port = _free_port()
    command = [sys.executable, "-m", "tokenflow_bench.replay", f"--rate={tokens_per_s}", f"--port={port}"]
    return Part(f"engine-{number}", command, f"http://127.0.0.1:{port}", "/ready", folder)


def _gateway(folder: Path, number: int, engines: list[dict[str, Any]], more: Mapping[str, Any]) -> Part:
    port, name = _free_port(), f"gateway-{number}"
    settings = yaml.safe_load((DOCKER / "gateway.gpu.yaml").read_text()) | {
        "engines": engines,
        "host": "127.0.0.1",
        "port": port,
        "gateway_id": name,
        **more,
    }
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "tokenflow_gateway.cli", "serve", f"--config={config}"]
    return Part(name, command, f"http://127.0.0.1:{port}", "/health/ready", folder)


def _proxy(folder: Path, gateways: list[Part]) -> Part:
    binary, port = find_nginx(), _free_port()
    assert binary is not None
    certificate = _certificate(folder)
    values = {
        "GATEWAY_1": gateways[0].url.removeprefix("http://"),
        "GATEWAY_2": gateways[1].url.removeprefix("http://"),
        "HTTPS_PORT": str(port),
        "CERTIFICATES": str(folder),
    }
    template = (DOCKER / "nginx/tokenflow.conf.template").read_text()
    (folder / "tokenflow.conf").write_text(re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], template))
    main = _PROXYS_FOLDERS.sub(str(folder), (DOCKER / "nginx/nginx.conf").read_text())
    (folder / "nginx.conf").write_text(main)
    user = "user root;" if os.getuid() == 0 else ""
    command = [binary, "-c", str(folder / "nginx.conf"), "-g", f"daemon off; {user}", "-e", "stderr"]
    url = f"https://localhost:{port}"
    # Killed, it would leave its workers.
    return Part("proxy", command, url, "/health/live", folder, verify=certificate, stop=signal.SIGTERM)


def _certificate(folder: Path) -> Path:
    """One of our own for ``localhost``, and its key beside it; clients are told to trust it."""
    path = folder / "fullchain.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    subprocess.run(
        [
            *command.split(),
            "-addext",
            "subjectAltName=DNS:localhost",
            "-out",
            path,
            "-keyout",
            folder / "privkey.pem",
        ],
        check=True,
        capture_output=True,
    )
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
