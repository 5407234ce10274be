"""The dashboard served for real, with admin answers that a test controls."""

from __future__ import annotations

import socket
import threading
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tokenflow_gateway.dashboard import dashboard_routes

__all__ = ["AdminServer", "engine", "stream", "unlinked"]


def engine(name: str = "engine-1", **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "url": "http://127.0.0.1:30000",
        "healthy": True,
        "linked": True,
        "reason": None,
        "models": ["SmolLM2-135M-Instruct"],
        "engine": "sglang 0.5.23",
        "running": 3,
        "waiting": 1,
        "parked": 2,
        "offloaded": 1,
        "policy": "adaptive",
        "fixed": None,
        "kv_used_tokens": 10_000,
        "kv_tokens": 40_000,
        "tokens_per_s": 85.2,
        "streams": 6,
    } | changes


def unlinked(name: str, **changes: Any) -> dict[str, Any]:
    """An engine that serves while nothing is known of its inside."""
    measured = ("running", "waiting", "parked", "offloaded", "policy", "kv_used_tokens", "kv_tokens")
    unknown = dict.fromkeys((*measured, "tokens_per_s", "engine"), None)
    reason = "the plugin has not answered yet"
    return engine(name, **unknown | {"linked": False, "reason": reason} | changes)


def stream(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"tf-{number:04d}c0ffee5ca1ab1e",
        "tenant": "anonymous",
        "sla": "default",
        "model": "SmolLM2-135M-Instruct",
        "engine": "engine-1",
        "state": "running",
        "reason": None,
        "offloaded": False,
        "generated": 120,
        "delivered": 112,
        "consumed": 112.0,
        "buffered": 8.0,
        "rate": 5.3,
        "rate_low": 3.9,
        "rate_high": 6.7,
        "reader": "human",
        "reader_state": "reading",
        "source": "model",
        "connection": "direct",
        "age_s": 3.2,
        "ttft_s": 0.21,
        "route": "/v1/chat/completions",
    } | changes


class AdminServer:
    """Serves the page and admin answers on a port of its own, which it keeps over a restart."""

    def __init__(self) -> None:
        self.engines: list[dict[str, Any]] = [engine()]
        self.streams: list[dict[str, Any]] = [stream()]
        self.total: int | None = None
        self.token: str | None = None
        self.closed: str | None = None
        """What a gateway says that shows its admin views to nobody."""
        self.status = 200
        self.at = 1_800_000_000.0
        self.answers = 0
        self.gate = threading.Event()
        self.gate.set()
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        routes = [
            Route("/admin/engines", self._engines),
            Route("/admin/streams", self._streams),
            *dashboard_routes(),
        ]
        config = uvicorn.Config(Starlette(routes=routes), ws="none", lifespan="off", log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()

    def stop(self) -> None:
        self.gate.set()
        self._server.should_exit = True
        self._thread.join()

    def _engines(self, request: Request) -> Response:
        self.gate.wait()
        self.at += 0.5
        return self._answer(request, {"at": self.at, "engines": self.engines})

    def _streams(self, request: Request) -> Response:
        total = len(self.streams) if self.total is None else self.total
        return self._answer(request, {"at": self.at, "total": total, "streams": self.streams})

    def _answer(self, request: Request, content: dict[str, Any]) -> Response:
        self.answers += 1
        given = request.headers.get("authorization")
        if self.token and given != f"Bearer {self.token}":
            return JSONResponse({"error": {"message": "not for you"}}, status_code=401)
        if self.closed is not None:
            return JSONResponse({"error": {"message": self.closed}}, status_code=403)
        return JSONResponse(content, status_code=self.status)
