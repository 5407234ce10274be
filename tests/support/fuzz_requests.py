"""Requests that no client should send, drawn at random, as bytes on a connection."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

__all__ = ["odd_connection"]

_CHAT = "/v1/chat/completions"
_TARGETS = (_CHAT, _CHAT, "/v1/completions", "/v1/messages", "/v1/models", "/v1/embeddings", "/health/live")
_ODD_TARGETS = (
    "/", "*", "", "/v1/../admin/streams", "/v1//models", "/v1/%00", "/v1/%ff?%zz",
    "/v1/models?" + "a=1&" * 50, "http://other.example/v1/models", "//v1/models", "/v1/chat/completions#x",
    "/" + "x" * 70_000, "/v1/\u00e9",
)  # fmt: skip
_METHODS = ("POST", "GET", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "post", "X")
_VERSIONS = ("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9.9", "http/1.1", "")
_ODD_HEADERS = (
    "content-length: -1", "content-length: 5, 5", "content-length: 1e3",
    "content-length: 99999999999999999999", "content-length: 5\r\ncontent-length: 6",
    "transfer-encoding: chunked", "transfer-encoding: gzip, chunked", "transfer-encoding: xchunked",
    "transfer-encoding : chunked", "expect: 100-continue", "expect: 200-ok",
    "connection: upgrade\r\nupgrade: websocket", "connection: upgrade\r\nupgrade: h2c",
    "connection: keep-alive", "no colon here", ": no name", "x: a\r\n folded", "x: \x00", "x: \x7f\x01",
    "x y: z", "x: " + "y" * 70_000, "host: a\r\nhost: b", "authorization: Bearer \u00e9",
    "content-type: text/plain", "content-encoding: gzip", "x-tokenflow-rate: nan",
    "x-tokenflow-reader: \u00ff", "x-tokenflow-delivery: paced", "x-request-id: a b",
    "x-tokenflow-user: " + "u" * 300, "cookie: " + "c" * 9000,
)  # fmt: skip
_GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /\r\n",
    b"\r\n\r\n\r\n",
    b"\x00" * 100,
    b"SSH-2.0-x\r\n",
)
_ODD_FIELDS: tuple[tuple[str, Any], ...] = (
    ("stream", "yes"), ("stream", 1), ("stream", None), ("model", 5), ("model", None), ("model", ""),
    ("messages", {}), ("model", "x" * 5000), ("stream_options", []),
    ("stream_options", {"include_usage": "x"}), ("stream_options", 7), ("user", {"a": 1}),
    ("user", "u" * 3000), ("rid", ["a"]), ("n", -1), ("\u0000", 1), ("", ""), ("max_tokens", 1e308),
)  # fmt: skip


def odd_connection(draw: random.Random, models: Sequence[str]) -> list[bytes]:
    """What one client sends, in the writes it sends it in: one to three requests, most of them wrong."""
    requests = [_request(draw, models) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
    data = b"".join(requests)
    if draw.random() < 0.1:
        data = draw.choice(_GARBAGE) + (data if draw.random() < 0.5 else b"")
    if draw.random() < 0.2:
        data = data[: draw.randint(0, len(data))]
    cuts = sorted(draw.randint(0, len(data)) for _ in range(draw.choice((0, 1, 5))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def _request(draw: random.Random, models: Sequence[str]) -> bytes:
    body = _body(draw, models)
    target = draw.choice(_ODD_TARGETS) if draw.random() < 0.1 else draw.choice(_TARGETS)
    method = draw.choice(_METHODS) if draw.random() < 0.3 else "POST"
    version = draw.choice(_VERSIONS) if draw.random() < 0.15 else "HTTP/1.1"
    lines = [f"{method} {target} {version}".rstrip(), "host: localhost", "content-type: application/json"]
    chunked = draw.random() < 0.3
    lines.append("transfer-encoding: chunked" if chunked else f"content-length: {len(body) + _off(draw)}")
    if draw.random() < 0.5:
        lines.append("connection: close")
    if draw.random() < 0.3:
        lines.insert(draw.randint(1, len(lines)), draw.choice(_ODD_HEADERS))
    line_end = "\n" if draw.random() < 0.05 else "\r\n"
    head = (line_end.join(lines) + line_end * 2).encode("utf-8", "surrogateescape")
    request = head + (_chunks(draw, body) if chunked else body)
    return _flipped(draw, request) if draw.random() < 0.2 else request


def _off(draw: random.Random) -> int:
    return draw.choice((-1, 1, 1000)) if draw.random() < 0.05 else 0


def _body(draw: random.Random, models: Sequence[str]) -> bytes:
    fields: dict[str, Any] = {
        "model": draw.choice(models),
        "stream": draw.random() < 0.7,
        "messages": [{"role": "user", "content": "hi"}],
    }
    if draw.random() < 0.2:
        name, value = draw.choice(_ODD_FIELDS)
        fields[name] = value
    kind = draw.random()
    if kind < 0.05:
        return draw.choice(
            (b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 3000, b'{"a":' * 3000, b'{"model":"\\ud800"}')
        )
    body = json.dumps(fields).encode()
    return _flipped(draw, body) if kind < 0.15 else body


def _chunks(draw: random.Random, body: bytes) -> bytes:
    """The body in chunks, some of them framed wrongly."""
    size = draw.randint(1, len(body) + 1)
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    framed = [b"%x%b\r\n%b\r\n" % (len(part), draw.choice((b"", b"", b"", b";a=b")), part) for part in parts]
    last = draw.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"0\r\n", b""))
    if draw.random() < 0.2:
        framed.insert(
            draw.randint(0, len(framed)),
            draw.choice(
                (b"-1\r\n\r\n", b"zz\r\n\r\n", b"ffffffffffffffffff\r\nx", b"5\r\nabc\r\n", b" 1\r\na\r\n")
            ),
        )
    return b"".join(framed) + last


def _flipped(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + bytes([draw.randrange(256)]) + data[at + draw.choice((0, 1)) :]
