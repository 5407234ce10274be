"""The proxy itself: a raw ASGI application for ``/v1/*``.

Chat and text completions are *metered*: they get a stream record and a `rid`, and are followed token by
token. Everything else passes through unread. `docs/structures.md` follows one stream through this module.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from tokenflow_engine.buffer import DEFAULT_RATE, VirtualBuffer
from tokenflow_gateway.config import Settings
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.engines.registry import EngineRegistry
from tokenflow_gateway.lifecycle import Lifecycle
from tokenflow_gateway.metrics import Metrics
from tokenflow_gateway.readers.progress import Capabilities
from tokenflow_gateway.readers.registry import ReaderRegistry
from tokenflow_gateway.relay.answer import (
    is_event_stream,
    relay_document,
    relay_error,
    relay_events,
    relay_foreign_events,
    relay_raw,
)
from tokenflow_gateway.relay.delivery import Delivery
from tokenflow_gateway.relay.errors import (
    ClientTooSlow,
    EngineTimeout,
    EngineUnreachable,
    NoEngine,
    NotRelayed,
    RelayError,
    ShuttingDown,
    StreamTruncated,
    error_events,
)
from tokenflow_gateway.relay.exchange import Exchange
from tokenflow_gateway.relay.guard import ClientGone, RequestGuard
from tokenflow_gateway.relay.meter import StreamMeter
from tokenflow_gateway.relay.pacer import Pacer
from tokenflow_gateway.relay.request import (
    METERED_ROUTES,
    parse_object,
    read_delivery,
    read_fields,
    read_reader,
    upstream_body,
)
from tokenflow_gateway.relay.stream import ANONYMOUS, End, Stream, new_rid
from tokenflow_gateway.relay.upstream import Upstream

__all__ = ["Relay"]

_log = structlog.stdlib.get_logger("tokenflow.relay")

_MODEL_CHARS = 200
"""What is kept of a model's name for logs and views: it comes from the client."""
_LAST_WORDS_S = 1.0
"""For a client's connection to take the end of a stream that has failed; a client that stalls will not."""
_PASSED_ROUTES = frozenset(
    {"/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank", "/v1/score", "/v1/audio/transcriptions"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """Relays requests to engines. Holds no state of its own: streams live in `lifecycle`."""

    settings: Settings
    registry: EngineRegistry
    readers: ReaderRegistry
    upstream: Upstream
    lifecycle: Lifecycle
    metrics: Metrics
    capabilities: Capabilities
    on_engine_failure: Callable[[Engine], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            body = await exchange.read_body(
                self.settings.max_body_bytes, within_s=self.settings.timeouts.body_s
            )
            if exchange.method == "POST" and exchange.path in METERED_ROUTES:
                await self._metered(exchange, body)
            else:
                await self._pass_through(exchange, body)
        except ClientGone:
            pass
        except RelayError as error:
            await self._tell_client(exchange, error)
        except Exception:  # noqa: BLE001 - one request's fault of ours, told to its client in the usual form
            _log.exception("fault in the relay", request_id=exchange.request_id, route=exchange.path)
            await self._tell_client(exchange, RelayError("the gateway failed on this request: see its log"))
        finally:
            self._count_response(exchange)

    # ---- metered: chat and text completions --------------------------------------------------------

    async def _metered(self, exchange: Exchange, body: bytes) -> None:
        """One stream's life: opened, followed, closed. Its failure reaches the client once it is closed."""
        parsed = parse_object(body)
        fields = read_fields(parsed)
        paced = read_delivery(exchange.headers) == "paced"
        reader = read_reader(exchange.headers, parsed, user_header=self.settings.user_header)
        engine = self.registry.pick(fields.model)
        stream = Stream(
            rid=new_rid(),
            request_id=exchange.request_id,
            route=exchange.path,
            model=(fields.model or "")[:_MODEL_CHARS],
            engine=engine,
            reader=self.readers.opened(
                tenant=ANONYMOUS,
                user=reader.user,
                reader=reader.reader,
                declared_rate=reader.rate,
                now=time.monotonic(),
            ),
            engine_copy=VirtualBuffer(rate=reader.rate or DEFAULT_RATE, now=time.monotonic()),
            streaming=fields.stream,
        )
        sglang = engine.kind == "sglang"
        sent = upstream_body(parsed, rid=stream.rid if sglang else None, stream=fields.stream)
        meter = StreamMeter(
            stream.reader,
            max_event_bytes=self.settings.max_event_bytes,
            keep_usage=fields.wants_usage,
            cut_usage=sglang and not fields.wants_usage_in_chunks,
        )
        pacer = Pacer(now=stream.started) if paced else None
        with self.lifecycle.streams.delivering(stream):
            async with Delivery(exchange, stream, self.settings.delivery, pacer=pacer) as delivery:
                async with self._open(stream) as outcome:
                    await self._follow(exchange, stream, delivery, meter, sent, outcome)
                if outcome.error is not None:
                    with self.metrics.delivering_after_end(stream):
                        await self._last_words(exchange, delivery, outcome.error, answered=meter.done)

    @asynccontextmanager
    async def _open(self, stream: Stream) -> AsyncIterator[_Outcome]:
        """The stream is on record inside, and closed behind it on every path."""
        outcome = _Outcome()
        self.lifecycle.open(stream)
        try:
            yield outcome
        finally:
            self.lifecycle.close(stream, outcome.end)
            _log_stream(stream, outcome)

    async def _follow(
        self,
        exchange: Exchange,
        stream: Stream,
        delivery: Delivery,
        meter: StreamMeter,
        body: bytes,
        outcome: _Outcome,
    ) -> None:
        """Relay one answer and note in `outcome` how it ended. Raises only faults of our own."""
        try:
            async with self._asking(exchange, stream.engine, body) as (guard, response):
                if response.status >= 400:
                    outcome.end = "refused"
                    await relay_error(exchange, response)
                elif is_event_stream(response):
                    await relay_events(
                        exchange,
                        response,
                        guard,
                        stream,
                        delivery,
                        meter,
                        handle=f"{stream.rid}.{self.capabilities.grant(stream.rid)}",
                        idle_s=self.settings.timeouts.idle_s,
                    )
                    outcome.end = "engine_error" if meter.failed else "finished"
                else:
                    await relay_document(exchange, response, stream)
                    outcome.end = "finished"
        except ClientGone:
            outcome.end = "client_gone"
        except RelayError as error:
            outcome.failed(error)
            self._note_failure(stream.engine, error)
        except asyncio.CancelledError:  # the server's grace is over; what is left to do is short
            outcome.failed(ShuttingDown("the gateway is shutting down"))
        if meter.done and delivery.empty and not meter.failed:  # what came after changes nothing for anyone
            outcome.end = "finished"

    async def _last_words(
        self, exchange: Exchange, delivery: Delivery, error: RelayError, *, answered: bool
    ) -> None:
        """What the client is still to get: text that waits for it, then the failure (not after the end).

        The engine is free by now. A client that does not take it in time is cut off.
        """
        if exchange.status is None:
            await exchange.fail(error)
            return
        if not exchange.streaming:
            return
        await delivery.last_words(b"" if answered else error_events(exchange.path, error))
        try:
            if not isinstance(error, ShuttingDown):
                async with RequestGuard(exchange.receive):
                    await delivery.finish()
                return
        except ClientGone:
            return
        except (ClientTooSlow, asyncio.CancelledError):
            pass
        delivery.hurry()
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await delivery.finish()
        except (ClientTooSlow, TimeoutError):
            await exchange.break_off()

    # ---- everything else -------------------------------------------------------------------------

    async def _pass_through(self, exchange: Exchange, body: bytes) -> None:
        engine = self.registry.pick(_model_of(body))
        try:
            async with self._asking(exchange, engine, body or None) as (guard, response):
                if 300 <= response.status < 400:
                    raise NotRelayed(f"no such route: {exchange.method} {exchange.path}")
                if response.status >= 400:
                    await relay_error(exchange, response)
                elif is_event_stream(response):
                    await relay_foreign_events(
                        exchange,
                        response,
                        guard,
                        idle_s=self.settings.timeouts.idle_s,
                        max_event_bytes=self.settings.max_event_bytes,
                    )
                else:
                    await relay_raw(exchange, response, guard, idle_s=self.settings.timeouts.idle_s)
        except RelayError as error:
            self._note_failure(engine, error)
            raise

    # ---- shared ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _asking(
        self, exchange: Exchange, engine: Engine, body: bytes | None
    ) -> AsyncIterator[tuple[RequestGuard, aiohttp.ClientResponse]]:
        """The engine's answer to this request, under the guard. Raises `ClientGone` or a `RelayError`."""
        async with RequestGuard(exchange.receive) as guard:
            guard.expect(self.settings.timeouts.first_byte_s, "no answer")
            async with self.upstream.request(
                engine,
                exchange.method,
                exchange.path_qs,
                headers=exchange.headers,
                request_id=exchange.request_id,
                body=body,
            ) as response:
                yield guard, response

    async def _tell_client(self, exchange: Exchange, error: RelayError) -> None:
        """The failure as a status if the answer has not begun, otherwise as the end of the stream.

        An answer that is neither is left unfinished: the server then breaks the connection, which the
        client notices, as it must.
        """
        if exchange.status is None:
            await exchange.fail(error)
        elif exchange.streaming:
            await exchange.finish(error_events(exchange.path, error))

    def _note_failure(self, engine: Engine, error: RelayError) -> None:
        if isinstance(error, (NoEngine, EngineUnreachable, EngineTimeout)):
            self.on_engine_failure(engine)

    def _count_response(self, exchange: Exchange) -> None:
        known = exchange.path in METERED_ROUTES or exchange.path in _PASSED_ROUTES
        status = "none" if exchange.status is None else str(exchange.status)
        self.metrics.responses.labels(exchange.path if known else "other", status).inc()


@dataclass(slots=True)
class _Outcome:
    """How a stream ended, and what the client has yet to be told of it."""

    end: End = "failed"
    error: RelayError | None = None

    def failed(self, error: RelayError) -> None:
        self.end, self.error = _end_of(error), error


def _end_of(error: RelayError) -> End:
    if isinstance(error, ShuttingDown):
        return "shutdown"
    if isinstance(error, ClientTooSlow):
        return "client_too_slow"
    if isinstance(error, EngineTimeout):
        return "engine_timeout"
    if isinstance(error, StreamTruncated):
        return "truncated"
    if isinstance(error, (NoEngine, EngineUnreachable)):
        return "engine_lost"
    return "engine_error"


class _Model(msgspec.Struct):
    model: str | None = None


def _model_of(body: bytes) -> str | None:
    """The model a body names, if it is JSON that names one. The engine judges the rest of it."""
    try:
        return msgspec.json.decode(body, type=_Model).model if body else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _log_stream(stream: Stream, outcome: _Outcome) -> None:
    log = _log.info if outcome.end in {"finished", "refused", "client_gone"} else _log.warning
    log(
        "stream ended",
        rid=stream.rid,
        request_id=stream.request_id,
        route=stream.route,
        model=stream.model,
        engine=stream.engine.name,
        end=outcome.end,
        error=outcome.error and outcome.error.message,
        ttft_s=stream.ttft_s and round(stream.ttft_s, 4),
        delivered=stream.delivered,
        generated=stream.generated,
    )
