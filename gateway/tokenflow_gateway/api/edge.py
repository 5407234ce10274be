"""What every request to the control application meets first: HEAD, OPTIONS, and a bound on bodies."""

from __future__ import annotations

from fastapi import FastAPI, HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from tokenflow_gateway.relay.errors import error_body
from tokenflow_gateway.relay.exchange import take_the_rest

__all__ = ["ControlEdge"]

_METHODS = ("GET", "POST")
_MAX_BODY_BYTES = 64 * 1024
"""Control requests are short: the name of a policy."""


class ControlEdge:
    """The application behind it answers GET and POST; a server leaves the body of an answer to HEAD out."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        allowed = self._methods(scope)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        if allowed and scope["method"] not in allowed:
            await _only(allowed, scope)(scope, receive, send)
        else:
            await self._bounded(scope, receive, send)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(receive, send)
        if int(Request(scope).headers.get("content-length") or 0) > _MAX_BODY_BYTES:
            body.refused = True
            await _too_large()(scope, receive, body.send)
        else:
            await self._app(scope, body.receive, body.send)

    def _methods(self, scope: Scope) -> set[str]:
        """Those that some route of this path takes; none for a path without a route."""
        return {
            method
            for method in _METHODS
            if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in self._app.routes)
        }


def _only(allowed: set[str], scope: Scope) -> Response:
    """The answer to OPTIONS, and to a method that the path has not."""
    methods = sorted(allowed | {"OPTIONS"} | ({"HEAD"} if "GET" in allowed else set()))
    headers = {"Allow": ", ".join(methods)}
    if scope["method"] == "OPTIONS":
        return Response(status_code=204, headers=headers)
    message = f"{scope['method']} is not a method of {scope['path']}: use {headers['Allow']}"
    body = error_body(message, status=405, code="method_not_allowed")
    return Response(body, 405, headers=headers, media_type="application/json")


def _too_large() -> Response:
    body = error_body(_TOO_LARGE, status=413, code="request_too_large")
    return Response(body, 413, headers={"Connection": "close"}, media_type="application/json")


_TOO_LARGE = f"the request body is larger than {_MAX_BODY_BYTES} bytes"


class _Body:
    """One request's body, bounded; what is refused of it is taken before the answer ends the connection."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._bytes = 0
        self.refused = False

    async def receive(self) -> Message:
        """Raises 413 once it is too long, also where no length was announced."""
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > _MAX_BODY_BYTES:
            self.refused = True
            raise HTTPException(413, _TOO_LARGE, headers={"Connection": "close"})
        return message

    async def send(self, message: Message) -> None:
        if self.refused and message["type"] == "http.response.body":
            await self._send({**message, "more_body": True})
            await take_the_rest(self._receive)
            message = {"type": "http.response.body"}
        await self._send(message)
