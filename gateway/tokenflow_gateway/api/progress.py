"""``POST /v1/streams/{id}/progress``: what clients say their readers have read. See docs/progress.md."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tokenflow_gateway.metrics import Metrics
from tokenflow_gateway.readers.progress import Capabilities, ProgressError, ProgressReport, decode_progress
from tokenflow_gateway.readers.registry import ReaderRegistry
from tokenflow_gateway.readers.track import ReaderTrack, TooManyReports
from tokenflow_gateway.relay.errors import error_body
from tokenflow_gateway.relay.stream import Stream, StreamTable
from tokenflow_gateway.workers.peers import Forwarded, PeerAnswer, Unreachable

__all__ = ["Owners", "ProgressRoute", "stream_of"]

_PATH = re.compile(r"/v1/streams/([^/]+)/progress")
_MAX_BODY_BYTES = 64 * 1024
_CAPABILITY = re.compile(r"Bearer ([A-Za-z0-9_-]{22})")
"""What can be known as a capability before the body has come; anything else may be meant for others."""
_CLIENT_LEFT = Response(status_code=499)
"""For nobody: the client has left."""
_OUTCOMES = {200: "accepted", 499: "client_gone"}
_ANY_ORIGIN = {
    "Access-Control-Allow-Origin": "*",  # the capability is the authorisation, there are no cookies
    "Access-Control-Allow-Methods": "POST",
    "Access-Control-Allow-Headers": "Authorization, Content-Type",
    "Access-Control-Max-Age": "86400",
}


def stream_of(path: str) -> str | None:
    """The stream's id if this is the path of its progress route."""
    match = _PATH.fullmatch(path)
    return match[1] if match else None


class Owners(Protocol):
    """The other processes that may have a report's stream: workers of this gateway, replicas of its fleet."""

    async def ask(self, owner: str, report: Forwarded) -> PeerAnswer:
        """What the owner answers. Raises `Unreachable`."""

    async def refresh(self) -> bool:
        """Look who is there. False if nothing can have changed."""


class ProgressRoute:
    """Takes reports in; `on_change` hears of every stream whose reader moved."""

    def __init__(
        self,
        streams: StreamTable,
        readers: ReaderRegistry,
        capabilities: Capabilities,
        metrics: Metrics,
        owners: Owners,
        *,
        body_s: float,
    ) -> None:
        """`body_s`: for a client to send its reports."""
        self._streams = streams
        self._readers = readers
        self._capabilities = capabilities
        self._metrics = metrics
        self._owners = owners
        self._body_s = body_s
        self.on_change: Callable[[Stream], None] = lambda stream: None

    async def answer(self, rid: str, request: Request) -> Response:
        """The response to one request, whatever came."""
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={**_ANY_ORIGIN, "Allow": "OPTIONS, POST"})
        if request.method != "POST":
            refusal = _refusal(405, "send progress reports with POST")
            refusal.headers["Allow"] = "OPTIONS, POST"
            return refusal
        authorization = request.headers.get("authorization", "")
        capability = _CAPABILITY.fullmatch(authorization)
        if capability is not None and await self._owner_of(rid, capability[1]) is None:
            return self._count(_closing(_forbidden()))
        try:
            async with asyncio.timeout(self._body_s):
                body = await _body(request)
        except ClientDisconnect:
            return self._count(_CLIENT_LEFT)
        except TimeoutError:
            return self._count(_closing(_refusal(408, f"the reports did not come within {self._body_s:g} s")))
        if body is None:
            refusal = _refusal(413, f"progress reports are limited to {_MAX_BODY_BYTES} bytes")
            return self._count(_closing(refusal))
        try:
            named, reports = decode_progress(body)
        except ProgressError as error:
            return self._count(_refusal(400, str(error)))
        given = named or authorization.removeprefix("Bearer ")
        owner = await self._owner_of(rid, given)
        if owner is None:
            return self._count(_forbidden())
        if not self._capabilities.allows(rid, given):
            return await self._forward(owner, Forwarded(rid, given, body))
        return self._count(self._take(rid, reports))

    async def _owner_of(self, rid: str, capability: str) -> str | None:
        owner = self._capabilities.owner_of(rid, capability)
        if owner is None and await self._owners.refresh():
            owner = self._capabilities.owner_of(rid, capability)
        return owner

    def forwarded(self, request: Forwarded) -> PeerAnswer:
        """The answer to what came to another worker, which has checked it; it counts here."""
        if not self._capabilities.allows(request.rid, request.capability):
            response = _forbidden()
        else:
            response = self._take(request.rid, decode_progress(request.body)[1])
        self._count(response)
        return PeerAnswer(response.status_code, dict(response.headers), bytes(response.body))

    async def _forward(self, owner: str, request: Forwarded) -> Response:
        self._metrics.progress_forwarded.inc()
        try:
            answer = await self._owners.ask(owner, request)
        except Unreachable as error:
            return self._count(_gone() if error.gone else _later(503, "these reports cannot be taken now"))
        return Response(answer.body, answer.status, headers=answer.headers)

    def _take(self, rid: str, reports: list[ProgressReport]) -> Response:
        try:
            taken = self._apply(rid, reports)
        except TooManyReports:
            return _later(429, "too many requests with reports on this stream: put more into each")
        if taken is None:
            return _gone()
        return _json(200, taken)

    def _apply(self, rid: str, reports: list[ProgressReport]) -> dict[str, Any] | None:
        now = time.monotonic()
        stream = self._streams.get(rid)
        if stream is not None and stream.end is None:
            stream.settle()
            taken = self._report(stream.reader, reports, now)
            if taken["accepted"]:
                self.on_change(stream)
            return taken | {"open": True}
        track = self._readers.get(rid, now=now)
        if track is None:
            return None
        taken = self._report(track, reports, now)
        self._readers.learn(track, now=now)
        self._readers.look(track, waiting=False, now=now)
        return taken | {"open": False}

    def _report(self, track: ReaderTrack, reports: list[ProgressReport], now: float) -> dict[str, Any]:
        track.admit_request(now)
        accepted = track.progress(reports, now)
        after = track.estimate(now)
        self._metrics.progress_clamped.inc(track.clamped)
        if track.error_tokens is not None:
            self._metrics.estimator_error.observe(track.error_tokens)
        return {
            "accepted": accepted,
            "consumed": round(after.consumed, 2),
            "delivered": track.handed_over,
            "state": after.state,
        }

    def _count(self, response: Response) -> Response:
        outcome = _OUTCOMES.get(response.status_code, f"refused_{response.status_code}")
        self._metrics.progress_requests.labels(outcome).inc()
        return response


async def _body(request: Request) -> bytes | None:
    """The whole body; None if it is longer than it may be."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            return None
    return bytes(body)


def _forbidden() -> Response:
    return _refusal(403, "the capability is not that of this stream: see X-TokenFlow-Stream")


def _gone() -> Response:
    return _refusal(404, "there is no such stream, or it ended too long ago")


def _later(status: int, message: str) -> Response:
    refusal = _refusal(status, message)
    refusal.headers["Retry-After"] = "1"
    return refusal


def _closing(response: Response) -> Response:
    """The same, for a request of which the rest is not read."""
    response.headers["Connection"] = "close"
    return response


def _json(status: int, content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), status, headers=_ANY_ORIGIN, media_type="application/json")


def _refusal(status: int, message: str) -> Response:
    return Response(
        error_body(message, status=status), status, headers=_ANY_ORIGIN, media_type="application/json"
    )
