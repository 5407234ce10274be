"""What every plan must obey, and views made by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenflow_bench.costs import MACHINES, Machine
from tokenflow_bench.views import IdleCopies
from tokenflow_engine.policy.base import EngineView, Phase, Place, Plan, Reason
from tokenflow_engine.policy.rows import paged

NOW = 100.0
BATCH = (Phase.RUNNING, Phase.PREFILLING, Phase.LOADING)


@dataclass(kw_only=True)
class Row:
    """One stream of a view made by hand. A started one has been where it is for a minute."""

    phase: Phase
    context: int = 500
    generated: int | None = None
    buffered: float = 0.0
    rate: float = 10.0
    paused: bool = False
    machine: bool = False
    weight: float = 1.0
    ttft_target: float = 1.0
    lead_cap: float = float("inf")
    may_park: bool = True
    waited: float = 60.0
    since: float = 60.0
    synced: bool = True
    max_output: int = 1000


def view_of(*rows: Row, machine: Machine = MACHINES["4090"], free: int = 40, **engine: Any) -> EngineView:
    """A view of these rows at `NOW`, with `free` tokens left, by default enough for a few steps."""
    phase = np.array([row.phase for row in rows], dtype=np.int8)
    context = np.array([row.context for row in rows], dtype=np.int64)
    generated = np.array(
        [row.generated if row.generated is not None else 100 * (row.phase != Phase.WAITING) for row in rows]
    )
    here = np.isin(phase, [Phase.RUNNING, Phase.PARKED])
    resident = here | (phase == Phase.LOADING)
    rate = np.array([row.rate for row in rows])
    owned = np.where(here, context, 0)
    page = machine.page_tokens
    values: dict[str, Any] = {
        "now": NOW,
        "kv_tokens": free + int((-(-context[resident] // page) * page).sum()),
        "kv_free": free,
        "max_running": 256,
        "max_resident": 256,
        "page_tokens": page,
        "host_free": 1_000_000,
        "costs": IdleCopies(machine),
        "mean_output": 300.0,
        "phase": phase,
        "arrived": NOW - np.array([row.waited for row in rows]),
        "prefill": np.where(phase == Phase.WAITING, context, 0),
        "context": context,
        "owned": owned,
        "synced": np.where([row.synced for row in rows], owned, 0),
        "generated": generated,
        "max_output": generated + np.array([row.max_output for row in rows]),
        "buffered": np.minimum([row.buffered for row in rows], generated.astype(float)),
        "rate": rate,
        "rate_low": rate,
        "rate_high": rate,
        "paused": np.array([row.paused for row in rows], dtype=bool),
        "machine": np.array([row.machine for row in rows], dtype=bool),
        "weight": np.array([row.weight for row in rows]),
        "ttft_target": np.array([row.ttft_target for row in rows]),
        "lead_cap": np.array([row.lead_cap for row in rows]),
        "may_park": np.array([row.may_park for row in rows], dtype=bool),
        "since": NOW - np.array([row.since for row in rows]),
        "preemptions": np.zeros(len(rows), dtype=np.int64),
    }
    return EngineView(**(values | engine))


def names(view: EngineView) -> list[str]:
    return [f"s{row}" for row in range(len(view))]


def check(view: EngineView, plan: Plan, *, frees_memory: bool = True) -> None:
    """Raise `AssertionError` unless following `plan` keeps to the contract of `policy.base`.

    `frees_memory`: the policy does not leave it to the engine to retract when memory runs out.
    """
    if plan.stock:
        assert not [*plan.park, *plan.evict, *plan.resume, *plan.load, *plan.admit, *plan.write]
        return
    _check_rows(view, plan)
    _check_places(view, plan)
    _check_memory(view, plan, frees_memory)
    assert plan.next_at > view.now
    assert plan.prefill_tokens is None or plan.prefill_tokens > 0


def _check_rows(view: EngineView, plan: Plan) -> None:
    loads = [row for row, _ in plan.load]
    listed = plan.park + plan.evict + plan.resume + loads + plan.admit + plan.write
    assert len(listed) == len(set(listed)), "a row is in one list only"
    phases = {
        Phase.RUNNING: {*plan.park},
        Phase.PARKED: {*plan.resume},
        Phase.OFFLOADED: {*loads},
        Phase.WAITING: {*plan.admit},
    }
    for phase, rows in phases.items():
        assert all(view.phase[row] == phase for row in rows), f"only {phase.name} rows"
    for row in plan.evict + plan.write:
        assert view.phase[row] in (Phase.RUNNING, Phase.PARKED)
    for row in plan.park + plan.evict + plan.write:
        assert view.may_park[row], "fixed rows are not touched"
    waiting = set(np.flatnonzero(view.phase == Phase.WAITING).tolist())
    assert set(listed) <= plan.reasons.keys(), "everything has a reason"
    assert waiting <= plan.reasons.keys() or plan.why_waiting != Reason.NONE, "who waits is told why"


def _check_places(view: EngineView, plan: Plan) -> None:
    coming = len(plan.resume) + len(plan.load) + len(plan.admit)
    if not coming:
        return
    inside = int(np.isin(view.phase, BATCH).sum())
    leaving = len(plan.park) + sum(view.phase[row] == Phase.RUNNING for row in plan.evict)
    assert inside - leaving + coming <= view.max_running
    resident = inside + int((view.phase == Phase.PARKED).sum())
    assert resident - len(plan.evict) + coming - len(plan.resume) <= view.max_resident


def _check_memory(view: EngineView, plan: Plan, frees_memory: bool) -> None:
    """Who comes in fits, with one step's growth for everybody, into what is free at once."""
    page = view.page_tokens

    def growth(row: int) -> int:
        return paged(int(view.context[row]) + 1, page) - paged(int(view.context[row]), page)

    gone = {*plan.park, *plan.evict}
    running = [row for row in np.flatnonzero(view.phase == Phase.RUNNING).tolist() if row not in gone]
    reserve = sum(growth(row) for row in running + plan.resume)
    reserve += int(view.prefill[view.phase == Phase.PREFILLING].sum())
    reserve += page * int((view.phase == Phase.LOADING).sum())
    coming = [row for row, place in plan.load if place in (Place.LOAD, Place.RECOMPUTE)] + plan.admit
    taken = sum(paged(int(view.context[row]) + 1, page) for row in coming)
    freed = sum(int(min(view.synced[row], view.owned[row])) // page * page for row in plan.evict)
    if coming or plan.resume:
        assert view.kv_free + freed - taken - reserve >= 0, "who comes in fits into what is free at once"
        return
    later = view.kv_free + view.kv_freeing + sum(int(view.owned[row]) for row in plan.evict) - reserve
    evictable = np.isin(view.phase, [Phase.RUNNING, Phase.PARKED]) & view.may_park & (view.owned > 0)
    everybody = set(np.flatnonzero(evictable).tolist()) <= gone
    assert later >= 0 or everybody or not frees_memory, "the batch has memory for its next step"
