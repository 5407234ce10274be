"""An engine's answer as it comes off a connection: HTTP/1.1 by httptools, the body in bounded memory."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

import httptools

from tokenflow_gateway.relay.errors import EngineUnreachable

__all__ = ["MAX_HEAD_BYTES", "READ_BYTES", "AnswerBody", "EngineAnswer", "KnownHead"]

MAX_HEAD_BYTES: Final = 64 * 1024
"""Status line and headers of an answer, interim ones included, or its trailer; more is no answer."""
READ_BYTES: Final = 8 * 1024
"""What is handed over at a time, and so by how much a queue can exceed its cap."""
_HIGH_BYTES = 32 * 1024
"""With so much waiting here the connection is not read; one read of the socket may come on top."""
_LOW_BYTES = 16 * 1024
_GZIP, _ZLIB, _RAW_DEFLATE = 31, 15, -15  # `wbits` of zlib

LOST: Final = "the connection to the engine was lost"
_FIRST_STATUS, _NO_CONTENT, _LAST_STATUS = 100, 204, 599
_NOT_HTTP = "the engine's answer is not HTTP"
_OK = b"HTTP/1.1 200 "
_IN_CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,7})\r\n")


class AnswerBody:
    """The body, read in pieces or passed on as it arrives. For one reader.

    What arrives faster than it is read is held up to `_HIGH_BYTES`, then the connection is not read. All that
    came before a failure is handed over before it raises.
    """

    __slots__ = (
        "_bytes",
        "_decoder",
        "_ended",
        "_error",
        "_held",
        "_loop",
        "_paused",
        "_take",
        "_transport",
        "_waiter",
        "parsed",
        "pass_by",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._held: list[bytes] = []  # few, and none most of the time
        self._bytes = 0
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._decoder: _Decoder | None = None
        self._paused = False
        self.pass_by: Callable[[bytes], bool] | None = None
        """What is asked first, as `pass_to` has it."""
        self.parsed: list[bytes] = []
        """What the parser has found in the read under way; see `flush`."""

    # ---- for the reader ------------------------------------------------------------------------------

    async def read(self, most: int) -> bytes:
        """The next bytes, at most so many; empty at the end. Raises `EngineUnreachable`."""
        while True:
            if self._decoder is not None:
                await asyncio.sleep(0)  # a little that was sent can be very much: others have their turn
                if data := self._decoder.rest(most):
                    return data
            while not self._held:
                if self._error is not None:
                    raise self._error
                if self._ended:
                    if self._decoder is not None:
                        self._decoder.check_end()
                    return b""
                await self._wait()
            data = self._next(most)
            if self._decoder is None:
                return data
            if data := self._decoder.decode(data, most):
                return data

    async def readany(self) -> bytes:
        """What is here, or the next that comes; empty at the end. Raises `EngineUnreachable`."""
        return await self.read(_HIGH_BYTES)

    @property
    def exhausted(self) -> bool:
        """All of it has been handed on."""
        return self._ended and not self._held and self._decoder is None

    async def pass_to(
        self, take: Callable[[bytes], bool], pass_by: Callable[[bytes], bool] | None = None
    ) -> bool:
        """Call `take` with each piece, as it arrives and within the read that brought it; no task is woken.

        `pass_by` is asked first, with each read of the connection that begins where an HTTP chunk does: if it
        returns True, the read was one whole chunk, framed as it came, and is done with.

        Until `take` returns False, which this returns then: what comes after that piece is held. True at the
        end of the body. Raises what `take` raises, or `EngineUnreachable`.
        """
        if self._decoder is not None:
            while data := await self.read(READ_BYTES):
                if not take(data):
                    return False
            return True
        while self._held:
            if not take(self._next(READ_BYTES)):
                return False
        if self._error is not None:
            raise self._error
        if self._ended:
            return True
        self._take, self.pass_by = take, pass_by
        try:
            return await self._wait()
        finally:
            self._take = self.pass_by = None

    # ---- for the connection --------------------------------------------------------------------------

    def decode_with(self, coding: bytes) -> None:
        """Undo this content coding. Raises `EngineUnreachable` for one that was not to be expected."""
        if coding not in {b"gzip", b"x-gzip", b"deflate"}:
            name = coding.decode("latin-1")
            raise EngineUnreachable(f"the engine's answer is encoded as {name!r}, which nobody asked for")
        self._decoder = _Decoder(gzip=coding != b"deflate")

    def flush(self) -> None:
        """A read of the connection is parsed: hand on what it brought."""
        parsed = self.parsed
        if not parsed:
            return
        data = parsed[0] if len(parsed) == 1 else b"".join(parsed)
        parsed.clear()
        if self._take is not None and len(data) <= READ_BYTES:
            self._hand_over(data)
        elif self._take is not None:
            for at in range(0, len(data), READ_BYTES):
                self._hand_over(data[at : at + READ_BYTES])
        else:
            self._hold(data)

    def end(self, error: Exception | None = None) -> None:
        """Nothing more comes: the body is complete, or broken off with this error."""
        if self._ended or self._error is not None:
            return
        self._ended, self._error = error is None, error
        self.pass_by = None
        self._read_on()
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._take is not None and error is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(True)

    # ---- inside --------------------------------------------------------------------------------------

    def _hand_over(self, data: bytes) -> None:
        if self._take is None or self._waiter is None or self._waiter.done():
            self._hold(data)
            return
        try:
            if self._take(data):
                return
        except Exception as error:  # noqa: BLE001 - raised where the body is waited for
            self._waiter.set_exception(error)
            return
        self._waiter.set_result(False)

    def _hold(self, data: bytes) -> None:
        self.pass_by = None  # nothing overtakes it
        self._held.append(data)
        self._bytes += len(data)
        if self._bytes >= _HIGH_BYTES and not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def _next(self, most: int) -> bytes:
        """Up to so many bytes of what is held, which is not empty."""
        data = self._held.pop(0)
        if len(data) > most:
            self._held.insert(0, data[most:])
            data = data[:most]
        elif self._held:
            parts, size = [data], len(data)
            while self._held and size + len(self._held[0]) <= most:
                parts.append(self._held.pop(0))
                size += len(parts[-1])
            data = b"".join(parts)
        self._bytes -= len(data)
        if self._paused and self._bytes < _LOW_BYTES:
            self._read_on()
        return data

    def _read_on(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._transport.resume_reading()
        self._paused = False

    async def _wait(self) -> bool:
        assert self._waiter is None, "one reader at a time"
        self._waiter = self._loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None


class _Decoder:
    """gzip or deflate, a bounded piece at a time. ``deflate`` comes in zlib's frame, and bare from some."""

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._engine = zlib.decompressobj(wbits=_GZIP if gzip else _ZLIB)
        self._begun = False
        self._undecoded = b""

    def decode(self, data: bytes, most: int) -> bytes:
        if not self._begun and not self._gzip and data[0] & 0x0F != 8:
            self._engine = zlib.decompressobj(wbits=_RAW_DEFLATE)
        self._begun = True
        self._undecoded += data
        return self.rest(most)

    def rest(self, most: int) -> bytes:
        """What has come already; empty if that takes more of the body. Raises `EngineUnreachable`."""
        data = b""
        while not data and self._undecoded:
            if self._engine.eof:
                if not self._gzip:
                    raise EngineUnreachable("the engine's answer goes on behind its compressed body")
                self._engine = zlib.decompressobj(wbits=_GZIP)  # a further member
            try:
                data = self._engine.decompress(self._undecoded, most)
            except zlib.error as error:
                raise EngineUnreachable("the engine's answer cannot be decompressed") from error
            self._undecoded = self._engine.unconsumed_tail or self._engine.unused_data
        if not data and not self._engine.eof:  # zlib may hold output that `most` had no room for
            data = self._engine.decompress(b"", most)
        return data

    def check_end(self) -> None:
        """The body is over. Raises `EngineUnreachable` if what was compressed is not."""
        if self._begun and not self._engine.eof:
            raise EngineUnreachable("the engine's compressed answer ended in the middle")


