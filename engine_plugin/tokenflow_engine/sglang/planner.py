"""When to plan, and what to do when planning fails. On the rank that decides for all."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from tokenflow_engine.control.durations import DurationCounts
from tokenflow_engine.control.orders import STOCK, Orders
from tokenflow_engine.control.ratelimit import Occasionally
from tokenflow_engine.control.streams import ReaderView
from tokenflow_engine.policy.base import Costs, EngineView, Phase, Plan, Policy
from tokenflow_engine.policy.fcfs import FCFS
from tokenflow_engine.sglang.table import Device, Table

__all__ = ["Planner", "Readers"]

_logger = logging.getLogger(__name__)

_MAX_SHARE = 0.02
"""Of the scheduler's time that planning may take, in CPU seconds: 0.4 ms in a step of 20."""
_LONGEST_S = 1.0
"""Between two plans while anything waits or is preempted."""
_NEWCOMER_S = 0.25
"""A plan is put off for a newcomer's first token, at most so long."""
_TIMES_S = (1e-4, 2e-4, 4e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 0.01, 0.03, 0.1)
"""Bounds of the classes in which plans are counted by the CPU time that they took."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 300.0
"""How long a policy that failed is suspended: twice as long each time, unless it has worked for the longest
since.
"""


class Readers(Protocol):
    """Who reads which request; the book of streams."""

    def reader(self, rid: str, now: float) -> ReaderView: ...

    def take_changed_readers(self) -> Iterable[str]:
        """Requests whose reader has changed since the last call, other than by reading on."""
        ...


class Planner:
    """Asks its policy whenever something has happened that a plan could depend on.

    `policy` is the one in force. One that fails is suspended: the engine goes on first come, first served,
    and a fresh copy of it is tried after a pause.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        table: Table,
        costs: Costs,
        device: Callable[[], Device],
        readers: Readers,
    ) -> None:
        self.plans = 0
        self.errors = 0
        self.seconds = 0.0
        self.times = DurationCounts(_TIMES_S)
        self.news: list[str] = []
        """Streams of which a plan said something new; to be taken by whoever tells."""
        self._table = table
        self._costs = costs
        self._device = device
        self._readers = readers
        self._by = float("inf")
        self._again_at: float | None = None
        self._next_prompt = 0
        self._newcomer: tuple[str, float] | None = None
        """Whose first token a plan is put off for, and until when."""
        self._failures = Occasionally(every_s=10.0)
        self.use(policy)

    def note(self) -> None:
        """Something happened: an arrival, an end, a reader who paused, memory that ran short."""
        self._is_due = True

    def arrived(self, rid: str, *, prompt: int, now: float) -> None:
        """A newcomer: a plan is due at once, or after its first token if the last plan has said so."""
        self._is_due = True
        self._newcomer = (rid, now + _NEWCOMER_S) if 0 < prompt <= self._next_prompt else None
        self._next_prompt = 0

    @property
    def suspended(self) -> str | None:
        """The name of the policy that failed and is to be tried again."""
        is_in_force = self._again_at is None or isinstance(self._chosen, FCFS)
        return None if is_in_force else self._chosen.name

    def use(self, policy: Policy) -> None:
        """Plan by another policy from now on."""
        self._chosen = copy.deepcopy(policy)
        """As it was before its first plan."""
        self._pause_s = _FIRST_PAUSE_S
        self._put_in_force(policy, now=float("-inf"))

    def failed(self, now: float) -> None:
        """The policy in force failed, or its orders could not be carried out; called where that is caught."""
        self.errors += 1
        if now - self._in_force_since > _LONGEST_PAUSE_S:
            self._pause_s = _FIRST_PAUSE_S
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        line = (
            f"TokenFlow: policy {self.policy.name!r} failed: the engine goes on first come, first served; "
            f"next try in {pause_s:.0f} s"
        )
        self._failures.log(_logger, self.policy.name, line, exc_info=True)
        self._put_in_force(FCFS(), now=now)
        self._again_at = now + pause_s

    def _put_in_force(self, policy: Policy, *, now: float) -> None:
        self.policy = policy
        self._in_force_since = now
        self._again_at = None
        self._not_before = 0.0
        self._is_stock = False
        self._is_due = True
        self._next_prompt, self._newcomer = 0, None

    def orders(self, now: float) -> Orders | None:
        """New orders, or None if those that stand still hold. To be called at every step."""
        if self._again_at is not None and now >= self._again_at:
            self._put_in_force(copy.deepcopy(self._chosen), now=now)
        for rid in self._readers.take_changed_readers():
            self._table.read_by(rid, self._readers.reader(rid, now), now=now)
        if not (self._is_due or now >= self._by) or now < self._not_before or self._is_put_off(now):
            if not isinstance(self.policy, FCFS):
                self._table.pass_time(now)
            return None if self._is_stock else self._tend(now)
        if self._is_stock and isinstance(self.policy, FCFS):
            self._is_due, self._by = False, float("inf")
            return None
        self._is_due = False
        started = time.thread_time()
        try:
            orders = self._plan(now)
        except Exception:  # noqa: BLE001 - a policy that fails costs its plan, never a stream
            return self._given_up(now)
        took = time.thread_time() - started
        self.seconds += took
        self.times.add(took)
        self.plans += 1
        self._not_before = now + took / _MAX_SHARE
        return orders

    def _tend(self, now: float) -> Orders | None:
        """Make the next view cheaper, while none is made."""
        started = time.thread_time()
        try:
            self._table.tend(now)
        except Exception:  # noqa: BLE001 - as for a plan
            return self._given_up(now)
        self.seconds += time.thread_time() - started
        return None

    def _given_up(self, now: float) -> Orders:
        is_last_resort = isinstance(self.policy, FCFS)
        self.failed(now)
        if is_last_resort:
            self._not_before = self._again_at or now
        return STOCK

    def _is_put_off(self, now: float) -> bool:
        if self._newcomer is None:
            return False
        rid, until = self._newcomer
        if now < until and self._table.awaits_first_token(rid):
            return True
        self._newcomer = None
        return False

    def _plan(self, now: float) -> Orders:
        view, ids = self._table.view(now=now, device=self._device(), costs=self._costs)
        plan = self.policy.plan(view, ids)
        _check(plan, view)
        self.news += self._table.planned(plan)
        self._is_stock, self._next_prompt = plan.stock, plan.next_prompt
        pending = bool((view.phase != _RUNNING).any())
        self._by = min(plan.next_at, now + _LONGEST_S if pending else float("inf"))
        return Orders.of(plan, ids)


_RUNNING = int(Phase.RUNNING)
_FROM = {
    "park": (Phase.RUNNING,),
    "evict": (Phase.RUNNING, Phase.PARKED),
    "resume": (Phase.PARKED,),
    "admit": (Phase.WAITING,),
    "load": (Phase.OFFLOADED,),
}


def _check(plan: Plan, view: EngineView) -> None:
    """Raise ValueError or IndexError for a plan that this view does not allow."""
    lists: dict[str, list[int]] = {name: getattr(plan, name) for name in _FROM}
    lists["load"] = [row for row, _ in plan.load]
    if len(set().union(*lists.values())) != sum(map(len, lists.values())):
        raise ValueError("a row of the plan is in two lists")
    for name, rows in lists.items():
        for row in rows:
            phase = view.phase.item(row)
            if phase not in _FROM[name]:
                raise ValueError(f"row {row} cannot be in {name}: it is {Phase(phase).name}")
