"""`tokenflow serve` in front of a replay engine, in processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from support.replay_engine import ReplayEngine

__all__ = ["Served", "serving"]

PATIENCE_S = 20.0


class Served:
    """`tokenflow serve` in front of one engine, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.base_url = f"http://127.0.0.1:{port}"

    def signal(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def gone(self, within_s: float = PATIENCE_S) -> float:
        """Seconds until the process has ended, by itself or by the signal it has passed on."""
        begun = time.monotonic()
        async with asyncio.timeout(within_s):
            code = await self.process.wait()
        assert code in {0, -signal.SIGTERM}, self.log.read_text()
        return time.monotonic() - begun


@contextlib.asynccontextmanager
async def serving(
    engine: ReplayEngine,
    tmp_path: Path,
    *,
    grace_s: int = 30,
    workers: int = 1,
    link: str = "off",
    **settings: object,
) -> AsyncIterator[Served]:
    """On a free port; ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config, log = tmp_path / "gateway.yaml", tmp_path / "gateway.log"
    config.write_text(
        f"engines: [{{url: '{engine.base_url}', id: e, link: '{link}'}}]\n"
        f"port: {port}\nshutdown_grace_s: {grace_s}\nworkers: {workers}\n"
        + "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())
    )
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tokenflow_gateway.cli", "serve", "--config", str(config)),
            stdout=out,
            stderr=out,
            env=os.environ,
        )
    try:
        await _ready(port, process, log)
        yield Served(process, port, log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(PATIENCE_S):
        while True:
            assert process.returncode is None, f"see {log}"
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"http://127.0.0.1:{port}/health/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.05)
