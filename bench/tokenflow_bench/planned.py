"""The plugin's planner, step by step, over a table of requests that has no engine behind it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from tokenflow_bench.costs import Machine
from tokenflow_bench.views import IdleCopies
from tokenflow_engine.control.owners import Owner
from tokenflow_engine.control.streams import StreamBook
from tokenflow_engine.policy.base import Phase, Policy
from tokenflow_engine.policy.fcfs import FCFS
from tokenflow_engine.protocol import Reading, StreamOpened
from tokenflow_engine.sglang.planner import Planner
from tokenflow_engine.sglang.table import Device, Table

__all__ = ["StepTimes", "planned_steps"]

_OWNER = Owner("gateway", "1")
_OUTPUT = 400
_PROMPT = 250
_REPORT_EVERY_S = 2.0
"""How often a reader is reported not to be where it was thought to be."""


@dataclass(slots=True)
class StepTimes:
    """Milliseconds of CPU time in each step: all that planning takes, and of that, making the view."""

    orders_ms: list[float] = field(default_factory=list)
    """0 where nothing was due."""
    views_ms: list[float] = field(default_factory=list)

    def clear(self) -> None:
        self.orders_ms.clear()
        self.views_ms.clear()


@dataclass(slots=True)
class _Request:
    rid: str
    origin_input_ids: range = range(_PROMPT)
    extend_end: int = _PROMPT
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(max_new_tokens=2 * _OUTPUT))


class _TimedTable(Table):
    def __init__(self, times: StepTimes) -> None:
        super().__init__(
            may_park=lambda _req: True, shared_tokens=lambda _req: 16, synced_tokens=lambda _rid: 64
        )
        self._times = times

    def view(self, **given: Any) -> Any:
        began = time.thread_time()
        seen = super().view(**given)
        self._times.views_ms.append(1e3 * (time.thread_time() - began))
        return seen


class _Engine:
    """`running` streams in the batch, `waiting` outside; who ends makes room for the next.

    Orders are not carried out: what is measured is what they cost, and memory stays full.
    """

    def __init__(self, machine: Machine, *, running: int, waiting: int) -> None:
        self.times = StepTimes()
        self.table = _TimedTable(self.times)
        self.book = StreamBook()
        self._rng = np.random.default_rng(1)
        self._names = map(str, range(10**9))
        self._running: dict[str, int] = {}
        self._waiting: list[str] = []
        self._now = 1000.0
        self.step_s = machine.decode_s(running, running * (_PROMPT + _OUTPUT / 2))
        self._device = Device(
            kv_tokens=machine.kv_tokens,
            kv_free=machine.kv_tokens // 100,
            kv_freeing=0,
            max_running=running,
            max_resident=running,
            page_tokens=machine.page_tokens,
            host_free=machine.host_tokens,
        )
        self.planner = Planner(
            FCFS(),
            table=self.table,
            costs=IdleCopies(machine),
            device=lambda: self._device,
            readers=self.book,
        )
        for _ in range(running + waiting):
            self._arrive()
        for _ in range(running):
            self._start(generated=int(self._rng.integers(1, _OUTPUT)))

    def step(self) -> None:
        """A token for everybody in the batch, ends, as many arrivals, reports; then orders, timed."""
        self._now += self.step_s
        for rid in list(self._running):
            self._running[rid] += 1
            self.book.counted(rid, self._running[rid])
            self.table.counted(rid, self._running[rid])
        for rid in self._some(1 / _OUTPUT):
            del self._running[rid]
            self.book.ended(rid, aborted=False, now=self._now)
            self.table.ended(rid)
            self.planner.note()
            self._start(generated=1)
            self._arrive()
        for rid in self._some(self.step_s / _REPORT_EVERY_S):
            self._report(rid)
        gc.collect(1)  # of what this engine has left behind: it would be a millisecond or two of some plans
        began = time.thread_time()
        self.planner.orders(self._now)
        self.times.orders_ms.append(1e3 * (time.thread_time() - began))

    def _some(self, share: float) -> Iterable[str]:
        chosen = self._rng.random(len(self._running)) < share
        return [rid for rid, is_chosen in zip(list(self._running), chosen, strict=True) if is_chosen]

    def _arrive(self) -> None:
        rid = next(self._names)
        rate = float(self._rng.lognormal(np.log(8.0), 0.4))
        opening = StreamOpened(rid=rid, at=0.0, declared_rate=rate)
        self.book.opened(rid, owner=_OWNER, now=self._now, declared_rate=rate, opening=opening)
        self.table.arrived(rid, prompt=_PROMPT, max_output=2 * _OUTPUT, now=self._now)
        self.book.arrived(rid, now=self._now)
        self.table.known(_Request(rid))
        self._waiting.append(rid)
        self.planner.note()

    def _start(self, *, generated: int) -> None:
        rid = self._waiting.pop(0)
        self._running[rid] = generated
        self.table.moved(rid, Phase.RUNNING, now=self._now)
        self.book.counted(rid, generated)
        self.table.counted(rid, generated)

    def _report(self, rid: str) -> None:
        made = self._running[rid]
        rate = float(self._rng.lognormal(np.log(8.0), 0.4))
        reading = Reading(
            rid=rid,
            at=self._now,
            consumed=float(self._rng.uniform(0.3, 1.0)) * made,
            rate=rate,
            rate_low=0.8 * rate,
            rate_high=1.25 * rate,
            paused=bool(self._rng.random() < 0.1),
        )
        self.book.consumed(reading, owner=_OWNER, now=self._now)
        self.planner.note()


def planned_steps(
    machine: Machine, policy: Policy, *, running: int, waiting: int, steps: int
) -> Iterator[StepTimes]:
    """The times of the first step after the policy was switched on, then those of `steps` more."""
    engine = _Engine(machine, running=running, waiting=waiting)
    engine.step()
    engine.times.clear()
    engine.planner.use(policy)
    engine.step()
    yield StepTimes(engine.times.orders_ms[:], engine.times.views_ms[:])
    engine.times.clear()
    for _ in range(steps):
        engine.step()
    assert not engine.planner.errors, "a plan failed"
    yield engine.times
