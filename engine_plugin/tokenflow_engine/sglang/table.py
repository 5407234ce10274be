"""All requests of one engine as the columns of an `EngineView`, kept up as things happen.

On the rank that plans. What an event changes is written where it happens; what time changes (buffers, KV
held) is filled in when somebody plans, not at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenflow_engine.control.streams import ReaderView
from tokenflow_engine.policy.base import Costs, EngineView, Phase, Reason
from tokenflow_engine.policy.lengths import expected_output

__all__ = ["Device", "Table"]

_COLUMNS: dict[str, type] = {
    "phase": np.int8,
    "arrived": np.float64,
    "prompt": np.int64,
    "generated": np.int64,
    "max_output": np.int64,
    "cached": np.int64,
    "may_park": np.bool_,
    "since": np.float64,
    "preemptions": np.int64,
}
_FIRST_CAPACITY = 256
_PRIOR_OUTPUT = 256
"""Tokens: how long an answer is taken to be before any has ended."""
_ON_DEVICE = (Phase.RUNNING, Phase.PARKED, Phase.LOADING)
_PREEMPTED = (Phase.PARKED, Phase.OFFLOADED)


class Device(NamedTuple):
    """The engine's memory at this moment, in tokens."""

    kv_tokens: int
    kv_free: int
    kv_freeing: int
    max_running: int
    max_resident: int
    page_tokens: int
    host_free: int
    mixed: bool = False


