"""The transport: knows which answers are streams, hands them over event by event, and has them reported.

One implementation for httpx and httpx2: the classes here are mixed with the base classes of either.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from tokenflow_client._events import EventSplitter, content_pattern, count_chars, is_done
from tokenflow_client._library import Library
from tokenflow_client._reader import READER_ID, TokenFlowReader, find_reader
from tokenflow_client._reporter import Answer, Post, Reporter, Statistics
from tokenflow_client._sockets import keep_receive_buffer_small
from tokenflow_client._track import Track

__all__ = ["Tracking", "make_async_transport", "make_sync_transport"]

POST_TIMEOUT_S = 2.0
_STREAM_HEADER = "x-tokenflow-stream"
_STREAM_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_CAPABILITY = re.compile(r"[A-Za-z0-9_=-]{1,512}")
_PATH = re.compile(r"(/chat)?/completions$")
_STREAMED = re.compile(rb'"stream"\s*:\s*true')


class Tracking:
    """What the synchronous and the asynchronous transport do alike: requests in, tracks out."""

    def __init__(self, *, make_reader: Callable[[], TokenFlowReader], make_post: Callable[[], Post]) -> None:
        self._make_reader = make_reader
        self.reporter = Reporter(make_post)

    def reader_of(self, request: Any) -> TokenFlowReader | None:
        """The reader of a streamed completion, whose headers are set where the caller did not; else None."""
        reader_id = request.headers.pop(READER_ID, "")
        if request.method != "POST" or not _PATH.search(request.url.path) or not _is_streamed(request):
            return None
        reader = find_reader(reader_id) or self._make_reader()
        for name, value in reader.request_headers().items():
            request.headers.setdefault(name, value)
        request.headers["accept-encoding"] = "identity"
        return reader

    def track_of(self, request: Any, response: Any, reader: TokenFlowReader) -> Track | None:
        """What to follow this answer with, if it is a stream that can be followed."""
        if response.status_code != 200 or reader.evidence == "none":
            return None
        stream_id, _, capability = response.headers.get(_STREAM_HEADER, "").partition(".")
        plain = response.headers.get("content-encoding", "identity") == "identity"
        if not (plain and _STREAM_ID.fullmatch(stream_id) and _CAPABILITY.fullmatch(capability)):
            self.reporter.not_followed()
            return None
        path = _PATH.sub(f"/streams/{stream_id}/progress", request.url.path)
        url = str(request.url.copy_with(path=path, query=None))
        track = Track(
            url=url, capability=capability, reader=reader, clock=time.monotonic, wake=self.reporter.wake
        )
        self.reporter.follow(track)
        return track


class _Stream:
    """A body, handed over one event at a time: the next pull says that the one before has been read."""

    def __init__(self, inner: Any, track: Track, pattern: re.Pattern[bytes]) -> None:
        self._inner = inner
        self._track = track
        self._brings_content = pattern.search
        self._events = EventSplitter()

    def __del__(self) -> None:
        # Dropped without `close`. No wake: it takes a lock, which this thread may hold already (a collection
        # can begin anywhere); the reporter will see it at its next tick.
        if not self._track.is_over:
            self._track.ended = True

    def _hand_over(self, event: bytes) -> None:
        track = self._track
        if self._brings_content(event):
            track.hand_over(content=True, chars=count_chars(event) if track.wants_chars else 0)
            return
        track.hand_over(content=False)
        if is_done(event):
            track.over()  # now: an SDK need not read on from here

    def _leave(self) -> None:
        if not self._track.is_over:
            self._track.end()


class _SyncStream(_Stream):
    def __iter__(self) -> Iterator[bytes]:
        track = self._track
        try:
            for data in self._inner:
                for event in self._events.feed(data):
                    self._hand_over(event)
                    yield event
                    track.asked()
        except Exception:
            track.over()  # openai 1.x does not close an answer that broke
            raise
        if rest := self._events.end():
            yield rest
        track.over()

    def close(self) -> None:
        self._leave()
        self._inner.close()


class _AsyncStream(_Stream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        track = self._track
        try:
            async for data in self._inner:
                for event in self._events.feed(data):
                    self._hand_over(event)
                    yield event
                    track.asked()
        except Exception:
            track.over()  # openai 1.x does not close an answer that broke
            raise
        if rest := self._events.end():
            yield rest
        track.over()

    async def aclose(self) -> None:
        self._leave()
        await self._inner.aclose()


class _Transport:
    """`paced` has small receive buffers and carries what people read; `plain` carries everything else."""

    def __init__(self, *, tracking: Tracking, paced: Any, plain: Any, stream: type[_Stream]) -> None:
        self._tracking = tracking
        self._paced = paced
        self._plain = plain
        self._stream = stream

    def statistics(self) -> Statistics:
        """What has been reported, and what has not."""
        return self._tracking.reporter.statistics()

    def _pool_for(self, reader: TokenFlowReader | None) -> Any:
        return self._plain if reader is None or reader.kind == "machine" else self._paced

    def _follow(self, request: Any, response: Any, reader: TokenFlowReader | None) -> Any:
        if reader is not None and (track := self._tracking.track_of(request, response, reader)):
            response.stream = self._stream(response.stream, track, content_pattern(request.url.path))
        return response


class _SyncTransport(_Transport):
    def handle_request(self, request: Any) -> Any:
        reader = self._tracking.reader_of(request)
        response = self._pool_for(reader).handle_request(request)
        return self._follow(request, response, reader)

    def close(self) -> None:
        """Send the last reports, for two seconds at most, and close all connections."""
        self._tracking.reporter.close()
        self._paced.close()
        self._plain.close()


class _AsyncTransport(_Transport):
    async def handle_async_request(self, request: Any) -> Any:
        reader = self._tracking.reader_of(request)
        response = await self._pool_for(reader).handle_async_request(request)
        return self._follow(request, response, reader)

    async def aclose(self) -> None:
        """As `close`, without blocking the loop."""
        from anyio import to_thread  # of the HTTP library, whichever it is

        await to_thread.run_sync(self._tracking.reporter.close)
        await self._paced.aclose()
        await self._plain.aclose()


class _HttpPost:
    """Reports through a small client of the same library, with the same certificates and proxy."""

    def __init__(self, library: Library, options: Mapping[str, Any]) -> None:
        transport = library.http.HTTPTransport(**options)
        self._client = library.http.Client(transport=transport, timeout=POST_TIMEOUT_S, trust_env=False)

    def send(self, url: str, body: bytes) -> Answer:
        headers = {"content-type": "application/json"}
        response = self._client.post(url, content=body, headers=headers)
        return Answer(response.status_code, _seconds(response.headers.get("retry-after", "")))

    def close(self) -> None:
        self._client.close()


def make_sync_transport(
    library: Library,
    *,
    make_reader: Callable[[], TokenFlowReader],
    receive_buffer_bytes: int | None,
    options: Mapping[str, Any],
) -> Any:
    """A transport for the library's `Client`. `options` are those of its `HTTPTransport`."""
    plain, paced = (library.http.HTTPTransport(**options) for _ in range(2))
    if receive_buffer_bytes is not None:
        keep_receive_buffer_small(paced, library, size_bytes=receive_buffer_bytes, is_async=False)
    transport, stream = _sync_classes(library.name, library.http)
    tracking = Tracking(make_reader=make_reader, make_post=lambda: _HttpPost(library, options))
    return transport(tracking=tracking, paced=paced, plain=plain, stream=stream)


