"""What generates text: a stream record and a `rid` for each request, followed token by token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec

from tokenflow_engine.buffer import DEFAULT_RATE, VirtualBuffer
from tokenflow_gateway.config import KeepAliveSettings, Settings
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.lifecycle import Lifecycle
from tokenflow_gateway.metrics import Metrics
from tokenflow_gateway.readers.progress import Capabilities
from tokenflow_gateway.readers.registry import ReaderRegistry
from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.answer import (
    EventHead,
    is_event_stream,
    note_document,
    relay_document,
    relay_error,
    relay_events,
)
from tokenflow_gateway.relay.asking import BUSY, Asking, Request
from tokenflow_gateway.relay.attempts import Attempts, retry_reason
from tokenflow_gateway.relay.background import cancel, end_of, response_ended
from tokenflow_gateway.relay.delivery import Delivery
from tokenflow_gateway.relay.dialects import Dialect, Document, Meter
from tokenflow_gateway.relay.entry import Entered, Entry
from tokenflow_gateway.relay.errors import ClientTooSlow, NotRelayed, RelayError, ShuttingDown
from tokenflow_gateway.relay.exchange import Exchange
from tokenflow_gateway.relay.guard import ClientGone, RequestGuard
from tokenflow_gateway.relay.head import Head, Wants
from tokenflow_gateway.relay.keepalive import KeepAlive, read_keep_alive
from tokenflow_gateway.relay.outcome import Outcome, log_end
from tokenflow_gateway.relay.pacer import Pacer
from tokenflow_gateway.relay.request import (
    Body,
    ReaderFields,
    RequestFields,
    body_user,
    read_delivery,
    read_reader,
    with_priority,
)
from tokenflow_gateway.relay.request_names import RequestNames
from tokenflow_gateway.relay.stream import Stream
from tokenflow_gateway.tenants.grants import grant, grant_headers
from tokenflow_gateway.tenants.identity import identity_of
from tokenflow_gateway.tenants.model import Grant
from tokenflow_gateway.tenants.roster import Roster
from tokenflow_gateway.tenants.wishes import read_wishes

__all__ = ["LAST_WORDS_S", "Generations"]

LAST_WORDS_S = 1.0
"""For a client's connection to take the end of a stream that has failed; a client that stalls will not."""
_MODEL_CHARS = 200
"""What is kept of a model's name for logs and views: it comes from the client."""


