"""Answers that no engine should give, drawn at random: their streams broken, their HTTP, or both."""

from __future__ import annotations

import random
from typing import NamedTuple

from support.fuzz_streams import RECORDED, mutated, reads_of
from support.replay_engine import Close, Raw, Reset, Script, Send, Step

__all__ = ["OddAnswer", "odd_answer"]

_STATUS_LINES = (
    b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK", b"HTTP/1.1 200",
    b"HTTP/1.1 204 No Content", b"HTTP/1.1 206 Partial Content", b"HTTP/1.1 304 Not Modified",
    b"HTTP/1.1 307 Temporary Redirect", b"HTTP/1.1 429 Too Many Requests", b"HTTP/1.1 503 Unavailable",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK", b"HTTP/1.1 101 Switching Protocols", b"HTTP/1.1 999 ?",
    b"HTTP/1.1 abc", b"HTTP/9.9 200 OK", b"ICY 200 OK", b"", b"\x00\x01\x02",
    b"HTTP/1.1 200 OK\r\nHTTP/1.1 200 OK",
)  # fmt: skip
_HEADERS = (
    b"connection: close", b"connection: keep-alive", b"content-encoding: gzip", b"content-encoding: br",
    b"content-encoding: identity", b"content-type: application/json", b"content-type: text/plain",
    b"no colon", b"x: " + b"y" * 70_000, b"x: a\r\n folded", b"content-length: 5\r\ncontent-length: 6",
    b"content-length: -1", b"transfer-encoding: gzip", b"x: \x00", b"x-request-id: theirs",
    b"location: http://elsewhere.example/", b"set-cookie: a=b", b"keep-alive: timeout=0", b"upgrade: h2c",
)  # fmt: skip
_ODD_CHUNKS = (
    b"zz\r\n\r\n", b"-5\r\nx\r\n", b"5\r\nabc\r\n", b"ffffffffffffffffff\r\n", b"0\r\n\r\n",
    b"3;a=b\r\n: x\r\n",
)  # fmt: skip


class OddAnswer(NamedTuple):
    """How the engine answers on this route. `stream` is its body, where only that is odd."""

    path: str
    script: Script
    stream: bytes | None = None


def odd_answer(draw: random.Random) -> OddAnswer:
    transcript = draw.choice(RECORDED)
    stream = mutated(draw, transcript.data) if draw.random() < 0.7 else transcript.data
    parts = [part for part in reads_of(draw, stream)[:400] if part]
    if draw.random() < 0.5:
        end: list[Step] = [draw.choice((Close(), Reset()))] if draw.random() < 0.3 else []
        sent = None if end else b"".join(parts)
        return OddAnswer(transcript.path, Script(steps=[*map(Send, parts), *end]), sent)
    raw = _head(draw, sum(map(len, parts))) + _body(draw, parts)
    if draw.random() < 0.2:
        raw = raw[: draw.randint(0, len(raw))]
    reads = [part for part in reads_of(draw, raw)[:100] if part]
    return OddAnswer(transcript.path, Script(steps=[*map(Raw, reads), Close()]))


def _head(draw: random.Random, size: int) -> bytes:
    lines = [draw.choice(_STATUS_LINES) if draw.random() < 0.5 else b"HTTP/1.1 200 OK"]
    lines.append(b"content-type: text/event-stream")
    framing = draw.choice((b"transfer-encoding: chunked", b"transfer-encoding: chunked", b"length", b""))
    if framing == b"length":
        framing = b"content-length: %d" % (size + draw.choice((0, 0, -1, 1, 1000)))
    lines += [framing] if framing else []
    if draw.random() < 0.3:
        lines.append(draw.choice(_HEADERS))
    return draw.choice((b"\r\n", b"\r\n", b"\r\n", b"\n")).join([*lines, b"", b""])


def _body(draw: random.Random, parts: list[bytes]) -> bytes:
    """In chunks, whatever the head says: half of the time it says something else."""
    if draw.random() < 0.3:
        return b"".join(parts)
    framed = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
    if draw.random() < 0.3:
        framed.insert(draw.randint(0, len(framed)), draw.choice(_ODD_CHUNKS))
    return b"".join(framed) + draw.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b""))
