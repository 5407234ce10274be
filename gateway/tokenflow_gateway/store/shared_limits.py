"""Limits of a fleet: counted in Redis, all replicas together, in one step of `limits.lua`.

Without Redis each replica goes on with its share of every limit, by what it has let through itself, and when
Redis is back it tells what it did meanwhile; if Redis has forgotten (it was restarted empty), what it did in
the last minute. So the sum is never more than what is allowed, but for a minute after Redis has gone, when
one replica may already have used more than its share, and where Redis is gone for some of them only: their
shares then come on top of what the others have by Redis.

What is spent of a budget Redis knows by process, and a process tells its own figure, never a difference. So
whoever has a record of usage can tell what all processes in it have spent, those that are no more included,
to a Redis that does not know: it does not matter how many do.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, Final

import msgspec
import structlog
from redis.asyncio import Redis

from tokenflow_gateway.store.redis import LEASE_S, FleetStore, StoreDown
from tokenflow_gateway.store.scripts import AT_ONCE, Call, ScriptQueue, send_calls
from tokenflow_gateway.tenants.budgets import Spent
from tokenflow_gateway.tenants.limits import (
    Lease,
    LimitKind,
    LocalLimits,
    Quota,
    Subject,
    Verdict,
    period_of,
    tightest,
)
from tokenflow_gateway.tenants.window import SLOT_S, SLOTS, slot_of

__all__ = ["SharedLimits"]

_log = structlog.stdlib.get_logger("tokenflow.store")

_SCRIPT: Final = (files("tokenflow_gateway.store") / "limits.lua").read_text(encoding="utf-8")
_OPEN_KEPT_S: Final = 3600
"""After the last renewal, as in the script."""
_LAST_WITHIN_S: Final = 2.0
_FEW: Final = 1000
"""Requests that are not worth looking through for those that count no more."""


@dataclass(slots=True)
class _Taken:
    """A request of this replica, until it has ended and counts no more."""

    lease: Lease
    used_at: float
    """When it last used something: it counts for a minute from then."""
    change: int = 0
    """What it has used beyond what was taken, once it has ended."""
    open: bool = True
    shared: bool = True
    """Redis knows of its beginning."""
    settled: bool = False
    """Redis knows of its end."""


class SharedLimits:
    """A `LimitStore` over Redis. `run` until cancelled."""

    def __init__(
        self,
        store: FleetStore,
        local: LocalLimits,
        *,
        recorded: Callable[[], Awaitable[Sequence[Spent] | None]],
        processes: int = 1,
    ) -> None:
        """`recorded`: what is spent of budgets, by the record of usage; asked for where Redis may not know.

        Where it is None, the record cannot be read, and what was read before holds.

        `processes`: so many share the Redis at least, whether or not they have been seen there.
        """
        self._store = store
        self._local = local
        self._read_record = recorded
        self._recorded: Sequence[Spent] = ()
        self._processes = processes
        self._calls = ScriptQueue(store, _SCRIPT)
        self._taken: dict[str, _Taken] = {}
        self._kept = 0
        """How many there were when those were dropped that count no more."""
        self._epoch = ""
        """Of the Redis that knows what is marked so."""
        self._last_end: asyncio.Future[Any] | None = None
        """Of a request, as Redis is told of it."""
        store.on_return.append(self._reconcile)
        store.on_beat.append(self._renew)

    async def run(self) -> None:
        await self._calls.run()

    async def take(self, subjects: Sequence[Subject], *, lease_id: str, tokens: int) -> Verdict:
        asked = self._calls.post(*self._take_call(subjects, lease_id, tokens))
        try:
            answer = await asyncio.shield(asked)
        except StoreDown:
            return self._alone(subjects, lease_id, tokens)
        except asyncio.CancelledError:  # whatever it is given will not be used
            asked.add_done_callback(lambda future: self._give_back(subjects, lease_id, tokens, future))
            raise
        return self._together(subjects, lease_id, tokens, answer)

    def settle(self, lease: Lease, tokens: int | None) -> None:
        self._local.settle(lease, tokens)
        taken = self._taken.get(lease.id)
        if taken is None or not taken.open:
            return
        taken.open = False
        taken.change = 0 if tokens is None else tokens - lease.tokens
        if taken.change > 0:
            taken.used_at = self._store.now
        if taken.shared:
            self._last_end = self._calls.post(*self._settle_call(taken))
            self._last_end.add_done_callback(partial(_note_settled, taken))

    async def aclose(self) -> None:
        """Wait until Redis knows the ends of all requests, or cannot be told."""
        if self._last_end is not None:  # all before it are sent before it
            await asyncio.wait({self._last_end}, timeout=_LAST_WITHIN_S)

    async def remember(self, recorded: Sequence[Spent]) -> None:
        """What is on record counts as spent: in Redis at once, if it is there."""
        self._recorded = recorded
        with contextlib.suppress(StoreDown):
            await self._send(self._recorded_calls(), self._store.asking)

    # ---- with Redis --------------------------------------------------------------------------------

    def _together(
        self, subjects: Sequence[Subject], lease_id: str, tokens: int, answer: list[bytes | int]
    ) -> Verdict:
        at, kind, whose, wait_ms = float(answer[0]), _kind(answer[1]), int(answer[2]), int(answer[3])
        seen = [tuple(int(value) for value in answer[4 + 4 * n : 8 + 4 * n]) for n in range(len(subjects))]
        requests = tightest(
            _quota(subject.limits.requests_per_minute, used, empty_ms)
            for subject, (used, empty_ms, _, _) in zip(subjects, seen, strict=True)
        )
        quota = tightest(
            _quota(subject.limits.tokens_per_minute, used, empty_ms)
            for subject, (_, _, used, empty_ms) in zip(subjects, seen, strict=True)
        )
        if kind is not None:
            return Verdict(
                lease=None,
                requests=requests,
                tokens=quota,
                kind=kind,
                subject=subjects[whose - 1],
                retry_s=math.inf if wait_ms < 0 else wait_ms / 1000,
            )
        lease = Lease(lease_id, tuple(subjects), tokens, at / 1e6)
        self._local.record(lease)
        self._taken[lease_id] = _Taken(lease, lease.at)
        return Verdict(lease=lease, requests=requests, tokens=quota)

    def _give_back(
        self, subjects: Sequence[Subject], lease_id: str, tokens: int, asked: asyncio.Future[Any]
    ) -> None:
        """What a request has taken that is not there any more."""
        if asked.cancelled() or asked.exception() is not None:
            return
        verdict = self._together(subjects, lease_id, tokens, asked.result())
        if verdict.lease is not None:
            self.settle(verdict.lease, 0)

    def _keys(self, subjects: Sequence[Subject], at: float) -> list[str]:
        keys = []
        for subject in subjects:
            keys += [self._store.key("limits", subject.name, what) for what in ("requests", "tokens", "open")]
            keys.append(self._budget_key(subject.name, _period(subject, at)))
        return keys

    def _budget_key(self, name: str, period: str) -> str:
        return self._store.key("limits", name, f"spent:{period}")

    def _take_call(self, subjects: Sequence[Subject], lease_id: str, tokens: int) -> Call:
        now = self._store.now
        args: list[str | int | float] = ["take", lease_id, tokens, LEASE_S, self._store.member]
        for subject in subjects:
            limits = subject.limits
            wanted = (
                limits.requests_per_minute,
                limits.tokens_per_minute,
                limits.concurrent_streams,
                limits.budget_tokens,
            )
            args += [_number(limit) for limit in wanted]
            args.append(period_of(limits.budget_period, now)[1])
        epoch = self._store.key("epoch")
        return [*self._keys(subjects, now), epoch], [*args, self._store.epoch]

    def _settle_call(self, taken: _Taken) -> Call:
        lease, unknown = taken.lease, -1 if taken.shared else taken.lease.tokens
        args: list[str | int | float] = ["settle", lease.id, taken.change, slot_of(lease.at)]
        args += [self._store.member, unknown]
        args += [_number(subject.limits.tokens_per_minute) for subject in lease.subjects]
        done, epoch = self._store.key("limits", "settled", lease.id), self._store.key("epoch")
        return [*self._keys(lease.subjects, lease.at), done, epoch], [*args, self._store.epoch]

    async def _renew(self) -> None:
        """Keep the open requests of this replica from counting as those of a dead one."""
        self._forget()
        async with self._store.asking() as client:
            await self._hold(client, those_known=True)

    async def _hold(self, client: Redis, *, those_known: bool) -> None:
        """Renew the leases of open requests; `those_known`: not of those that may just have ended there."""
        until = self._store.now + LEASE_S
        leases: dict[str, dict[str, float]] = {}
        for taken in self._taken.values():
            if taken.open and taken.shared:
                for subject in taken.lease.subjects:
                    leases.setdefault(subject.name, {})[taken.lease.id] = until
        if not leases:
            return
        async with client.pipeline(transaction=False) as pipe:
            for name, those in leases.items():
                key = self._store.key("limits", name, "open")
                pipe.zadd(key, those, xx=those_known)
                pipe.expire(key, _OPEN_KEPT_S)
            await pipe.execute()

    def _forget(self) -> None:
        """Drop what has ended and counts no more, but for those of which Redis knows that they began only."""
        oldest = self._store.now - SLOTS * SLOT_S
        self._taken = {
            name: taken
            for name, taken in self._taken.items()
            if taken.open or taken.used_at > oldest or (taken.shared and not taken.settled)
        }
        self._kept = len(self._taken)

    # ---- without Redis -----------------------------------------------------------------------------

    def _alone(self, subjects: Sequence[Subject], lease_id: str, tokens: int) -> Verdict:
        processes = max(self._processes, self._store.replicas)
        verdict = self._local.take_now(subjects, lease_id=lease_id, tokens=tokens, processes=processes)
        if verdict.lease is None:
            return verdict
        lease = msgspec.structs.replace(verdict.lease, at=self._store.now)
        if len(self._taken) > max(_FEW, 2 * self._kept):
            self._forget()
        self._taken[lease_id] = _Taken(lease, lease.at, shared=False)
        return msgspec.structs.replace(verdict, lease=lease)

    async def _reconcile(self, _forgotten: bool) -> None:
        """Tell a Redis that is back what it does not know. What comes meanwhile is told, too.

        If it goes again before it knows all, it is told the rest when it is back.
        """
        if self._store.epoch != self._epoch:
            recorded = await self._read_record()
            if recorded is not None:
                self._recorded = recorded
            for taken in self._taken.values():
                taken.shared = taken.settled = False
            self._epoch = self._store.epoch
        self._forget()
        async with self._store.reaching() as client:
            await self._hold(client, those_known=False)
        await self._send(self._recorded_calls(), self._store.reaching)
        restored, told = 0, dict[tuple[str, str], int]()
        while True:
            if untold := self._untold():
                changed = {subject.name for taken in untold for subject in taken.lease.subjects}
                told = {at: tokens for at, tokens in told.items() if at[0] not in changed}
                for at in range(0, len(untold), AT_ONCE):
                    restored += await self._tell(untold[at : at + AT_ONCE])
            elif spent := {at: tokens for at, tokens in self._spent().items() if told.get(at) != tokens}:
                calls = [self._spent_call(*at, tokens) for at, tokens in spent.items()]
                await self._send(calls, self._store.reaching)
                told |= spent
            else:
                break
        if restored:
            _log.info("redis was told of requests that it did not know", requests=restored)

    async def _send(
        self, calls: list[Call], reaching: Callable[[], AbstractAsyncContextManager[Redis]]
    ) -> None:
        for at in range(0, len(calls), AT_ONCE):
            async with reaching() as client:
                await send_calls(client, self._calls.script, calls[at : at + AT_ONCE])

    def _untold(self) -> list[_Taken]:
        """What Redis does not know, or not that it has ended."""
        return [
            taken for taken in self._taken.values() if not (taken.shared and (taken.open or taken.settled))
        ]

    async def _tell(self, untold: list[_Taken]) -> int:
        """In one round trip. Returns how many of them Redis did not know."""
        ended = [taken for taken in untold if not taken.open]
        unknown = [taken for taken in untold if not taken.shared]
        calls = [self._restore_call(taken) if taken.open else self._settle_call(taken) for taken in untold]
        await self._send(calls, self._store.reaching)
        for taken in unknown:
            taken.shared = True
        for taken in ended:
            taken.settled = True
        return len(unknown)

    def _restore_call(self, taken: _Taken) -> Call:
        lease = taken.lease
        args: list[str | int | float] = ["restore", lease.id, lease.tokens, slot_of(lease.at), LEASE_S]
        return self._keys(lease.subjects, lease.at), args

    def _spent(self) -> dict[tuple[str, str], int]:
        """By this process, of all budgets."""
        spent = self._local.spendings()
        for record in self._recorded:
            at = record.subject, record.period
            if record.process == self._store.member and at in spent:
                spent[at] = max(spent[at], record.tokens)
        return spent

    def _spent_call(self, name: str, period: str, tokens: int) -> Call:
        return [self._budget_key(name, period)], ["spent", self._store.member, tokens]

    def _recorded_calls(self) -> list[Call]:
        figures: dict[str, list[str | int | float]] = {}
        for record in self._recorded:
            key = self._budget_key(record.subject, record.period)
            figures.setdefault(key, ["recorded"]).extend((record.process, record.tokens))
        return [([key], args) for key, args in figures.items()]


def _number(limit: int | None) -> int:
    """A limit as the script has it."""
    return -1 if limit is None else limit


def _note_settled(taken: _Taken, told: asyncio.Future[Any]) -> None:
    """If Redis has not been told, `_reconcile` will."""
    if not told.cancelled() and told.exception() is None:
        taken.settled = True


def _period(subject: Subject, at: float) -> str:
    return period_of(subject.limits.budget_period, at)[0]


def _kind(value: bytes | int) -> LimitKind | None:
    text = value.decode() if isinstance(value, bytes) else ""
    return text or None  # type: ignore[return-value]  # the script's words are those of `LimitKind`


def _quota(limit: int | None, used: int, empty_ms: int) -> Quota | None:
    return None if limit is None else Quota(limit, max(0, limit - used), empty_ms / 1000)