def make_async_transport(
    library: Library,
    *,
    make_reader: Callable[[], TokenFlowReader],
    receive_buffer_bytes: int | None,
    options: Mapping[str, Any],
) -> Any:
    """A transport for the library's `AsyncClient`. `options` are those of its `AsyncHTTPTransport`."""
    plain, paced = (library.http.AsyncHTTPTransport(**options) for _ in range(2))
    if receive_buffer_bytes is not None:
        keep_receive_buffer_small(paced, library, size_bytes=receive_buffer_bytes, is_async=True)
    transport, stream = _async_classes(library.name, library.http)
    tracking = Tracking(make_reader=make_reader, make_post=lambda: _HttpPost(library, options))
    return transport(tracking=tracking, paced=paced, plain=plain, stream=stream)


@functools.cache
def _sync_classes(_name: str, http: Any) -> tuple[Any, Any]:
    transport = type("TokenFlowTransport", (_SyncTransport, http.BaseTransport), {})
    return transport, type("TokenFlowStream", (_SyncStream, http.SyncByteStream), {})


@functools.cache
def _async_classes(_name: str, http: Any) -> tuple[Any, Any]:
    transport = type("AsyncTokenFlowTransport", (_AsyncTransport, http.AsyncBaseTransport), {})
    return transport, type("AsyncTokenFlowStream", (_AsyncStream, http.AsyncByteStream), {})


def _is_streamed(request: Any) -> bool:
    try:
        return _STREAMED.search(request.content) is not None
    except RuntimeError:  # `RequestNotRead`: an upload piece by piece, which no SDK uses for completions
        return False


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.isdecimal() else 0.0
