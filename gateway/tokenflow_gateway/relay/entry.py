"""Between a request and its engine: the tenant's limits, then the queue, then the choice of an engine."""

from __future__ import annotations

import time
from functools import partial
from types import TracebackType

from tokenflow_gateway.engines.affinity import affinity_key, session_key
from tokenflow_gateway.engines.placement import Wish
from tokenflow_gateway.engines.registry import EngineRegistry
from tokenflow_gateway.relay.allowance import Allowance, allowed
from tokenflow_gateway.relay.asking import Asking, Request
from tokenflow_gateway.relay.attempts import Attempts
from tokenflow_gateway.relay.guard import RequestGuard
from tokenflow_gateway.relay.outcome import Outcome
from tokenflow_gateway.relay.request import Body, RequestFields
from tokenflow_gateway.relay.routes import response_of
from tokenflow_gateway.relay.stream import Stream
from tokenflow_gateway.tenants.admission import Admission, Entrant, Ticket
from tokenflow_gateway.tenants.admission_settings import EstimateSettings
from tokenflow_gateway.tenants.estimate import Estimate, estimate
from tokenflow_gateway.tenants.limits import LimitStore
from tokenflow_gateway.tenants.model import Grant
from tokenflow_gateway.tenants.roster import Roster

__all__ = ["Entered", "Entry"]

_NOTHING_DONE = frozenset({"refused", "retried"})
"""Ends of streams for which no engine has computed anything."""


class Entered:
    """A request that may begin. A context manager: its limits are settled at the end."""

    __slots__ = ("_allowance", "_estimate", "_used", "attempts", "queued_s")

    def __init__(
        self, attempts: Attempts, estimate: Estimate, allowance: Allowance, *, queued_s: float
    ) -> None:
        """`queued_s`: for which it has waited before the engines."""
        self.attempts = attempts
        self.queued_s = queued_s
        self._estimate = estimate
        self._allowance = allowance
        self._used = 0

    def __enter__(self) -> Entered:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._allowance.settle(self._used)

    def note(self, stream: Stream, outcome: Outcome) -> None:
        """One of its streams has ended: count what the tenant has used by it."""
        if outcome.untold and not stream.generated:
            self._used += self._estimate.total
            return
        if outcome.end in _NOTHING_DONE or (outcome.end == "engine_lost" and not stream.generated):
            return
        prompt = self._estimate.prompt if stream.prompt_tokens is None else stream.prompt_tokens
        self._used += prompt + stream.generated


class Entry:
    """Lets requests in. Of one configuration; `limits` and `admission` outlive it."""

    def __init__(
        self,
        *,
        limits: LimitStore,
        admission: Admission,
        asking: Asking,
        roster: Roster,
        estimates: EstimateSettings,
    ) -> None:
        self._limits = limits
        self._admission = admission
        self._asking = asking
        self._estimates = estimates
        self._behind = {
            name: frozenset(other.name for other in roster.classes.values() if other.weight < sla.weight)
            for name, sla in roster.classes.items()
        }

    async def entered(
        self,
        request: Request,
        parsed: Body,
        fields: RequestFields,
        grant: Grant,
        *,
        among: frozenset[str] | None,
    ) -> Entered:
        """Inside of it, the request has its share of its tenant's limits, and an engine to ask.

        `among`: names of the engines that may be asked. Raises `RateLimited`, `QueueFull`, `QueueTimeout`,
        `ModelNotFound`, `NoEngine`, or what guards raise.
        """
        expected = self._estimate(parsed)
        headers = request.exchange.own_headers
        allowance = await allowed(self._limits, request.head.subjects, tokens=expected.total, headers=headers)
        try:
            entrant = self._entrant(request, parsed, fields, grant, expected, among)
            ticket = self._admission.enter(entrant)
            queued_s = 0.0 if ticket.engine is not None else await self._wait(request, ticket)
            attempts = self._asking.attempts(
                fields.model, among=among, wish=entrant.wish, first=ticket.engine
            )
        except BaseException:
            allowance.settle(0)
            raise
        return Entered(attempts, expected, allowance, queued_s=queued_s)

    async def passed(self, request: Request) -> Allowance:
        """The same for what nobody follows: it counts as a request, and by its size, and never waits.

        Raises `RateLimited`.
        """
        exchange = request.exchange
        return await allowed(
            self._limits,
            request.head.subjects,
            tokens=_tokens_in(request),
            headers=exchange.own_headers,
            generates=response_of(exchange.path) is None,
        )

    def _estimate(self, parsed: Body) -> Estimate:
        return estimate(
            parsed,
            assumed_output=self._estimates.assumed_output_tokens,
            most_output=self._estimates.most_output_tokens,
        )

    def _entrant(
        self,
        request: Request,
        parsed: Body,
        fields: RequestFields,
        grant: Grant,
        expected: Estimate,
        among: frozenset[str] | None,
    ) -> Entrant:
        registry: EngineRegistry = self._asking.registry
        return Entrant(
            sla=grant.sla.name,
            weight=grant.sla.weight,
            tenant=grant.tenant,
            tenant_weight=grant.principal.tenant.weight,
            user=grant.fairness_id or "",
            cost=expected.total,
            due_s=grant.ttft_s * grant.sla.weight / grant.weight,  # a request's priority concerns nobody else
            wish=Wish(
                ttft_s=grant.ttft_s,
                tokens=expected.prompt,
                behind=self._behind.get(grant.sla.name, frozenset()),
                key=self._conversation(request, parsed, grant) if len(registry) > 1 else None,
            ),
            pool=(registry.known(fields.model), among),
            engines=partial(registry.serving, fields.model, among=among),
        )

    def _conversation(self, request: Request, parsed: Body, grant: Grant) -> bytes | None:
        return affinity_key(parsed, session_key(request.exchange.headers, grant.tenant))

    async def _wait(self, request: Request, ticket: Ticket) -> float:
        """Seconds in the queue; the client may leave meanwhile, and the request's total time may be over."""
        exchange = request.exchange
        since, trace = time.monotonic(), exchange.trace
        try:
            async with RequestGuard(exchange.receive, request.total, exchange.connection):
                await self._admission.wait(ticket)
        finally:
            if trace is not None:
                trace.waited("admission", since)
        return time.monotonic() - since


def _tokens_in(request: Request) -> int:
    """What a body that is not read may hold of them; nothing where it is no text."""
    text = any(
        name == b"content-type" and value.startswith(b"application/json")
        for name, value in request.exchange.headers
    )
    return len(request.body) // 4 if text else 0
