"""How much a tenant, or one of its keys, may use: requests and tokens a minute, streams at a time, a budget.

`LocalLimits` keeps count in this process, `store.shared_limits` in Redis, for a fleet. Both decide in one
step, so that requests which come at the same moment cannot all find the last free place. Tokens are taken as
an estimate when a request begins, and settled when it ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import itemgetter
from typing import Literal, NamedTuple, Protocol

import msgspec

from tokenflow_gateway.tenants.model import BudgetPeriod, Limits, Principal
from tokenflow_gateway.tenants.window import SlidingWindow, leaves_in_s, slot_of

__all__ = [
    "STREAM_RETRY_S",
    "Lease",
    "LimitKind",
    "LimitStore",
    "LocalLimits",
    "Quota",
    "Subject",
    "Verdict",
    "period_of",
    "period_start",
    "subjects_of",
    "tightest",
]

LimitKind = Literal["requests", "tokens", "streams", "budget"]
_DAY_S = 86_400
STREAM_RETRY_S = 1.0
"""When to ask again for one of the streams at a time: nobody knows when one will end."""


class Subject(NamedTuple):
    """Who is counted, such as ``tenant:acme`` or ``key:3f2a``, and what it may use."""

    name: str
    limits: Limits


def subjects_of(principal: Principal) -> tuple[Subject, ...]:
    """The tenant and the key, those that are limited: both have to have room.

    A key that replaces another goes on with what that has left.
    """
    subjects = []
    if not principal.tenant.limits.is_unlimited:
        subjects.append(Subject(f"tenant:{principal.name}", principal.tenant.limits))
    if principal.key_id is not None and not principal.limits.is_unlimited:
        subjects.append(Subject(f"key:{principal.key_origin or principal.key_id}", principal.limits))
    return tuple(subjects)


class Quota(msgspec.Struct, frozen=True, gc=False):
    """One limit of a minute as ``x-ratelimit-*`` headers tell it."""

    limit: int
    remaining: int
    reset_s: float
    """Until nothing of it is used, if nothing else comes."""


class Lease(msgspec.Struct, frozen=True):
    """What a request has taken, to be settled with the store that gave it."""

    id: str
    subjects: tuple[Subject, ...]
    tokens: int
    at: float
    """Of the store's clock, in seconds since the epoch."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a request may begin. `lease` is None where not, and then `kind` and `subject` say why."""

    lease: Lease | None
    requests: Quota | None = None
    tokens: Quota | None = None
    kind: LimitKind | None = None
    subject: Subject | None = None
    retry_s: float = 0.0
    """Infinite where waiting does not help: more is asked for than the limit ever allows."""


class LimitStore(Protocol):
    """Keeps count."""

    async def take(self, subjects: Sequence[Subject], *, lease_id: str, tokens: int) -> Verdict:
        """Count one request with so many tokens for all subjects, or for none if one has no room for it."""

    def settle(self, lease: Lease, tokens: int | None) -> None:
        """The request has ended, and has used so many tokens; None: as many as were taken. Never waits."""


def period_of(period: BudgetPeriod, now: float) -> tuple[str, float]:
    """The name of a budget's period, and seconds until the next one begins."""
    name, _, ends = _period(period, math.floor(now / _DAY_S))
    return name, ends - now


def period_start(period: BudgetPeriod, now: float) -> tuple[str, float]:
    """The name of a budget's period, and when it began."""
    name, began, _ = _period(period, math.floor(now / _DAY_S))
    return name, began


@lru_cache(maxsize=16)
def _period(period: BudgetPeriod, day: int) -> tuple[str, float, float]:
    """Name, beginning and end of the period with this day of the epoch. All begin at midnight of UTC."""
    first = datetime.fromtimestamp(day * _DAY_S, UTC)
    if period == "day":
        return f"{first:%Y-%m-%d}", first.timestamp(), (first + timedelta(days=1)).timestamp()
    first = first.replace(day=1)
    return f"{first:%Y-%m}", first.timestamp(), (first + timedelta(days=32)).replace(day=1).timestamp()


