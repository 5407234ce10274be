"""A small gateway for the clients' tests: recorded bytes on real sockets, and the route of progress reports.

It runs in a thread, so that a synchronous test (Playwright) can talk to it::

    with ChatServer(load("chat_stream")) as server:
        server.hold_at(5)                     # five parts, then wait
        ...                                   # a client asks server.base_url
        server.wait_for(lambda report: report["paused"])
        server.release()
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

__all__ = ["ChatServer", "Served", "ServedStream", "serve_folder"]

MAX_REPORTS = 64
MAX_REQUESTS_PER_S = 20
WAIT_S = 20.0


class Served:
    """An ASGI application at a free port, in a thread of its own."""

    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app, ws="none", lifespan="off", log_level="warning", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._listener.listen()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.should_exit = True
        self._thread.join()


def serve_folder(folder: Path) -> Served:
    """Static files, as `python -m http.server` would serve them."""
    return Served(StaticFiles(directory=folder, html=True))


@dataclass(kw_only=True)
class ServedStream:
    """One answer and what was said about its reader.

    `at_s` of a report is `time.monotonic` of its truth, `open` whether the answer went on when it came.
    """

    id: str
    request: dict[str, Any]
    headers: dict[str, str]
    capability: str = "c4pab1lity_-"
    open: bool = True
    sent_parts: int = 0
    last_seq: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)
    requested_at_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_REQUESTS_PER_S))


class ChatServer(Served):
    """`/v1/chat/completions`, `/v1/models` and `/v1/streams/{id}/progress`, for any origin.

    `parts` are sent one a write, `interval_s` apart. `gives_streams`: whether answers have the header.
    `broken_progress`: what the progress route answers instead of what it should, where that is a status;
    ``"hang"`` for no answer at all.
    """

    def __init__(self, parts: Sequence[bytes], *, interval_s: float = 0.0) -> None:
        self.parts = parts
        self.interval_s = interval_s
        self.gives_streams = True
        self.refuses_with: int | None = None
        self.broken_progress: int | str | None = None
        self.streams: list[ServedStream] = []
        self.progress_requests: list[Request] = []
        self._released = False
        self._held_at: int | None = None
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._changed = threading.Condition()
        cors = Middleware(
            CORSMiddleware,
            allow_origins=["*"],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-TokenFlow-Stream"],
        )
        routes = [
            Route("/v1/models", _models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/streams/{id}/progress", self._progress, methods=["POST"]),
        ]
        super().__init__(Starlette(routes=routes, middleware=[cors]))

    def __exit__(self, *exc_info: object) -> None:
        self.release()
        super().__exit__(*exc_info)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def reports(self) -> list[dict[str, Any]]:
        """All reports that changed anything, of all streams, in order."""
        return [report for stream in self.streams for report in stream.reports]

    def hold_at(self, part: int) -> None:
        """The answer stops before this part until `release`."""
        self._released = False
        self._held_at = part

    def release(self) -> None:
        with self._changed:
            self._released = True
            for loop, released in self._waiting:
                loop.call_soon_threadsafe(released.set)
            self._waiting.clear()

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], *, after: int = 0) -> dict[str, Any]:
        """The first report, of those after the first `after`, that is wanted; waits until it comes."""
        self.wait_until(lambda: any(map(wanted, self.reports[after:])))
        return next(filter(wanted, self.reports[after:]))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until something that happens here makes the condition true."""
        with self._changed:
            met = self._changed.wait_for(condition, timeout=WAIT_S)
        assert met, f"not within {WAIT_S:.0f} s; reports: {self.reports[-3:]}"

    # ---- answers ----

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if self.refuses_with:
            error = {"error": {"message": "no engine serves this model", "type": "x", "code": None}}
            return JSONResponse(error, status_code=self.refuses_with)
        number = len(self.streams) + 1
        stream = ServedStream(id=f"tf-{number:04d}", request=body, headers=dict(request.headers))
        self._note(lambda: self.streams.append(stream))
        key = {"X-TokenFlow-Stream": f"{stream.id}.{stream.capability}"} if self.gives_streams else {}
        return StreamingResponse(self._answer(stream), media_type="text/event-stream", headers=key)

    async def _answer(self, stream: ServedStream) -> AsyncIterator[bytes]:
        try:
            for number, part in enumerate(self.parts):
                if number == self._held_at:
                    await self._until_released()
                yield part
                stream.sent_parts += 1
                await asyncio.sleep(self.interval_s)
        finally:
            self._note(lambda: setattr(stream, "open", False))

    async def _until_released(self) -> None:
        released = asyncio.Event()
        with self._changed:
            if self._released:
                return
            self._waiting.append((asyncio.get_running_loop(), released))
        await released.wait()

    async def _progress(self, request: Request) -> Response:
        body = await request.body()
        self._note(lambda: self.progress_requests.append(request))
        if self.broken_progress == "hang":
            await self._until_released()
        if isinstance(self.broken_progress, int):
            return JSONResponse({"error": {"message": "broken"}}, status_code=self.broken_progress)
        stream = next((one for one in self.streams if one.id == request.path_params["id"]), None)
        try:
            parsed = json.loads(body)
            capability, reports = parsed.get("capability"), parsed["reports"]
            valid = 0 < len(reports) <= MAX_REPORTS and all(map(_is_valid, reports))
        except (ValueError, KeyError, TypeError):
            valid = False
        if not valid:
            return _refusal(400, f"not a list of reports: {body[:200]!r}")
        if stream is None:
            return _refusal(404, "there is no such stream")
        if capability != stream.capability and request.headers.get("authorization") != stream.capability:
            return _refusal(403, "the capability is not of this stream")
        if _too_many(stream.requested_at_s):
            return _refusal(429, "too many requests", {"Retry-After": "1"})
        accepted = self._take(stream, reports)
        return JSONResponse({"accepted": accepted, "state": "reading", "open": stream.open})

    def _take(self, stream: ServedStream, reports: list[dict[str, Any]]) -> int:
        now_s = time.monotonic()
        newer = [report for report in reports if report["seq"] > stream.last_seq]
        for report in newer:
            stream.last_seq = report["seq"]
            report["at_s"] = now_s - report.get("age_ms", 0) / 1000
            report["open"] = stream.open
        self._note(lambda: stream.reports.extend(newer))
        return len(newer)

    def _note(self, change: Callable[[], object]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()


def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": "smollm2-135m", "object": "model"}]})


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status, headers=headers)


def _is_valid(report: dict[str, Any]) -> bool:
    counts = [report.get(name) for name in ("tokens", "chars") if name in report]
    flags = [report.get(name, True) for name in ("visible", "paused")]
    return (
        isinstance(report["seq"], int)
        and bool(counts)
        and all(isinstance(count, int) and count >= 0 for count in counts)
        and all(isinstance(flag, bool) for flag in flags)
        and report.get("age_ms", 0) >= 0
        and report.get("rate", 1.0) >= 0
    )


def _too_many(requested_at_s: deque[float]) -> bool:
    """Notes one more request; whether it is one too many within a second."""
    now_s = time.monotonic()
    full = len(requested_at_s) == MAX_REQUESTS_PER_S and now_s - requested_at_s[0] < 1.0
    requested_at_s.append(now_s)
    return full
