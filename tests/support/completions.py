"""Requests to an engine's own OpenAI API, from threads, with the rid the gateway would give them."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

__all__ = ["StreamedRequest", "complete", "new_rid"]

_TIMEOUT_S = 100.0


def new_rid() -> str:
    """As the gateway makes them."""
    return uuid.uuid4().hex


def complete(base_url: str, path: str, body: dict[str, Any]) -> int:
    """Run one request to its end; its usage in completion tokens."""
    with StreamedRequest(base_url, path, body) as request:
        return request.finish()


class StreamedRequest:
    """One streaming request that can be read, or left in the middle."""

    def __init__(self, base_url: str, path: str, body: dict[str, Any]) -> None:
        address = urlsplit(base_url)
        self._connection = HTTPConnection(address.hostname or "", address.port, timeout=_TIMEOUT_S)
        full = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        self._connection.request("POST", path, json.dumps(full | body), {"Content-Type": "application/json"})
        self._answer: HTTPResponse | None = None

    def __enter__(self) -> StreamedRequest:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Reset the connection, as a browser tab that is closed."""
        if self._connection.sock is not None:
            with socket.socket(fileno=self._connection.sock.detach()) as raw:
                raw.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """The JSON of each `data:` line, to the end of the stream."""
        answer = self._answer = self._answer or self._connection.getresponse()
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield json.loads(line[6:])

    def finish(self) -> int:
        """Read to the end; the usage in completion tokens."""
        usages = [event["usage"]["completion_tokens"] for event in self.events() if event.get("usage")]
        assert usages, "the stream ended without usage"
        return int(usages[-1])
