"""What docker/compose.gpu.yaml starts, as processes of this machine: proxy, two gateways, Redis, engines.

The proxy runs with the very template that compose ships, the gateways with the very settings; only addresses,
ports and paths are other ones. Engines are recordings, without the plugin.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml

from support.deployment import DOCKER, ROOT
from support.redis_server import RedisServer, redis_server
from tokenflow_bench.processes import find_nginx

__all__ = ["Part", "Topology", "topology"]

READY_S = 30.0
_NGINX = """
daemon off; pid {folder}/nginx.pid; error_log stderr warn; worker_processes 1; {user}
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxied;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  include {folder}/tokenflow.conf;
}}
"""


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
        own = {"TOKENFLOW_HOME": str(self.folder), "TOKENFLOW_RUNTIME_DIR": str(runtime), "PYTHONPATH": path}
        return {**os.environ, **own}

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
async def topology(folder: Path, *, tokens_per_s: float) -> AsyncIterator[Topology]:
    """Each engine says its recordings at this pace, to any number of clients."""
    engines = [_engine(folder, number, tokens_per_s) for number in (1, 2)]
    gateways = [_gateway(folder, number, engines) for number in (1, 2)]
    with redis_server(folder) as redis:
        running = Topology(_proxy(folder, gateways), redis, gateways, engines)
        try:
            await asyncio.gather(*(engine.start() for engine in engines))
            await asyncio.gather(*(gateway.start() for gateway in gateways))
            await running.proxy.start()
            yield running
        finally:
            for part in running.parts:
                if part.process is not None and part.process.poll() is None:
                    part.process.kill()
                    part.process.wait()


def _engine(folder: Path, number: int, tokens_per_s: float) -> Part:
    port = _free_port()
    command = [sys.executable, "-m", "tokenflow_bench.replay", f"--rate={tokens_per_s}", f"--port={port}"]
    return Part(f"engine-{number}", command, f"http://127.0.0.1:{port}", "/ready", folder)


def _gateway(folder: Path, number: int, engines: list[Part]) -> Part:
    port, name = _free_port(), f"gateway-{number}"
    settings = yaml.safe_load((DOCKER / "gateway.gpu.yaml").read_text()) | {
        "engines": [{"url": engine.url, "id": engine.name, "link": "off"} for engine in engines],
        "host": "127.0.0.1",
        "port": port,
        "gateway_id": name,
        "redis": {"url": f"unix://{folder}/redis.sock"},
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
    user = "user root;" if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(_NGINX.format(folder=folder, user=user))
    command = [binary, "-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", "stderr"]
    return Part("proxy", command, f"https://localhost:{port}", "/health/live", folder, verify=certificate)


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