class _Asked(msgspec.Struct, kw_only=True):
    """What a metered request wants, on whichever engine."""

    request: Request
    parsed: Body
    fields: RequestFields
    grant: Grant
    track: ReaderTrack
    paced: bool
    keep_alive: KeepAliveSettings
    arrived: float = msgspec.field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generations:
    """Serves metered requests. Holds no state of its own: streams live in `lifecycle`."""

    settings: Settings
    asking: Asking
    readers: ReaderRegistry
    lifecycle: Lifecycle
    metrics: Metrics
    capabilities: Capabilities
    names: RequestNames
    roster: Roster
    entry: Entry

    async def serve(
        self, request: Request, parsed: Body, fields: RequestFields, keeper: Engine | None
    ) -> None:
        """One request's life, on one engine or, while none has done anything for it, on another.

        `keeper`: the only one that may be asked, where there is such. Raises `BadRequest`, or what keeps it
        from an engine; other failures reach the client here.
        """
        dialect, head = request.dialect, request.head
        wants = head.wants
        if wants is None:
            wants = head.wants = self._wants(head)
        granted = self._grant(request, parsed, wants)
        asked = _Asked(
            request=request,
            parsed=parsed,
            fields=fields,
            grant=granted,
            track=self.readers.opened(
                tenant=granted.tenant,
                user=wants.reader.user or body_user(dialect.user(parsed)) or wants.identity,
                reader=wants.reader.reader,
                declared_rate=granted.declared_rate,
                rate_floor=granted.sla.rate_floor,
                max_rate=granted.sla.max_rate,
                now=time.monotonic(),
            ),
            paced=wants.paced,
            keep_alive=wants.keep_alive,
        )
        among = granted.engines if keeper is None else frozenset({keeper.name})
        with await self.entry.entered(request, parsed, fields, granted, among=among) as entered:
            engine: Engine | None = entered.attempts.first
            while engine is not None:
                engine = await self._attempt(asked, engine, entered)

    def _wants(self, head: Head) -> Wants:
        """Raises `BadRequest`."""
        headers = head.passed.all
        reader = read_reader(headers, None, user_header=self.settings.user_header)
        return Wants(
            reader=reader,
            identity=identity_of(headers),
            grant=self._granted(head, reader),
            paced=read_delivery(headers) == "paced",
            keep_alive=read_keep_alive(headers, self.settings.keep_alive),
        )

    def _granted(self, head: Head, reader: ReaderFields, priority: msgspec.Raw | None = None) -> Grant:
        wishes = read_wishes(head.passed.all, priority)
        return grant(self.roster, head.principal, wishes, reader=reader.reader, rate=reader.rate)

    def _grant(self, request: Request, parsed: Body, wants: Wants) -> Grant:
        """What the request gets of what it asks for; its answer says so. Raises `BadRequest`."""
        priority = parsed.get("priority")
        granted = wants.grant if priority is None else self._granted(request.head, wants.reader, priority)
        request.exchange.own_headers += grant_headers(granted, tells_class=self.roster.tells_class)
        return granted

    async def _attempt(self, asked: _Asked, engine: Engine, entered: Entered) -> Engine | None:
        """One stream's life: opened, followed, closed. Its failure reaches the client once it is closed.

        Returns the engine to try next, if this one has done nothing.
        """
        exchange, dialect, fields = asked.request.exchange, asked.request.dialect, asked.fields
        sglang = engine.kind == "sglang"
        now = time.monotonic()
        stream = Stream(
            rid=self.names.new(dialect.rid_prefix, asked.grant.tenant, engine.name),
            request_id=exchange.request_id,
            route=exchange.path,
            model=(fields.model or "")[:_MODEL_CHARS],
            engine=engine,
            reader=asked.track,
            engine_copy=VirtualBuffer(rate=asked.grant.declared_rate or DEFAULT_RATE, now=now),
            grant=asked.grant,
            streaming=fields.stream,
            started=asked.arrived,
            queued_s=entered.queued_s,
        )
        if exchange.trace is not None:
            stream.trace = exchange.trace.attempt(stream, asked.parsed)
        meter = dialect.meter(
            asked.track, fields, max_event_bytes=self.settings.max_event_bytes, sglang=sglang
        )
        pacer = Pacer(now=now) if asked.paced else None
        outcome = Outcome()
        self.lifecycle.streams.delivers(stream)
        try:
            async with Delivery(exchange, stream, self.settings.delivery, pacer=pacer) as delivery:
                self.lifecycle.open(stream)
                try:
                    await self._follow(asked, stream, delivery, meter, entered.attempts, outcome)
                finally:
                    self.lifecycle.close(stream, outcome.end)
                    log_end(stream, outcome)
                    if stream.trace is not None:
                        stream.trace.end(stream, outcome.end)
                    entered.note(stream, outcome)
                if outcome.error is not None:
                    with self.metrics.delivering_after_end(stream):
                        await self._last_words(exchange, dialect, delivery, meter, outcome.error)
        finally:
            self.lifecycle.streams.delivered(stream)
        return outcome.next

    async def _follow(
        self,
        asked: _Asked,
        stream: Stream,
        delivery: Delivery,
        meter: Meter,
        attempts: Attempts,
        outcome: Outcome,
    ) -> None:
        """Relay one answer and note in `outcome` how it ended. Raises only faults of our own."""
        exchange = asked.request.exchange
        head = EventHead(exchange, stream, handle=f"{stream.rid}.{self.capabilities.grant(stream.rid)}")
        try:
            answered = self._ask(asked, stream, head, delivery, meter, attempts, outcome)
            words = KeepAlive.of(asked.keep_alive, asked.request.dialect, stream, head, delivery, meter)
            if words is None:
                document = await answered
            else:
                async with words:
                    document = await answered
            if document.is_pending:
                await self._outlast(asked, stream, document, outcome)
        except ClientGone:
            outcome.end, outcome.next = "client_gone", None
        except RelayError as error:
            self.asking.failed(asked.request, stream.engine, error)
            self.asking.note_timeout(exchange, error)
            idle = stream.generated == 0 and (stream.streaming or stream.engine.linked)
            if (reason := retry_reason(error, idle=idle)) is not None:
                self.asking.ask_another(exchange, stream.engine, attempts, reason, outcome)
            if outcome.next is None:
                outcome.failed(error)
        except asyncio.CancelledError:  # the server's grace is over; what is left to do is short
            outcome.failed(ShuttingDown())
        if meter.done and delivery.empty and not meter.failed:  # what came after changes nothing for anyone
            outcome.end = "finished"

    async def _ask(
        self,
        asked: _Asked,
        stream: Stream,
        head: EventHead,
        delivery: Delivery,
        meter: Meter,
        attempts: Attempts,
        outcome: Outcome,
    ) -> Document:
        """The engine's answer, whatever it is: what it says, if it is one document.

        Raises `ClientGone` or a `RelayError`.
        """
        request, dialect, engine = asked.request, asked.request.dialect, stream.engine
        idle_s = request.timeouts.idle_s
        rid = stream.rid if engine.kind == "sglang" else None
        own, parsed = with_priority(request.body, asked.parsed, asked.grant.engine_priority)
        document = Document()
        body = dialect.upstream_body(own, parsed, rid=rid, stream=asked.fields.stream)
        async with self.asking.ask(request, engine, body, dialect.upstream_headers(rid)) as (guard, response):
            if response.status == BUSY:
                self.asking.ask_another(request.exchange, engine, attempts, "busy", outcome)
            if outcome.next is not None:
                stream.answered = True
            elif 300 <= response.status < 400:
                raise NotRelayed(request.exchange.method, request.exchange.path)
            elif response.status >= 400:
                outcome.end = "refused"
                await relay_error(request.exchange, response, guard, dialect, idle_s=idle_s)
            elif is_event_stream(response):
                await relay_events(head, response, guard, stream, delivery, meter, idle_s=idle_s)
                outcome.end = "engine_error" if meter.failed else "finished"
            else:
                document = await relay_document(
                    request.exchange,
                    response,
                    guard,
                    stream,
                    dialect,
                    idle_s=idle_s,
                    max_bytes=self.settings.max_answer_bytes,
                )
                outcome.end = "finished"
        return document

    async def _outlast(self, asked: _Asked, stream: Stream, document: Document, outcome: Outcome) -> None:
        """The engine has only begun, whatever its answer to the client: wait for the end of the response."""
        request, response_id = asked.request, document.response_id
        outcome.untold = True
        if response_id is None:
            return  # it cannot be asked for
        request.exchange.over()
        request.body = b""  # there may be many, for long, and no other engine is asked now
        asked.parsed.clear()
        if stream.engine.kind != "sglang":
            stream.abort = cancel(self.asking, request, stream.engine, response_id)
        most = self.settings.max_answer_bytes
        document = await response_ended(self.asking, request, stream.engine, response_id, max_bytes=most)
        note_document(stream, document)
        stream.delivered = stream.received
        stream.answered = True
        outcome.untold = document.usage is None
        outcome.end = end_of(document)

    async def _last_words(
        self, exchange: Exchange, dialect: Dialect, delivery: Delivery, meter: Meter, error: RelayError
    ) -> None:
        """What the client is still to get: text that waits for it, then the failure (not after the end).

        The engine is free by now. A client that does not take it in time is cut off.
        """
        if exchange.status is None:
            await exchange.fail(error, dialect.error_body(error))
            return
        if exchange.complete or not exchange.streaming:
            return
        end = b"" if meter.done else dialect.error_events(error, sequence=meter.sequence)
        await delivery.last_words(end)
        try:
            if not isinstance(error, ShuttingDown):
                async with RequestGuard(exchange.receive, connection=exchange.connection):
                    await delivery.finish()
                return
        except ClientGone:
            return
        except (ClientTooSlow, asyncio.CancelledError):
            if exchange.complete:
                return
        delivery.hurry()
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await delivery.finish()
        except (ClientTooSlow, TimeoutError):
            await exchange.break_off()
