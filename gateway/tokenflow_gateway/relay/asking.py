"""How engines are asked: under which limits, and which one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from types import TracebackType

import msgspec

from tokenflow_gateway.config import Timeouts
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.engines.placement import Wish
from tokenflow_gateway.engines.registry import ANY, EngineRegistry
from tokenflow_gateway.metrics import Metrics
from tokenflow_gateway.relay.attempts import BUSY, Attempts, RetryReason
from tokenflow_gateway.relay.dialects import Dialect
from tokenflow_gateway.relay.engine_answer import EngineAnswer
from tokenflow_gateway.relay.errors import (
    EngineTimeout,
    EngineUnreachable,
    FirstByteTimeout,
    NoEngine,
    PhaseTimeout,
    RelayError,
    RequestTooSlow,
)
from tokenflow_gateway.relay.exchange import Exchange
from tokenflow_gateway.relay.guard import RequestGuard, TotalTime
from tokenflow_gateway.relay.head import Head
from tokenflow_gateway.relay.outcome import Outcome
from tokenflow_gateway.relay.routes import route_of
from tokenflow_gateway.relay.upstream import EngineRequest, Header, Upstream
from tokenflow_gateway.tenants.model import Principal

__all__ = ["BUSY", "Asking", "Request"]


class Request(msgspec.Struct, eq=False):
    """A request as it arrived, and how long it may take."""

    exchange: Exchange
    dialect: Dialect
    head: Head
    body: bytes
    total: TotalTime
    may_replace: bool = True
    """No connection of it has been replaced; see `EngineRequest`."""

    @property
    def timeouts(self) -> Timeouts:
        return self.head.timeouts

    @property
    def principal(self) -> Principal:
        return self.head.principal

    def gave_up_early(self, error: RelayError) -> bool:
        """Whether the engine has had less time for this than it has for tenants in general."""
        if not isinstance(error, EngineTimeout):
            return False
        phase = f"{error.phase}_s"
        return bool(getattr(self.timeouts, phase) < getattr(self.head.usual, phase))


class _Answered:
    """Context manager around one engine's answer and the guard over it."""

    __slots__ = ("_asked", "_engine", "_guard", "_request")

    def __init__(self, asked: Request, engine: Engine, guard: RequestGuard, request: EngineRequest) -> None:
        self._asked = asked
        self._engine = engine
        self._guard = guard
        self._request = request

    async def __aenter__(self) -> tuple[RequestGuard, EngineAnswer]:
        guard = self._guard
        guard.enter()
        guard.expect(self._asked.timeouts.first_byte_s, FirstByteTimeout)
        trial = self._engine.breaker.asked()
        try:
            answer = await self._request.answer()
        except BaseException as error:
            self._engine.breaker.unheard(trial)  # a failure of the engine's is told by `failed`
            await guard.__aexit__(type(error), error, error.__traceback__)
            raise
        finally:
            self._asked.may_replace = self._request.may_replace
        self._engine.breaker.succeeded()
        return guard, answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._request.leave()
        await self._guard.__aexit__(kind, error, trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Asks engines for what clients want of them, and counts what goes wrong with that."""

    upstream: Upstream
    registry: EngineRegistry
    metrics: Metrics
    max_attempts: int
    on_engine_failure: Callable[[Engine], None]

    def attempts(
        self,
        model: str | None,
        *,
        among: Set[str] | None = None,
        wish: Wish = ANY,
        first: Engine | None = None,
        streams: bool = True,
    ) -> Attempts:
        """`among`: names of the engines that may be asked; `first`: the one that has been chosen already.

        `streams`: see `EngineRegistry.pick`. Raises `ModelNotFound` or `NoEngine`.
        """
        return Attempts(
            self.registry,
            model,
            most=self.max_attempts,
            among=among,
            wish=wish,
            first=first,
            streams=streams,
        )

    def ask(
        self, request: Request, engine: Engine, body: bytes | None, own_headers: Iterable[Header] = ()
    ) -> _Answered:
        """The engine's answer to this request, under the guard. Raises `ClientGone` or a `RelayError`."""
        exchange, timeouts = request.exchange, request.timeouts
        if exchange.trace is not None:
            own_headers = (*own_headers, *exchange.trace.propagated())
        return _Answered(
            request,
            engine,
            RequestGuard(exchange.receive, request.total, exchange.connection),
            self.upstream.request(
                engine,
                exchange.method,
                exchange.path_qs,
                headers=request.head.passed,
                own_headers=own_headers,
                request_id=exchange.request_id,
                body=body,
                connect_s=timeouts.connect_s,
                may_replace=request.may_replace,
            ),
        )

    def ask_another(
        self,
        exchange: Exchange,
        engine: Engine,
        attempts: Attempts,
        reason: RetryReason,
        outcome: Outcome,
    ) -> None:
        """Note in `outcome` who is asked instead of `engine`, if the client has heard nothing yet."""
        if exchange.status is not None or (another := attempts.another()) is None:
            return
        self.metrics.retries.labels(engine.name, reason).inc()
        outcome.end, outcome.next = "retried", another

    def failed(self, request: Request, engine: Engine, error: RelayError) -> None:
        """Have the engine probed, if the failure may be its own. A tenant's impatience is none of it."""
        if isinstance(error, (NoEngine, EngineUnreachable, EngineTimeout)):
            if not request.gave_up_early(error):
                engine.breaker.failed(time.monotonic())
            self.on_engine_failure(engine)

    def note_timeout(self, exchange: Exchange, error: RelayError) -> None:
        """Count a phase that took too long, whosever it was."""
        if isinstance(error, (PhaseTimeout, RequestTooSlow)):
            phase = error.phase if isinstance(error, PhaseTimeout) else "body"
            self.metrics.timeouts.labels(route_of(exchange.path) or "other", phase).inc()
