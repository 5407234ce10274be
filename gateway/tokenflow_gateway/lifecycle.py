"""A stream from its opening until the engine has confirmed that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable

import msgspec
import structlog

from tokenflow_engine.protocol import (
    Aborted,
    Consumption,
    GatewayMessage,
    StreamClosed,
    StreamOpened,
    StreamState,
)
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.link.client import EngineLink
from tokenflow_gateway.link.feed import ReaderFeed
from tokenflow_gateway.metrics import Metrics
from tokenflow_gateway.readers.registry import ReaderRegistry
from tokenflow_gateway.relay.errors import RelayError
from tokenflow_gateway.relay.stream import End, Stream, StreamTable
from tokenflow_gateway.relay.upstream import EngineRequest, Upstream

__all__ = ["Lifecycle"]

_log = structlog.stdlib.get_logger("tokenflow.streams")

CONFIRM_WITHIN_S = 5.0
"""An abort that is not confirmed by then is given up on, logged and counted."""


class _Closing(msgspec.Struct, frozen=True):
    """A stream whose engine has been told of its end."""

    stream: Stream
    since: float
    accounted: int
    """Tokens that were counted as generated at the end."""


class Lifecycle:
    """Opens and closes streams, tells the engines, and hears from them (`link.client.LinkEvents`).

    Engines without a link are told over SGLang's ``/abort_request`` where they have it, and otherwise only
    by the closed connection, or over the ``cancel`` of a response that they go on with without one.
    """

    def __init__(
        self, streams: StreamTable, readers: ReaderRegistry, metrics: Metrics, upstream: Upstream
    ) -> None:
        self.streams = streams
        self._readers = readers
        self._metrics = metrics
        self._upstream = upstream
        self._links: dict[str, EngineLink] = {}
        self._closing: dict[str, _Closing] = {}  # by age
        self._overdue: asyncio.TimerHandle | None = None  # for the eldest of them, or one that was
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_told = asyncio.Event()
        self._all_told.set()
        self.on_settled: list[Callable[[Stream], None]] = []
        """Each is called once for each stream, when nothing of it is left and its counts are final."""
        self.feed = ReaderFeed(streams, readers, self._send_readings)

    def attach(self, engine: Engine, link: EngineLink) -> None:
        self._links[engine.name] = link

    # ---- what requests call: never waits ---------------------------------------------------------

    def open(self, stream: Stream) -> None:
        """Record a stream and announce it, ahead of its HTTP request."""
        self.streams.add(stream)
        self._all_told.clear()
        link = self._links.get(stream.engine.name)
        if link is not None:
            link.opened(_announcement(stream))

    def close(self, stream: Stream, end: End) -> None:
        """The request is over for the client, for whatever reason; the engine is told."""
        stream.end = end
        stream.ended = time.monotonic()
        if stream.streaming and end != "retried":  # that one's reader goes on with the next stream
            self._readers.ended(stream.rid, stream.reader, now=stream.ended)
        self._metrics.stream_ended(stream, end)
        link = self._links.get(stream.engine.name)
        if link is not None and link.closed(stream.rid, end, urgent=not stream.engine_is_done):
            self._await_confirmation(stream)
        else:
            self._close_without_link(stream)

    def reader_changed(self, stream: Stream) -> None:
        """Something new is known of a stream's reader."""
        self.feed.changed(stream)
        if stream.on_reader_change is not None:
            stream.on_reader_change()

    async def told(self, *, within_s: float) -> None:
        """Wait until all streams have ended and their engines know, but no longer than that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._all_told.wait()

    async def aclose(self) -> None:
        """Let go of everything that is still waited for."""
        if self._overdue is not None:
            self._overdue.cancel()
        for rid in list(self._closing):
            self._remove(rid)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what links call (LinkEvents) ------------------------------------------------------------

    def announcements(self, engine: Engine) -> Iterable[GatewayMessage]:
        self.feed.reset(self.streams.of_engine(engine))
        for stream in self.streams.of_engine(engine):
            if stream.end is None:
                yield _announcement(stream)
            else:
                yield StreamClosed(rid=stream.rid, reason=stream.end)

    def on_states(self, engine: Engine, states: list[StreamState]) -> None:
        self.streams.apply(states)

    def on_aborted(self, engine: Engine, aborted: Aborted) -> None:
        closing = self._closing.pop(aborted.rid, None)
        stream = self.streams.get(aborted.rid)
        if closing is None or stream is None:
            return
        stream.counted = max(stream.counted or 0, aborted.generated)
        self._remove(aborted.rid)
        if stream.engine_is_done:
            self._compare_counts(stream, aborted)
            return
        self._metrics.abort_confirmed(time.monotonic() - closing.since)
        self._metrics.generated_late(stream, aborted.generated - closing.accounted)
        _log.info("engine dropped the request", **_names(stream), end=stream.end, generated=aborted.generated)

    # ---- inside ----------------------------------------------------------------------------------

    def _send_readings(self, engine: Engine, message: Consumption) -> bool:
        link = self._links.get(engine.name)
        return link is not None and link.consumed(message)

    def _compare_counts(self, stream: Stream, confirmed: Aborted) -> None:
        if stream.usage_tokens is not None and confirmed.generated != stream.usage_tokens:
            self._metrics.count_mismatches.labels(stream.engine.name).inc()
            _log.warning(
                "token counts differ",
                **_names(stream),
                plugin=confirmed.generated,
                usage=stream.usage_tokens,
            )

    def _await_confirmation(self, stream: Stream) -> None:
        self._closing[stream.rid] = _Closing(stream, time.monotonic(), stream.generated)
        if self._overdue is None:
            self._overdue = asyncio.get_running_loop().call_later(CONFIRM_WITHIN_S, self._look_for_overdue)

    def _look_for_overdue(self) -> None:
        """Give up on those who have waited for long enough, and look again when the next one has."""
        self._overdue = None
        now = time.monotonic()
        while self._closing:
            closing = next(iter(self._closing.values()))
            left_s = closing.since + CONFIRM_WITHIN_S - now
            if left_s > 0:
                self._overdue = asyncio.get_running_loop().call_later(left_s, self._look_for_overdue)
                return
            self._give_up(closing.stream)

    def _give_up(self, stream: Stream) -> None:
        del self._closing[stream.rid]
        self._remove(stream.rid)
        if not stream.engine_is_done:
            self._metrics.aborts.labels("unconfirmed").inc()
            _log.warning("engine did not confirm an abort", **_names(stream), engine=stream.engine.name)

    def _close_without_link(self, stream: Stream) -> None:
        self._remove(stream.rid)
        if stream.engine_is_done:
            return
        self._metrics.aborts.labels("unlinked").inc()
        if not stream.engine.healthy:
            return
        is_named = stream.engine.kind == "sglang"
        abort = self._upstream.abort(stream.engine, stream.rid) if is_named else stream.abort
        if abort is not None:
            task = asyncio.get_running_loop().create_task(self._post_abort(stream, abort))
            self._tasks.add(task)
            self._all_told.clear()
            task.add_done_callback(self._posted)

    def _posted(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._note_told()

    def _remove(self, rid: str) -> Stream | None:
        stream = self.streams.remove(rid)
        if stream is not None:
            for settle in self.on_settled:
                settle(stream)
        self._note_told()
        return stream

    def _note_told(self) -> None:
        if not self.streams and not self._tasks:
            self._all_told.set()

    async def _post_abort(self, stream: Stream, abort: EngineRequest) -> None:
        try:
            async with asyncio.timeout(CONFIRM_WITHIN_S), abort as answer:
                while await answer.content.readany():
                    pass
        except (RelayError, TimeoutError) as error:
            _log.warning("engine could not be told to abort", **_names(stream), error=str(error))


def _names(stream: Stream) -> dict[str, str]:
    """By which a log's lines on one request are found."""
    return {"rid": stream.rid, "request_id": stream.request_id}


def _announcement(stream: Stream) -> StreamOpened:
    return StreamOpened(
        rid=stream.rid,
        at=stream.opened_at,
        tenant=stream.tenant,
        sla=stream.grant.sla.name,
        reader=stream.reader.reader,
        declared_rate=stream.reader.declared_rate,
        weight=stream.grant.weight,
        ttft_s=stream.grant.ttft_s - stream.queued_s,
        may_park=stream.grant.may_park,
        lead_cap_s=stream.grant.sla.lead_cap_s,
    )
