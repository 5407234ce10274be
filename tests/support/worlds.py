"""A small engine in any state, as one finds it after a change of policy, that does what plans say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.plans import check
from tokenflow_bench.costs import MACHINES
from tokenflow_bench.views import IdleCopies
from tokenflow_engine.policy.base import EngineView, Phase, Plan, Policy
from tokenflow_engine.policy.rows import paged

__all__ = ["IDLE_S", "World"]

IDLE_S = 60.0
"""With streams there, an engine that has not decoded for so long never will."""
_STEP_S = 0.02
_LONGEST_S = 1.0
"""Between two plans, whatever a plan says: the gateway's news come."""


@dataclass
class _Stream:
    name: str
    phase: Phase
    context: int
    generated: int
    left: int
    read: float
    rate: float
    paused: bool
    machine: bool
    weight: float
    may_park: bool
    arrived: float
    since: float


@dataclass
class World:
    """Copies take no time; who is admitted runs at once. Its clock advances by steps of 20 ms."""

    kv_tokens: int
    page_tokens: int
    max_running: int
    max_resident: int
    host_tokens: int
    now: float = 100.0
    streams: list[_Stream] = field(default_factory=list)

    @classmethod
    def random(cls, seed: int) -> World:
        """Up to twenty streams in all phases; nobody's answer is longer than an empty pool can hold."""
        rng = np.random.default_rng(seed)
        page, kv_tokens = int(rng.choice([1, 16])), int(rng.choice([400, 1008, 3008]))
        max_running = int(rng.choice([1, 2, 8]))
        world = cls(
            kv_tokens=kv_tokens,
            page_tokens=page,
            max_running=max_running,
            max_resident=max_running * int(rng.choice([1, 4])),
            host_tokens=int(rng.choice([0, 100, 100_000])),
        )
        paused, machine, fixed = (
            rng.choice([0.0, 0.3, 1.0]),
            rng.choice([0.0, 0.2, 1.0]),
            rng.choice([0, 0.5]),
        )
        for i in range(int(rng.integers(1, 20))):
            context = int(rng.integers(20, kv_tokens - 20 if rng.random() < 0.1 else kv_tokens // 3))
            new = rng.random() < 0.3
            generated = 0 if new else int(rng.integers(1, min(context, 100)))
            stream = _Stream(
                name=f"s{i}",
                phase=Phase.WAITING,
                context=context,
                generated=generated,
                left=min(int(rng.integers(1, 60)), kv_tokens - context - page),
                read=generated * float(rng.random()),
                rate=float(rng.lognormal(2.0, 0.5)),
                paused=bool(rng.random() < paused),
                machine=bool(rng.random() < machine),
                weight=float(rng.choice([1.0, 4.0])),
                may_park=bool(rng.random() >= fixed),
                arrived=world.now - 60.0 + 0.5 * i,
                since=world.now - 3.0 * float(rng.random()),
            )
            stream.left = max(stream.left, 1)
            if not new:
                world._place(stream, Phase(int(rng.choice([1, 2, 3, 3, 4]))))
            world.streams.append(stream)
        return world

    def run(self, policy: Policy) -> float:
        """Until all have finished; the seconds that took.

        Raises `AssertionError` if the engine stays idle, or for a plan that `check` does not allow.
        """
        start = decoded_at = self.now
        while self.streams:
            view = self.view()
            plan = policy.plan(view, [stream.name for stream in self.streams])
            check(view, plan, frees_memory=policy.name != "fcfs")
            self._apply(plan)
            until = min(plan.next_at, self.now + _LONGEST_S)
            if self._step():
                decoded_at = self.now
                while self.now < until and self._step():
                    decoded_at = self.now
            else:
                self.now = max(until, self.now + _STEP_S)
            assert self.now - decoded_at < IDLE_S, f"idle: {self.streams}"
        return self.now - start

    def _in(self, *phases: Phase) -> list[_Stream]:
        return [stream for stream in self.streams if stream.phase in phases]

    @property
    def _free(self) -> int:
        here = self._in(Phase.RUNNING, Phase.PARKED)
        return self.kv_tokens - sum(paged(stream.context, self.page_tokens) for stream in here)

    @property
    def _host_free(self) -> int:
        return self.host_tokens - sum(stream.context for stream in self._in(Phase.OFFLOADED))

    def _place(self, stream: _Stream, phase: Phase) -> None:
        """Where the dice want a stream that has started, if there is room; else one further out."""
        if phase in (Phase.RUNNING, Phase.PREFILLING):
            phase = Phase.RUNNING if len(self._in(Phase.RUNNING)) < self.max_running else Phase.PARKED
        resident = len(self._in(Phase.RUNNING, Phase.PARKED))
        full = self._free < paged(stream.context + 1, self.page_tokens) or resident >= self.max_resident
        if phase == Phase.PARKED and not stream.may_park:
            phase = Phase.WAITING
        if full or phase == Phase.OFFLOADED:
            phase = Phase.OFFLOADED if self._host_free >= stream.context else Phase.WAITING
        stream.phase = phase

    def _move(self, stream: _Stream, phase: Phase) -> None:
        stream.phase, stream.since = phase, self.now

    def _step(self) -> bool:
        """One decode step, after the engine's own retraction; False if the batch is empty."""
        while batch := self._in(Phase.RUNNING):
            grown = sum(self._growth(stream) for stream in batch)
            if grown <= self._free:
                break
            self._off((self._in(Phase.PARKED) or batch)[-1])
        self.now += _STEP_S
        for stream in self.streams:
            if not stream.paused:
                stream.read = min(stream.read + stream.rate * _STEP_S, stream.generated)
        for stream in batch:
            stream.context += 1
            stream.generated += 1
            stream.left -= 1
        self.streams = [stream for stream in self.streams if stream.left]
        return bool(batch)

    def _growth(self, stream: _Stream) -> int:
        return paged(stream.context + 1, self.page_tokens) - paged(stream.context, self.page_tokens)

    def _off(self, stream: _Stream) -> None:
        saved = self._host_free >= stream.context
        self._move(stream, Phase.OFFLOADED if saved else Phase.WAITING)

    def _come(self, stream: _Stream) -> bool:
        """Back or in, where there is room for it and its next token."""
        resident = self._in(Phase.RUNNING, Phase.PARKED)
        fits = stream.phase == Phase.PARKED or (
            self._free >= paged(stream.context + 1, self.page_tokens) and len(resident) < self.max_resident
        )
        if fits and len(self._in(Phase.RUNNING)) < self.max_running:
            self._move(stream, Phase.RUNNING)
            return True
        return False

    def _apply(self, plan: Plan) -> None:
        rows = list(self.streams)
        if plan.stock:
            for phase in (Phase.PARKED, Phase.OFFLOADED, Phase.WAITING):
                for stream in self._in(phase):
                    if not self._come(stream):
                        return
            return
        for row in plan.evict:
            self._off(rows[row])
        for row in plan.park:
            self._move(rows[row], Phase.PARKED)
        for row in [*plan.resume, *(row for row, _ in plan.load), *plan.admit]:
            self._come(rows[row])

    def view(self) -> EngineView:
        """As a policy sees it."""

        def column(name: str, kind: Any) -> Any:
            return np.array([getattr(stream, name) for stream in self.streams], dtype=kind)

        phase, context = column("phase", np.int8), column("context", np.int64)
        page = self.page_tokens
        here = np.isin(phase, [Phase.RUNNING, Phase.PARKED])
        owned = np.where(here, -(-context // page) * page, 0)
        generated, rate = column("generated", np.int64), column("rate", float)
        return EngineView(
            now=self.now,
            kv_tokens=self.kv_tokens,
            kv_free=self._free,
            max_running=self.max_running,
            max_resident=self.max_resident,
            page_tokens=page,
            host_free=max(self._host_free, 0),
            costs=IdleCopies(MACHINES["laptop-tiny"]),
            mean_output=60.0,
            phase=phase,
            arrived=column("arrived", float),
            prefill=np.where(phase == Phase.WAITING, context, 0),
            context=context,
            owned=owned,
            synced=owned.copy(),
            generated=generated,
            max_output=generated + column("left", np.int64),
            buffered=generated - column("read", float),
            rate=rate,
            rate_low=0.8 * rate,
            rate_high=1.2 * rate,
            paused=column("paused", bool),
            machine=column("machine", bool),
            weight=column("weight", float),
            ttft_target=np.full(len(phase), 1.0),
            lead_cap=np.full(len(phase), np.inf),
            may_park=column("may_park", bool),
            since=column("since", float),
            preemptions=np.zeros(len(phase), dtype=np.int64),
        )
