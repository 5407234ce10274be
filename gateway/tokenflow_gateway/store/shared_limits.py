"""Limits of a fleet: counted in Redis, all replicas together, in one step of `limits.lua`.

Without Redis each replica goes on with its share of every limit, by what it has let through itself, and when
Redis is back it tells what it did meanwhile; if Redis has forgotten (it was restarted empty), what it did in
the last minute. So the sum is never more than what is allowed, but for a minute after Redis has gone, when
one replica may already have used more than its share.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from typing import Any, Final

import structlog
from redis.asyncio import Redis

from tokenflow_gateway.store.redis import LEASE_S, FleetStore, StoreDown
from tokenflow_gateway.store.scripts import AT_ONCE, Call, ScriptQueue, send_calls
from tokenflow_gateway.tenants.limits import (
    Lease,
    LimitKind,
    LocalLimits,
    Quota,
    Subject,
    Verdict,
    period_of,
    share_of,
    tightest,
)
from tokenflow_gateway.tenants.window import SLOT_S, SLOTS, slot_of

__all__ = ["SharedLimits"]

_log = structlog.stdlib.get_logger("tokenflow.store")

_SCRIPT: Final = (files("tokenflow_gateway.store") / "limits.lua").read_text(encoding="utf-8")
_RECONCILE_S: Final = 10.0
_OPEN_KEPT_S: Final = 3600
"""After the last renewal, as in the script."""


@dataclass(slots=True)
class _Taken:
    """A request of this replica, until it has ended and counts no more."""

    lease: Lease
    tokens: int
    """What it has used, or is thought to use."""
    open: bool = True
    shared: bool = True
    """Redis knows of its beginning."""
    settled: bool = False
    """Redis knows of its end."""


class SharedLimits:
    """A `LimitStore` over Redis. `run` until cancelled."""

    def __init__(self, store: FleetStore, local: LocalLimits) -> None:
        self._store = store
        self._local = local
        self._calls = ScriptQueue(store, _SCRIPT)
        self._taken: dict[str, _Taken] = {}
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
        taken.tokens = lease.tokens if tokens is None else tokens
        if taken.shared:
            told = self._calls.post(*self._settle_call(taken))
            told.add_done_callback(partial(_note_settled, taken))

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
        self._taken[lease_id] = _Taken(lease, tokens)
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
        return [
            self._store.key("limits", subject.name, what)
            for subject in subjects
            for what in ("requests", "tokens", "open", f"budget:{_period(subject, at)}")
        ]

    def _take_call(self, subjects: Sequence[Subject], lease_id: str, tokens: int) -> Call:
        now = self._store.now
        args: list[str | int | float] = ["take", lease_id, tokens, LEASE_S]
        for subject in subjects:
            limits = subject.limits
            wanted = (
                limits.requests_per_minute,
                limits.tokens_per_minute,
                limits.concurrent_streams,
                limits.budget_tokens,
            )
            args += [-1 if limit is None else limit for limit in wanted]
            args.append(period_of(limits.budget_period, now)[1])
        epoch = self._store.key("epoch")
        return [*self._keys(subjects, now), epoch], [*args, self._store.epoch]

    def _settle_call(self, taken: _Taken) -> Call:
        lease = taken.lease
        change = taken.tokens - lease.tokens
        return self._keys(lease.subjects, lease.at), ["settle", lease.id, change, slot_of(lease.at)]

    async def _renew(self) -> None:
        """Keep the open requests of this replica from counting as those of a dead one."""
        self._forget()
        until = self._store.now + LEASE_S
        leases: dict[str, dict[str, float]] = {}
        for taken in self._taken.values():
            if taken.open:
                for subject in taken.lease.subjects:
                    leases.setdefault(subject.name, {})[taken.lease.id] = until
        if not leases:
            return
        async with self._store.asking() as client, client.pipeline(transaction=False) as pipe:
            for name, those in leases.items():
                key = self._store.key("limits", name, "open")
                pipe.zadd(key, those, xx=True)
                pipe.expire(key, _OPEN_KEPT_S)
            await pipe.execute()

    def _forget(self) -> None:
        """Drop what has ended, is known to Redis, and counts no more."""
        oldest = self._store.now - SLOTS * SLOT_S
        self._taken = {
            name: taken
            for name, taken in self._taken.items()
            if taken.open or not taken.settled or taken.lease.at > oldest
        }

    # ---- without Redis -----------------------------------------------------------------------------

    def _alone(self, subjects: Sequence[Subject], lease_id: str, tokens: int) -> Verdict:
        shares = [Subject(name, share_of(limits, self._store.replicas)) for name, limits in subjects]
        verdict = self._local.take_now(shares, lease_id=lease_id, tokens=tokens)
        if verdict.lease is None:
            return verdict
        lease = verdict.lease._replace(subjects=tuple(subjects))
        self._taken[lease_id] = _Taken(lease, tokens, shared=False)
        return replace(verdict, lease=lease)

    async def _reconcile(self, forgotten: bool) -> None:
        """Tell a Redis that is back what it does not know. What comes meanwhile is told, too."""
        self._forget()
        counted: set[str] = set()
        restored = 0
        async with self._store.reaching(_RECONCILE_S) as client:
            if forgotten:
                for taken in self._taken.values():
                    taken.shared = False
                counted = set(self._taken)
                calls = [self._spend_call(*spending) for spending in self._local.spendings()]
                await send_calls(client, self._calls.script, calls)
            while (unknown := self._unknown()) or (ended := self._unsettled()):
                if unknown:
                    await self._restore(client, unknown, counted)
                    restored += len(unknown)
                else:
                    await send_calls(client, self._calls.script, [self._settle_call(t) for t in ended])
                    for taken in ended:
                        taken.settled = True
        if restored:
            _log.info("redis was told of requests that it did not know", requests=restored)

    def _unknown(self) -> list[_Taken]:
        return [taken for taken in self._taken.values() if not taken.shared][:AT_ONCE]

    def _unsettled(self) -> list[_Taken]:
        return [taken for taken in self._taken.values() if not taken.open and not taken.settled][:AT_ONCE]

    async def _restore(self, client: Redis, some: list[_Taken], counted: set[str]) -> None:
        """`counted`: leases whose tokens are in the budgets already."""
        told = [(taken, taken.open) for taken in some]
        calls = [self._restore_call(taken, budget=taken.lease.id not in counted) for taken in some]
        await send_calls(client, self._calls.script, calls)
        for taken, was_open in told:
            taken.shared = True
            taken.settled = not was_open

    def _restore_call(self, taken: _Taken, *, budget: bool) -> Call:
        lease, lease_s = taken.lease, LEASE_S if taken.open else 0
        args: list[str | int | float] = ["restore", lease.id, taken.tokens, slot_of(lease.at), lease_s]
        return self._keys(lease.subjects, lease.at), [*args, int(budget)]

    def _spend_call(self, name: str, period: str, tokens: int) -> Call:
        return [self._store.key("limits", name, f"budget:{period}")], ["spend", tokens]


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