class Table:
    """One row a request, in order of arrival. Times are monotonic seconds."""

    def __init__(
        self,
        *,
        may_park: Callable[[Any], bool],
        held_tokens: Callable[[Any], int],
        synced_tokens: Callable[[str], int],
    ) -> None:
        """Each asks the engine about one request; `held_tokens` are those that would be free if it left."""
        self._may_park = may_park
        self._held_tokens = held_tokens
        self._synced_tokens = synced_tokens
        self._columns: dict[str, NDArray[Any]] = {
            name: np.zeros(_FIRST_CAPACITY, dtype) for name, dtype in _COLUMNS.items()
        }
        self._ids: list[str] = []
        self._rows: dict[str, int] = {}
        self._reqs: dict[str, Any] = {}
        self._reasons: dict[str, Reason] = {}
        self._gone = 0
        self._ended_tokens = 0
        self._completions = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, rid: str) -> bool:
        return rid in self._rows

    # ---- what happens ------------------------------------------------------------------------------

    def arrived(self, rid: str, *, prompt: int, max_output: int, now: float) -> None:
        """A request has reached the scheduler."""
        if rid in self._rows:
            return
        row = len(self._ids)
        self._grow_to(row + 1)
        self._ids.append(rid)
        self._rows[rid] = row
        values = {"phase": Phase.WAITING, "arrived": now, "prompt": prompt, "max_output": max_output}
        for name, column in self._columns.items():
            column[row] = values.get(name, 0)
        self._columns["since"][row] = now

    def known(self, req: Any) -> None:
        """The engine's own record of a request that has arrived."""
        row = self._rows.get(req.rid)
        if row is None:
            return
        self._reqs[req.rid] = req
        self._columns["prompt"][row] = len(req.origin_input_ids)
        self._columns["max_output"][row] = req.sampling_params.max_new_tokens
        self._columns["may_park"][row] = self._may_park(req)

    def counted(self, rid: str, generated: int) -> None:
        """The request has generated so many tokens in all."""
        row = self._rows.get(rid)
        if row is not None:
            self._columns["generated"][row] = generated

    def moved(self, rid: str, phase: Phase, *, now: float, reason: Reason | None = None) -> bool:
        """The request is somewhere else; False if it was there already."""
        row = self._rows.get(rid)
        if row is None:
            return False
        if reason is not None:
            self._reasons[rid] = reason
        if self._columns["phase"][row] == phase:
            return False
        was_preempted = self._columns["phase"][row] in _PREEMPTED
        self._columns["phase"][row] = phase
        self._columns["since"][row] = now
        self._columns["preemptions"][row] += phase in _PREEMPTED and not was_preempted
        return True

    def ended(self, rid: str, *, is_complete: bool) -> None:
        """The request is gone. Only complete ones say how long answers are."""
        row = self._rows.pop(rid, None)
        self._reqs.pop(rid, None)
        self._reasons.pop(rid, None)
        if row is None:
            return
        self._ended_tokens += int(self._columns["generated"][row])
        self._completions += is_complete
        self._ids[row] = ""
        self._gone += 1
        if self._gone > max(_FIRST_CAPACITY, len(self._rows)):
            self._compact()

    def reconcile(self, live: set[str]) -> None:
        """End what the engine no longer holds."""
        for rid in [rid for rid in self._rows if rid not in live]:
            self.ended(rid, is_complete=False)

    def explain(self, reasons: dict[str, Reason]) -> list[str]:
        """Why the last plan did with each of these what it did; those for which it is news."""
        news = [rid for rid, why in reasons.items() if rid in self._rows and self._reasons.get(rid) != why]
        self._reasons.update({rid: reasons[rid] for rid in news})
        return news

    # ---- what is asked -----------------------------------------------------------------------------

    def reason(self, rid: str) -> Reason | None:
        """Why a stream is where it is, by the last plan that said so."""
        return self._reasons.get(rid)

    def phase(self, rid: str) -> Phase | None:
        """Where a request is; None if it is not known."""
        row = self._rows.get(rid)
        return None if row is None else Phase(int(self._columns["phase"][row]))

    def view(
        self, *, now: float, device: Device, costs: Costs, reader: Callable[[str, float], ReaderView]
    ) -> tuple[EngineView, list[str]]:
        """The engine at `now`, and the rid of each row. `reader` knows who reads a request."""
        ids = [rid for rid in self._ids if rid]
        alive = np.fromiter(self._rows.values(), dtype=np.int64, count=len(self._rows))
        alive.sort()
        taken = {name: column[alive] for name, column in self._columns.items()}
        readers = _columns([reader(rid, now) for rid in ids])
        waiting = taken["phase"] == Phase.WAITING
        context = taken["prompt"] + taken["generated"]
        owned = np.zeros(len(ids), np.int64)
        synced = np.zeros(len(ids), np.int64)
        for row in np.isin(taken["phase"], _ON_DEVICE).nonzero()[0].tolist():
            req = self._reqs.get(ids[row])
            if req is not None:
                owned[row] = self._held_tokens(req)
                synced[row] = min(owned[row], self._synced_tokens(ids[row]))
        left = np.zeros(len(ids), np.int64)
        for row in (taken["phase"] == Phase.PREFILLING).nonzero()[0].tolist():
            req = self._reqs.get(ids[row])
            left[row] = context[row] if req is None else max(0, context[row] - (req.extend_end or 0))
        view = EngineView(
            now=now,
            **device._asdict(),
            costs=costs,
            mean_output=expected_output(
                taken["generated"],
                ended_tokens=self._ended_tokens,
                ended=self._completions,
                prior_tokens=_PRIOR_OUTPUT,
            ),
            phase=taken["phase"],
            arrived=taken["arrived"],
            prefill=np.where(waiting, np.maximum(context - taken["cached"], 1), left),
            context=context,
            owned=owned,
            synced=synced,
            generated=taken["generated"],
            max_output=taken["max_output"],
            buffered=readers["buffered"],
            rate=readers["rate"],
            rate_low=readers["rate_low"],
            rate_high=readers["rate_high"],
            paused=readers["paused"] != 0,
            machine=readers["machine"] != 0,
            weight=readers["weight"],
            ttft_target=readers["ttft_s"],
            may_park=taken["may_park"] & (readers["may_park"] != 0),
            since=taken["since"],
            preemptions=taken["preemptions"],
        )
        return view, ids

    def _grow_to(self, rows: int) -> None:
        for name, column in self._columns.items():
            if rows > len(column):
                self._columns[name] = np.concatenate([column, np.zeros_like(column)])

    def _compact(self) -> None:
        alive = [row for row, rid in enumerate(self._ids) if rid]
        for column in self._columns.values():
            column[: len(alive)] = column[alive]
        self._ids = [self._ids[row] for row in alive]
        self._rows = {rid: row for row, rid in enumerate(self._ids)}
        self._gone = 0


def _columns(readers: list[ReaderView]) -> dict[str, NDArray[np.float64]]:
    """The fields of all readers, each as one column."""
    table = np.array(readers, dtype=np.float64).reshape(len(readers), len(ReaderView._fields))
    return dict(zip(ReaderView._fields, np.ascontiguousarray(table.T), strict=True))