@dataclass(slots=True)
class _Account:
    """What one subject has used."""

    requests: SlidingWindow = field(default_factory=SlidingWindow)
    tokens: SlidingWindow = field(default_factory=SlidingWindow)
    leases: dict[str, int] = field(default_factory=dict)
    """Slot of each open request's tokens, by its lease."""
    period: str = ""
    of: BudgetPeriod | None = None
    """What `began` and `ends`, of `period`, are known of."""
    began: float = 0.0
    ends: float = 0.0
    spent: int = 0
    """Of the budget in `period`, by what is counted here."""
    spent_before: int = 0
    """Beside that: before this process began, by the record of usage."""


class LocalLimits:
    """Counts in this process. `Lease.at` and the windows are of `clock`: wall-clock seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    async def take(self, subjects: Sequence[Subject], *, lease_id: str, tokens: int) -> Verdict:
        return self.take_now(subjects, lease_id=lease_id, tokens=tokens)

    def take_now(
        self, subjects: Sequence[Subject], *, lease_id: str, tokens: int, processes: int = 1
    ) -> Verdict:
        """The same at once. `processes` that cannot ask each other have their share of the limits each."""
        now = self._clock()
        shares = [self._share(subject, processes) for subject in subjects] if processes > 1 else subjects
        seen = [(self._account(name), limits) for name, limits in shares]
        for account, limits in seen:
            if not self._has_room(account, limits, tokens, now):
                return self._refusal(shares, tokens, now)
        lease = Lease(lease_id, tuple(subjects), tokens, now)
        self.record(lease)
        requests, left = _quotas(seen, now)
        return Verdict(lease=lease, requests=requests, tokens=left)

    def _has_room(self, account: _Account, limits: Limits, tokens: int, now: float) -> bool:
        """Whether there is nothing that `_lacks` tells of."""
        most = limits.requests_per_minute
        if most is not None and account.requests.used(now) >= most:
            return False
        most = limits.tokens_per_minute
        if most is not None and account.tokens.used(now) + tokens > most:
            return False
        most = limits.concurrent_streams
        if most is not None and len(account.leases) >= most:
            return False
        most = limits.budget_tokens
        if most is None:
            return True
        self._turn(account, limits.budget_period, now)
        return account.spent_before + account.spent + tokens <= most

    def _refusal(self, subjects: Sequence[Subject], tokens: int, now: float) -> Verdict:
        lacks = [(*lack, subject) for subject in subjects for lack in self._lacks(subject, tokens, now)]
        retry_s, kind, subject = max(lacks, key=itemgetter(0))  # the reason that holds for longest
        requests, left = _quotas([(self._account(name), limits) for name, limits in subjects], now)
        return Verdict(
            lease=None, requests=requests, tokens=left, kind=kind, subject=subject, retry_s=retry_s
        )

    def record(self, lease: Lease) -> None:
        """Count a request, whether or not there is room for it."""
        at, tokens = lease.at, lease.tokens
        for name, limits in lease.subjects:
            account = self._account(name)
            account.requests.add(1, at)
            account.leases[lease.id] = account.tokens.add(tokens, at)
            self._turn(account, limits.budget_period, at)
            account.spent += tokens

    def restore(self, lease: Lease) -> None:
        """Count a request that began earlier, elsewhere, and is open."""
        now = self._clock()
        for subject in lease.subjects:
            account = self._account(subject.name)
            if lease.id in account.leases:
                continue
            account.leases[lease.id] = slot_of(lease.at)
            if leaves_in_s(slot_of(lease.at), now) > 0:
                account.requests.add(1, lease.at)
                account.leases[lease.id] = account.tokens.add(lease.tokens, lease.at)
            self._turn(account, subject.limits.budget_period, now)
            if account.began <= lease.at < account.ends:
                account.spent += lease.tokens

    def settle(self, lease: Lease, tokens: int | None) -> None:
        now = self._clock()
        change = 0 if tokens is None else tokens - lease.tokens
        for subject in lease.subjects:
            account = self._account(subject.name)
            slot = account.leases.pop(lease.id, None)
            if slot is None:
                continue
            account.tokens.change(slot, change, subject.limits.tokens_per_minute, now)
            self._turn(account, subject.limits.budget_period, now)
            if account.began <= lease.at < account.ends:
                account.spent = max(0, account.spent + change)

    def end_all(self, prefix: str) -> None:
        """Requests whose lease begins so are over, and nobody knows what they have used."""
        for account in self._accounts.values():
            for name in [name for name in account.leases if name.startswith(prefix)]:
                del account.leases[name]

    def statistics(self) -> dict[str, tuple[int, int, int]]:
        """Requests and tokens of the last minute, and open requests, by subject."""
        now = self._clock()
        return {
            name: (account.requests.used(now), account.tokens.used(now), len(account.leases))
            for name, account in self._accounts.items()
        }

    def remember(self, name: str, period: str, spent: int) -> None:
        """A subject has spent at least so much of its budget in this period, what is counted here too."""
        account = self._account(name)
        self._turn_to(account, period)
        account.spent_before = max(account.spent_before, spent - account.spent)

    def spendings(self) -> dict[tuple[str, str], int]:
        """Tokens that subjects have spent in their current period, by what is counted here."""
        return {
            (name, account.period): account.spent
            for name, account in self._accounts.items()
            if account.period
        }

    def _account(self, name: str) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account()
        return account

    def _lacks(self, subject: Subject, tokens: int, now: float) -> Iterator[tuple[float, LimitKind]]:
        """For how long limits leave no room, and which."""
        account, limits = self._account(subject.name), subject.limits
        most = limits.requests_per_minute
        if most is not None and (wait_s := account.requests.room_in_s(1, most, now)) > 0:
            yield wait_s, "requests"
        most = limits.tokens_per_minute
        if most is not None and (wait_s := account.tokens.room_in_s(tokens, most, now)) > 0:
            yield wait_s, "tokens"
        if (most := limits.concurrent_streams) is not None and len(account.leases) >= most:
            yield STREAM_RETRY_S, "streams"
        if (most := limits.budget_tokens) is not None:
            self._turn(account, subject.limits.budget_period, now)
            if account.spent_before + account.spent + tokens > most:
                yield account.ends - now, "budget"

    def _turn(self, account: _Account, period: BudgetPeriod, now: float) -> None:
        """Begin a new period of the budget when it is time."""
        if account.began <= now < account.ends and account.of == period:
            return
        name, account.began, account.ends = _period(period, math.floor(now / _DAY_S))
        self._turn_to(account, name)
        account.of = period

    def _turn_to(self, account: _Account, period: str) -> None:
        if account.period != period:
            account.period, account.of, account.spent, account.spent_before = period, None, 0, 0

    def _share(self, subject: Subject, processes: int) -> Subject:
        before = self._account(subject.name).spent_before
        return subject._replace(limits=share_of(subject.limits, processes, spent_before=before))


def _quotas(seen: Iterable[tuple[_Account, Limits]], now: float) -> tuple[Quota | None, Quota | None]:
    """Of requests and of tokens, those of the account that has the least left."""
    requests = tokens = None
    for account, limits in seen:
        requests = _tighter(requests, account.requests, limits.requests_per_minute, now)
        tokens = _tighter(tokens, account.tokens, limits.tokens_per_minute, now)
    return requests, tokens


def _tighter(found: Quota | None, window: SlidingWindow, limit: int | None, now: float) -> Quota | None:
    """What is left of this limit, if that is less than what was found."""
    if limit is None:
        return found
    used, empty_s = window.told(now)
    remaining = limit - used if limit > used else 0
    return Quota(limit, remaining, empty_s) if found is None or remaining < found.remaining else found


def tightest(quotas: Iterable[Quota | None]) -> Quota | None:
    """The one with the least left of it."""
    found: Quota | None = None
    for quota in quotas:
        if quota is not None and (found is None or quota.remaining < found.remaining):
            found = quota
    return found


def share_of(limits: Limits, processes: int, *, spent_before: int = 0) -> Limits:
    """Of limits for several processes together, what one may use by itself: at least one request.

    `spent_before`: of the budget, by all of them; what is left of it is shared.
    """

    def part(limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // processes)

    budget = limits.budget_tokens
    return replace(
        limits,
        requests_per_minute=part(limits.requests_per_minute),
        tokens_per_minute=part(limits.tokens_per_minute),
        concurrent_streams=part(limits.concurrent_streams),
        budget_tokens=None if budget is None else spent_before + (budget - spent_before) // processes,
    )
