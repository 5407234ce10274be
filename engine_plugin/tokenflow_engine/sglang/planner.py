"""When to plan, and what to do when planning fails. On the rank that decides for all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tokenflow_engine.control.orders import STOCK, Orders
from tokenflow_engine.control.ratelimit import Occasionally
from tokenflow_engine.control.streams import ReaderView
from tokenflow_engine.policy.base import Costs, EngineView, Phase, Plan, Policy
from tokenflow_engine.policy.fcfs import FCFS
from tokenflow_engine.sglang.table import Device, Table

__all__ = ["Planner"]

_logger = logging.getLogger(__name__)

_MAX_SHARE = 0.1
"""Of the scheduler's time that planning may take."""
_LONGEST_S = 1.0
"""Between two plans while anything waits or is preempted."""


class Planner:
    """Asks its policy whenever something has happened that a plan could depend on."""

    def __init__(
        self,
        policy: Policy,
        *,
        table: Table,
        costs: Costs,
        device: Callable[[], Device],
        reader: Callable[[str, float], ReaderView],
    ) -> None:
        self.policy = policy
        self.plans = 0
        self.errors = 0
        self.seconds = 0.0
        self.news: list[str] = []
        """Streams of which a plan said something new; to be taken by whoever tells."""
        self._table = table
        self._costs = costs
        self._device = device
        self._reader = reader
        self._is_due = True
        self._not_before = 0.0
        self._by = float("inf")
        self._is_stock = False
        self._failures = Occasionally(every_s=10.0)

    def note(self) -> None:
        """Something happened: an arrival, an end, a reader who paused, memory that ran short."""
        self._is_due = True

    def use(self, policy: Policy) -> None:
        """Plan by another policy from now on."""
        self.policy = policy
        self._is_stock = False
        self._is_due = True

    def orders(self, now: float) -> Orders | None:
        """New orders, or None if those that stand still hold."""
        if not (self._is_due or now >= self._by) or now < self._not_before:
            return None
        if self._is_stock and isinstance(self.policy, FCFS):
            self._is_due, self._by = False, float("inf")
            return None
        self._is_due = False
        started = time.perf_counter()
        try:
            orders = self._plan(now)
        except Exception:  # noqa: BLE001 - a policy that fails costs its plan, never a stream
            self.errors += 1
            line = (
                f"TokenFlow: policy {self.policy.name!r} failed; the engine goes on first come, first served"
            )
            self._failures.log(_logger, "plan", line, exc_info=True)
            self.use(FCFS())
            return STOCK
        took = time.perf_counter() - started
        self.seconds += took
        self.plans += 1
        self._not_before = now + took / _MAX_SHARE
        return orders

    def _plan(self, now: float) -> Orders:
        view, ids = self._table.view(now=now, device=self._device(), costs=self._costs, reader=self._reader)
        plan = self.policy.plan(view, ids)
        _check(plan, view)
        self.news += self._table.explain({ids[row]: why for row, why in plan.reasons.items()})
        self._is_stock = plan.stock
        pending = bool((view.phase != Phase.RUNNING).any())
        self._by = min(plan.next_at, now + _LONGEST_S if pending else float("inf"))
        return Orders.of(plan, ids)


_FROM = {
    "park": {Phase.RUNNING},
    "evict": {Phase.RUNNING, Phase.PARKED},
    "resume": {Phase.PARKED},
    "admit": {Phase.WAITING},
}


def _check(plan: Plan, view: EngineView) -> None:
    """Raise ValueError for a plan that this view does not allow."""
    lists = {name: getattr(plan, name) for name in _FROM}
    lists["load"] = [row for row, _ in plan.load]
    named = [row for rows in lists.values() for row in rows]
    if len(set(named)) != len(named):
        raise ValueError("a row of the plan is in two lists")
    for name, rows in lists.items():
        allowed = _FROM.get(name, {Phase.OFFLOADED})
        for row in rows:
            if Phase(int(view.phase[row])) not in allowed:
                raise ValueError(f"row {row} cannot be in {name}: it is {Phase(int(view.phase[row])).name}")
