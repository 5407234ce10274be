"""The proxy itself: a raw ASGI application for ``/v1/*``.

What generates text (`dialects.DIALECTS`) is *metered*: it gets a stream record and a `rid`, and is followed
token by token. Everything else passes through unread. `docs/structures.md` follows one stream through this
module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from tokenflow_gateway.config import Settings
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.metrics import Metrics
from tokenflow_gateway.relay.answer import (
    is_event_stream,
    relay_error,
    relay_foreign_events,
    relay_raw,
)
from tokenflow_gateway.relay.asking import BUSY, Asking, Request
from tokenflow_gateway.relay.attempts import Attempts, retry_reason
from tokenflow_gateway.relay.dialects import DIALECTS, Dialect, dialect_of
from tokenflow_gateway.relay.engine_answer import EngineAnswer
from tokenflow_gateway.relay.entry import Entry
from tokenflow_gateway.relay.errors import NotRelayed, RelayError, ResponseNotFound, ShuttingDown
from tokenflow_gateway.relay.exchange import Exchange
from tokenflow_gateway.relay.generation import LAST_WORDS_S, Generations
from tokenflow_gateway.relay.guard import ClientGone, RequestGuard, TotalTime
from tokenflow_gateway.relay.head import Head
from tokenflow_gateway.relay.outcome import Outcome
from tokenflow_gateway.relay.request import parse_object, without_priority
from tokenflow_gateway.relay.request_names import RequestNames
from tokenflow_gateway.relay.routes import check_route, response_of, route_of
from tokenflow_gateway.relay.timeouts import TimeoutTable
from tokenflow_gateway.relay.upstream import ClientHeaders
from tokenflow_gateway.tenants.access import Access
from tokenflow_gateway.tenants.limits import subjects_of

if TYPE_CHECKING:
    from tokenflow_gateway.telemetry.telemetry import Telemetry

__all__ = ["Relay"]

_log = structlog.stdlib.get_logger("tokenflow.relay")

_REPEATABLE = frozenset({"GET", "HEAD"})
"""Methods that change nothing, so that asking twice does no harm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """Relays requests to engines. Holds no state of its own: streams live in `lifecycle`."""

    settings: Settings
    access: Access
    timeouts: TimeoutTable
    asking: Asking
    entry: Entry
    generations: Generations
    names: RequestNames
    metrics: Metrics
    stopping: Callable[[], bool]
    """The gateway is shutting down: what runs may finish, nothing new begins."""
    telemetry: Telemetry | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        structlog.contextvars.bind_contextvars(request_id=exchange.request_id)  # of this request's task alone
        dialect = dialect_of(exchange.path)
        if self.telemetry is not None:
            exchange.trace = self.telemetry.request(exchange)
        exchange.on_over = partial(self._over, exchange)
        try:
            await self._answer(exchange, dialect)
        except asyncio.CancelledError:  # the server's grace is over
            await self._tell_in_time(exchange, dialect, ShuttingDown())
        finally:
            exchange.over()

    async def _answer(self, exchange: Exchange, dialect: Dialect) -> None:
        """Whatever comes of the request, told to its client."""
        try:
            await self._serve(await self._read(exchange, dialect, self._head(exchange)))
        except ClientGone:
            pass
        except RelayError as error:
            self.asking.note_timeout(exchange, error)
            if error.reason is not None:
                self.metrics.rejected.labels(error.reason).inc()
            await self._tell_client(exchange, dialect, error)
        except Exception:  # noqa: BLE001 - one request's fault of ours, told to its client in the usual form
            _log.exception("fault in the relay", request_id=exchange.request_id, route=exchange.path)
            fault = RelayError("the gateway failed on this request: see its log")
            await self._tell_client(exchange, dialect, fault)

    def _head(self, exchange: Exchange) -> Head:
        """What is asked, and who asks, before anything else of the request is read; its key goes no further.

        Raises `NotServed`, `MethodNotAllowed`, `Unauthorized` or `Forbidden`.
        """
        connection = exchange.connection
        head = None if connection is None else connection.head
        if head is None or not head.is_of(exchange, self.access):
            head = self._read_head(exchange)
            if connection is not None:
                connection.head = head
        exchange.headers = head.passed.all
        return head

    def _read_head(self, exchange: Exchange) -> Head:
        check_route(exchange.method, exchange.path)
        query, route = exchange.scope["query_string"], route_of(exchange.path)
        principal = self.access.client(exchange.headers, query=query)
        return Head(
            method=exchange.method,
            path=exchange.path,
            query=query,
            came=exchange.headers,
            access=self.access,
            validity=self.access.validity(principal),
            principal=principal,
            subjects=subjects_of(principal),
            passed=ClientHeaders(self.access.passed_on(exchange.headers, principal, peer=exchange.peer)),
            route=route,
            timeouts=self.timeouts.of(route, principal.name),
            usual=self.timeouts.of(route, ""),
        )

    async def _read(self, exchange: Exchange, dialect: Dialect, head: Head) -> Request:
        """The whole request. Raises `ClientGone` or a `RelayError`."""
        timeouts = head.timeouts
        total = TotalTime(timeouts.total_s, arrived=asyncio.get_running_loop().time())
        body_s = timeouts.body_s if timeouts.total_s is None else min(timeouts.body_s, timeouts.total_s)
        body = await exchange.read_body(self.settings.max_body_bytes, within_s=body_s)
        if self.stopping():
            raise ShuttingDown()
        return Request(exchange, dialect, head, body, total)

    async def _serve(self, request: Request) -> None:
        """Raises a `RelayError` that is yet to be told."""
        if request.exchange.path not in DIALECTS:
            keeper = self._keeper(request, response_of(request.exchange.path), param="response_id")
            await self._pass_through(request, keeper)
            return
        parsed = parse_object(request.body)
        fields = request.dialect.read_fields(parsed)
        keeper = self._keeper(request, fields.continues, param="previous_response_id")
        await self.generations.serve(request, parsed, fields, keeper)

    def _keeper(self, request: Request, response_id: str | None, *, param: str) -> Engine | None:
        """The engine that has this stored response, where it is known: the only one to be asked.

        Raises `ResponseNotFound` for a response that is not known to be the tenant's.
        """
        if response_id is None:
            return None
        principal, registry = request.principal, self.asking.registry
        if self.access.separates_tenants and not self.names.is_of(response_id, principal.name):
            raise ResponseNotFound(param=param)
        name = self.names.engine_of(response_id, (engine.name for engine in registry))
        if name is None:
            return None
        if principal.engines is not None and name not in principal.engines:
            raise ResponseNotFound(param=param)
        return registry.get(name)

    # ---- what is not ours to read ------------------------------------------------------------------

    async def _pass_through(self, request: Request, keeper: Engine | None) -> None:
        body = without_priority(request.body)
        among = request.principal.engines if keeper is None else {keeper.name}
        with await self.entry.passed(request):
            attempts = self.asking.attempts(_model_of(body), among=among, first=keeper, streams=False)
            engine: Engine | None = attempts.first
            while engine is not None:
                engine = await self._pass_to(engine, request, body or None, attempts)

    async def _pass_to(
        self, engine: Engine, request: Request, body: bytes | None, attempts: Attempts
    ) -> Engine | None:
        """Relay one engine's answer, or return the engine to try next, if this one has done nothing."""
        exchange, outcome = request.exchange, Outcome()
        try:
            async with self.asking.ask(request, engine, body) as (guard, response):
                if response.status == BUSY:
                    self.asking.ask_another(exchange, engine, attempts, "busy", outcome)
                if outcome.next is None:
                    await self._pass(request, response, guard)
        except RelayError as error:
            self.asking.failed(request, engine, error)
            if (reason := retry_reason(error, idle=exchange.method in _REPEATABLE)) is not None:
                self.asking.ask_another(exchange, engine, attempts, reason, outcome)
            if outcome.next is None:
                raise
            self.asking.note_timeout(exchange, error)
        return outcome.next

    async def _pass(self, request: Request, response: EngineAnswer, guard: RequestGuard) -> None:
        exchange, idle_s = request.exchange, request.timeouts.idle_s
        if 300 <= response.status < 400:
            raise NotRelayed(exchange.method, exchange.path)
        if response.status >= 400:
            await relay_error(exchange, response, guard, request.dialect, idle_s=idle_s)
        elif is_event_stream(response):
            most = self.settings.max_event_bytes
            await relay_foreign_events(exchange, response, guard, idle_s=idle_s, max_event_bytes=most)
        else:
            await relay_raw(exchange, response, guard, idle_s=idle_s)

    # ---- failures ----------------------------------------------------------------------------------

    async def _tell_client(self, exchange: Exchange, dialect: Dialect, error: RelayError) -> None:
        """The failure as a status if the answer has not begun, otherwise as the end of the stream.

        An answer that is neither is broken off, which the client notices, as it must.
        """
        if exchange.status is None:
            await exchange.fail(error, dialect.error_body(error))
        elif exchange.complete:
            return
        elif exchange.streaming:
            await exchange.finish(dialect.error_events(error))
        else:
            await exchange.break_off()

    async def _tell_in_time(self, exchange: Exchange, dialect: Dialect, error: RelayError) -> None:
        """The same in the little time that is left."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._tell_client(exchange, dialect, error)
        except TimeoutError:
            await exchange.break_off()

    def _over(self, exchange: Exchange) -> None:
        self.metrics.response_begun(route_of(exchange.path) or "other", exchange.status)
        if exchange.trace is not None:
            exchange.trace.end(exchange.status)


class _Model(msgspec.Struct):
    model: str | None = None


def _model_of(body: bytes) -> str | None:
    """The model a body names, if it is JSON that names one. The engine judges the rest of it."""
    try:
        return msgspec.json.decode(body, type=_Model).model if body else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
