"""A real Redis on a socket of its own, with nothing on disk. Tests that need one are skipped without it."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

__all__ = ["RedisServer", "needs_redis", "redis_server"]

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")


class RedisServer:
    """Started and stopped at will; it remembers nothing over a stop."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = {"--port": "0", "--unixsocket": str(self._socket), "--save": "", "--appendonly": "no"}
        argv = ["redis-server", *(part for option in options.items() for part in option)]
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, cwd=self._socket.parent)
        client, deadline = redis.Redis.from_url(self.url), time.monotonic() + 10
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline, "redis-server does not start"
                time.sleep(0.01)
        client.close()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None
        self._socket.unlink(missing_ok=True)

    def suspend(self) -> None:
        """It is there, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(19)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(18)


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        if server._process is not None:
            server.resume()
            server.kill()
