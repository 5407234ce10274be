"""A request's share of its tenant's limits: taken before it begins, settled when it has ended."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import lru_cache
from types import TracebackType

from tokenflow_gateway.relay.errors import RateLimited
from tokenflow_gateway.relay.upstream import Header
from tokenflow_gateway.tenants.limits import Lease, LimitStore, Quota, Subject, Verdict
from tokenflow_gateway.tenants.model import Limits

__all__ = ["Allowance", "allowed", "quota_headers"]


class Allowance:
    """What a request has taken. A context manager, for one that uses just that much."""

    __slots__ = ("_lease", "_limits")

    def __init__(self, limits: LimitStore, lease: Lease | None) -> None:
        """`lease`: None where nothing is limited."""
        self._limits = limits
        self._lease = lease

    def settle(self, used_tokens: int | None) -> None:
        """The request has ended, and used so many; None: as many as were taken."""
        if self._lease is not None:
            self._limits.settle(self._lease, used_tokens)

    def __enter__(self) -> Allowance:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle(None)


async def allowed(
    limits: LimitStore,
    subjects: tuple[Subject, ...],
    *,
    tokens: int,
    headers: list[Header],
    generates: bool = True,
) -> Allowance:
    """Count a request for these, until the context is left. Raises `RateLimited`.

    `headers` of its answer get the ``x-ratelimit-*`` ones. One that `generates` nothing needs no place among
    the streams at a time, and takes none.
    """
    if not generates:
        subjects = tuple(Subject(name, replace(own, concurrent_streams=None)) for name, own in subjects)
    if not subjects:
        return Allowance(limits, None)
    lease_id = f"{random.getrandbits(128):032x}"  # a name, and no secret
    verdict = await limits.take(subjects, lease_id=lease_id, tokens=tokens)
    headers += quota_headers(verdict)
    if verdict.lease is None:
        raise _refusal(verdict, tokens)
    if not generates:
        limits.settle(verdict.lease, None)
        return Allowance(limits, None)
    return Allowance(limits, verdict.lease)


def quota_headers(verdict: Verdict) -> list[Header]:
    """As OpenAI's: the limit, what is left of it, and how long until nothing of it is used."""
    told: list[Header] = []
    if (quota := verdict.requests) is not None:
        told += zip(_REQUESTS, _values(quota), strict=True)
    if (quota := verdict.tokens) is not None:
        told += zip(_TOKENS, _values(quota), strict=True)
    return told


_REQUESTS, _TOKENS = (
    (b"x-ratelimit-limit-" + kind, b"x-ratelimit-remaining-" + kind, b"x-ratelimit-reset-" + kind)
    for kind in (b"requests", b"tokens")
)


def _values(quota: Quota) -> tuple[bytes, bytes, bytes]:
    return b"%d" % quota.limit, b"%d" % quota.remaining, _duration(quota.reset_s).encode()


def _duration(seconds: float) -> str:
    """``850ms``, ``12.5s`` or ``1m0s``, as OpenAI writes it."""
    return f"{math.ceil(seconds * 1000)}ms" if seconds < 1 else _in_tenths(math.ceil(seconds * 10))


@lru_cache(maxsize=1024)
def _in_tenths(tenths: int) -> str:
    minutes, rest = divmod(tenths / 10, 60)
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