class KnownHead(NamedTuple):
    """The head of an answer with status 200, in chunks, after which the connection is kept."""

    data: bytes
    headers: dict[bytes, bytes]
    """What the parser has made of it."""

    @classmethod
    def of(cls, read: bytes, headers: dict[bytes, bytes]) -> KnownHead | None:
        """Of the first read of such an answer, if all of the head is in it."""
        size = read.find(b"\r\n\r\n") + 4
        data = read[:size]
        if size < len(_OK) or not data.startswith(_OK) or data.count(b"\n") != data.count(b"\r\n"):
            return None
        return cls(data, headers)


class EngineAnswer:
    """One answer: `head` waits for status and headers, `content` is the body.

    Its callbacks are the parser's. The parser looks at what is not as usual: an answer that begins with the
    very bytes of the `known` head goes without it for as long as each read is whole chunks.
    """

    __slots__ = (
        "_before_chunk",
        "_complete",
        "_framed",
        "_head",
        "_head_bytes",
        "_known",
        "_loop",
        "_over",
        "_parser",
        "_to_head",
        "content",
        "headers",
        "learned",
        "on_body",
        "reusable",
        "status",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        *,
        to_head: bool,
        known: KnownHead | None = None,
    ) -> None:
        """`to_head`: of a HEAD request, so that no body follows whatever the headers say."""
        self._loop = loop
        self._to_head = to_head
        self._known = None if to_head else known
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """By lower-case name; several of a name are joined by commas."""
        self.content = AnswerBody(loop, transport)
        self.on_body = self.content.parsed.append
        self.reusable = False
        """Once the answer is complete, the connection can take the next request."""
        self.learned: KnownHead | None = None
        """By what the next answer may be known."""
        self._head: asyncio.Future[None] | None = None
        self._head_bytes = 0  # that came since the last of the body
        self._before_chunk = False  # the next read begins a chunk of the body
        self._framed = False  # the body's end is in the protocol, not the end of the connection
        self._complete = False
        self._over = False  # nothing that comes is a part of it
        self._parser: httptools.HttpResponseParser | None = None

    # ---- for the relay -------------------------------------------------------------------------------

    @property
    def content_type(self) -> str:
        """Without its parameters, in lower case."""
        return self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")

    @property
    def content_length(self) -> int | None:
        """Bytes of the body as sent, where the engine says so and does not send it in chunks."""
        length = self.headers.get(b"content-length", b"")
        if self.status == _NO_CONTENT or b"transfer-encoding" in self.headers:
            return None
        return int(length) if length.isdigit() else None

    @property
    def complete(self) -> bool:
        """The engine has sent all of it."""
        return self._complete

    @property
    def begun(self) -> bool:
        """A byte of the answer has come."""
        return self.status > 0 or self._head_bytes > 0

    async def head(self) -> None:
        """Wait for status and headers. Raises `EngineUnreachable`."""
        if not self.status:
            self._head = self._loop.create_future()
            await self._head

    async def read(self) -> bytes:
        """The whole body. Raises `EngineUnreachable`."""
        parts = []
        while data := await self.content.readany():
            parts.append(data)
        return b"".join(parts)

    # ---- for the connection --------------------------------------------------------------------------

    def received(self, data: bytes) -> bool:
        """Parse what has come. False if nothing that follows on this connection could be trusted."""
        if self._before_chunk and (pass_by := self.content.pass_by) is not None and pass_by(data):
            return True
        if self._over:
            return False
        rest = data if self._parser is not None else self._without_parser(data)
        if rest and not self._parse(rest):
            return False
        if self.content.parsed:
            self._head_bytes = 0
            self.content.flush()
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._fail(EngineUnreachable("the head or the trailer of the engine's answer is too large"))
            return False
        if self._complete:
            self._finish()
        return True

    def ended(self) -> None:
        """The engine has closed its side."""
        if self.status and not self._framed and not self._complete:
            self._complete = True
            self._finish()
        else:
            self._fail(EngineUnreachable(LOST))

    def lost(self) -> None:
        """The connection is gone."""
        self._fail(EngineUnreachable(LOST))

    # ---- callbacks of the parser; `on_body` is one, too ------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            raise EngineUnreachable(_NOT_HTTP)  # more than was asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status:
            return  # a trailer
        name = name.lower()
        before = self.headers.get(name)
        self.headers[name] = value if before is None else before + b", " + value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self.status:
            return  # of the head that a parser is given which begins behind it
        status = self._parser.get_status_code()
        if not _FIRST_STATUS <= status <= _LAST_STATUS:
            raise EngineUnreachable(_NOT_HTTP)
        if status < 200:
            self.headers = {}  # of an interim answer; the real one follows
            return
        headers = self.headers
        coding = headers.get(b"content-encoding", b"").lower()
        if coding not in {b"", b"identity"}:
            self.content.decode_with(coding)
        chunked = b"chunked" in headers.get(b"transfer-encoding", b"").lower()
        bodiless = self._to_head or status in (_NO_CONTENT, 304)
        self._framed = chunked or b"content-length" in headers or bodiless
        self.reusable = self._parser.should_keep_alive() and self._framed and not self._to_head
        self._complete = self._to_head
        self._headed(status)

    def on_chunk_header(self) -> None:
        self._before_chunk = False

    def on_chunk_complete(self) -> None:
        self._before_chunk = True

    def on_message_complete(self) -> None:
        if self.status:
            self._complete = True

    # ---- inside --------------------------------------------------------------------------------------

    def _without_parser(self, data: bytes) -> bytes:
        """Take a head that is known, and whole chunks; returns what is left for the parser."""
        at = 0
        if not self.status:
            known = self._known
            if self._head_bytes or known is None or not data.startswith(known.data):
                return data
            self.headers, at = known.headers, len(known.data)
            self._framed = self.reusable = self._before_chunk = True
            self._headed(200)
        parsed = self.content.parsed
        while size := _CHUNK_SIZE.match(data, at):
            begin = size.end()
            end = begin + int(size[1], 16)
            if not data.startswith(b"\r\n", end):
                break
            if begin == end:
                if len(data) > end + 2:
                    break
                self._complete = True
                return b""
            parsed.append(data[begin:end])
            at = end + 2
        return data[at:]

    def _parse(self, data: bytes) -> bool:
        """The same with the parser, of all that has not been taken. False as `received`."""
        is_first = not self.begun
        self._head_bytes += len(data)
        try:
            if (parser := self._parser) is None:
                parser = self._parser = httptools.HttpResponseParser(self)
                if self.status:
                    parser.feed_data(_IN_CHUNKS)
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.content.flush()
            self.reusable = False
            self._fail(_refusal_in(error))
            return False
        self._before_chunk &= data.endswith(b"\r\n")  # else the size of the next has begun
        if is_first and self._is_usual():
            self.learned = KnownHead.of(data, self.headers)
        return True

    def _headed(self, status: int) -> None:
        """Status and headers are here."""
        self.status = status
        if self._head is not None and not self._head.done():
            self._head.set_result(None)

    def _is_usual(self) -> bool:
        """Whether it is one of those that `KnownHead` is for."""
        headers = self.headers
        return (
            self.status == 200
            and self.reusable
            and headers.get(b"transfer-encoding") == b"chunked"
            and b"content-encoding" not in headers
        )

    def _finish(self) -> None:
        self._over, self._parser = True, None
        self.content.end()

    def _fail(self, error: Exception) -> None:
        self._over, self._parser = True, None
        if self._complete:
            self.content.end()
            return
        self.reusable = False
        if self._head is not None and not self._head.done():
            self._head.set_exception(error)
        self.content.end(error)


def _refusal_in(error: Exception) -> EngineUnreachable:
    """Ours, if one of the callbacks has raised it; else what the parser's own error means."""
    cause = error.__context__
    return cause if isinstance(cause, EngineUnreachable) else EngineUnreachable(_NOT_HTTP)
