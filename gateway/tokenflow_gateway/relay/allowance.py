"""A request's share of its tenant's limits: taken before it begins, settled when it has ended."""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tokenflow_gateway.relay.errors import RateLimited
from tokenflow_gateway.relay.upstream import Header
from tokenflow_gateway.tenants.limits import LimitStore, Quota, Verdict, subjects_of
from tokenflow_gateway.tenants.model import Limits, Principal

__all__ = ["Allowance", "allowed", "quota_headers"]


@dataclass(slots=True)
class Allowance:
    """What a request has taken, and at its end what it has used."""

    used_tokens: int | None = None
    """None: as many as were taken."""


@asynccontextmanager
async def allowed(
    limits: LimitStore, principal: Principal, *, tokens: int, headers: list[Header]
) -> AsyncIterator[Allowance]:
    """Inside, the request counts as one of its tenant's and key's. Raises `RateLimited`.

    `headers` of its answer get the ``x-ratelimit-*`` ones.
    """
    allowance = Allowance()
    subjects = subjects_of(principal)
    if not subjects:
        yield allowance
        return
    verdict = await limits.take(subjects, lease_id=uuid.uuid4().hex, tokens=tokens)
    headers += quota_headers(verdict)
    if verdict.lease is None:
        raise _refusal(verdict, tokens)
    try:
        yield allowance
    finally:
        limits.settle(verdict.lease, allowance.used_tokens)


def quota_headers(verdict: Verdict) -> list[Header]:
    """As OpenAI's: the limit, what is left of it, and how long until nothing of it is used."""
    told: list[Header] = []
    for kind, quota in ((b"requests", verdict.requests), (b"tokens", verdict.tokens)):
        if quota is not None:
            told += _headers_of(kind, quota)
    return told


def _headers_of(kind: bytes, quota: Quota) -> list[Header]:
    return [
        (b"x-ratelimit-limit-" + kind, str(quota.limit).encode()),
        (b"x-ratelimit-remaining-" + kind, str(quota.remaining).encode()),
        (b"x-ratelimit-reset-" + kind, _duration(quota.reset_s).encode()),
    ]


def _duration(seconds: float) -> str:
    """``850ms``, ``12.5s`` or ``1m0s``, as OpenAI writes it."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"


_WORDS = {
    "requests": "{} requests a minute",
    "tokens": "{} tokens a minute",
    "streams": "{} requests at a time",
    "budget": "{} tokens a {}",
}


def _refusal(verdict: Verdict, tokens: int) -> RateLimited:
    assert verdict.kind is not None
    assert verdict.subject is not None
    whose = "tenant" if verdict.subject.name.startswith("tenant:") else "key"
    limits: Limits = verdict.subject.limits
    number = {
        "requests": limits.requests_per_minute,
        "tokens": limits.tokens_per_minute,
        "streams": limits.concurrent_streams,
        "budget": limits.budget_tokens,
    }[verdict.kind]
    limit = _WORDS[verdict.kind].format(number, limits.budget_period)
    if verdict.retry_s == math.inf:
        message = f"this request may take {tokens} tokens, more than the {whose}'s limit of {limit}"
    else:
        message = f"the {whose}'s limit of {limit} is reached: try again in {_duration(verdict.retry_s)}"
    return RateLimited(message, reason=verdict.kind, retry_s=verdict.retry_s)
