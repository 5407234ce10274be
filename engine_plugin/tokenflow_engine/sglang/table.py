"""All requests of one engine as the columns of an `EngineView`, kept up as things happen.

On the rank that plans. What an event changes is written where it happens; what time changes (buffers, KV
held) is filled in when somebody plans, not at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenflow_engine.buffer import DEFAULT_RATE
from tokenflow_engine.control.streams import ReaderView
from tokenflow_engine.policy.base import Costs, EngineView, Phase, Plan, Reason
from tokenflow_engine.policy.lengths import EndedOutputs, expected_output

__all__ = ["Device", "Table"]

_COLUMNS: dict[str, Any] = {
    "alive": np.bool_,
    "phase": np.int8,
    "reason": np.int8,
    "arrived": np.float64,
    "prompt": np.int64,
    "generated": np.int64,
    "max_output": np.int64,
    "may_park": np.bool_,
    "since": np.float64,
    "preemptions": np.int64,
    # Of its reader.
    "rate": np.float64,
    "rate_low": np.float64,
    "rate_high": np.float64,
    "paused": np.bool_,
    "machine": np.bool_,
    "weight": np.float64,
    "ttft_s": np.float64,
    "lead_cap_s": np.float64,
    "reader_may_park": np.bool_,
    "speed": np.float64,  # its rate, 0 while it is paused
    "consumed": np.float64,
    "readable": np.int64,  # of `generated`, what was there when the reader was last looked at
    # Of its memory.
    "shared": np.int64,  # KV tokens that others would go on using if it left
    "synced": np.int64,
    "asked_at": np.float64,  # infinite while nothing of it is on the device
}
_NOT_VIEWED = {"alive", "reason", "speed", "readable", "asked_at"}
"""What no view is made of."""
_FIRST_CAPACITY = 256
_PRIOR_OUTPUT = 256
"""Tokens: how long an answer is taken to be before any has ended."""
_READ_ON_S = 0.03
"""What a reader has read of tokens that came in the meantime is looked at so often."""
_ASK_EVERY_S = 0.5
_ASK_AT_ONCE = 16
"""Requests whose memory one view asks the engine about, besides those that are being written: it takes
microseconds for each, and what is shared changes rarely."""
_RUNNING, _PARKED, _OFFLOADED, _LOADING, _PREFILLING, _WAITING = (
    int(phase)
    for phase in (
        Phase.RUNNING,
        Phase.PARKED,
        Phase.OFFLOADED,
        Phase.LOADING,
        Phase.PREFILLING,
        Phase.WAITING,
    )
)
_PREEMPTED = (Phase.PARKED, Phase.OFFLOADED)
_OFF_DEVICE = (Phase.WAITING, Phase.PREFILLING, Phase.OFFLOADED)
_NO_REASON, _HOST_FULL = -1, int(Reason.HOST_FULL)
_UNKNOWN_READER = {
    "rate": DEFAULT_RATE,
    "rate_low": DEFAULT_RATE,
    "rate_high": DEFAULT_RATE,
    "machine": True,
    "weight": 1.0,
    "ttft_s": 1.0,
    "lead_cap_s": np.inf,
    "reader_may_park": True,
}
_OF_READER = ("consumed", *ReaderView._fields[1:-1], "reader_may_park")
"""The columns of a `ReaderView`, whose first field is what is left of `generated`."""


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
        shared_tokens: Callable[[Any], int],
        synced_tokens: Callable[[str], int],
    ) -> None:
        """Each asks the engine about one request.

        Whether it can be preempted at all; of its KV on the device, what would not be free if it left; what
        host memory holds of it.
        """
        self._may_park = may_park
        self._shared_tokens = shared_tokens
        self._synced_tokens = synced_tokens
        self._columns: dict[str, NDArray[Any]] = {
            name: np.zeros(_FIRST_CAPACITY, dtype) for name, dtype in _COLUMNS.items()
        }
        self._count = 0
        """Rows in use, those of requests that have ended included."""
        self._rows: dict[str, int] = {}
        """In order of rows."""
        self._rids: list[str] = []
        """Of all rows in use."""
        self._reqs: dict[str, Any] = {}
        self._viewed: NDArray[np.int64] = np.zeros(0, np.int64)
        """Our rows, for each of the last view's."""
        self._writing: list[str] = []
        self._read_on_at = 0.0
        self._ended = EndedOutputs()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, rid: str) -> bool:
        return rid in self._rows

    # ---- what happens ------------------------------------------------------------------------------

    def arrived(self, rid: str, *, prompt: int, max_output: int, now: float) -> None:
        """A request has reached the scheduler."""
        if rid in self._rows:
            return
        row = self._count
        self._grow_to(row + 1)
        self._count += 1
        self._rows[rid] = row
        self._rids.append(rid)
        values = {
            "alive": True,
            "phase": Phase.WAITING,
            "reason": _NO_REASON,
            "arrived": now,
            "since": now,
            "prompt": prompt,
            "max_output": max_output,
            "asked_at": np.inf,
            **_UNKNOWN_READER,
        }
        for name, column in self._columns.items():
            column[row] = values.get(name, 0)

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
        columns = self._columns
        if reason is not None:
            columns["reason"][row] = reason
        before = columns["phase"].item(row)
        if before == phase:
            return False
        columns["phase"][row] = phase
        columns["since"][row] = now
        columns["preemptions"][row] += phase in _PREEMPTED and before not in _PREEMPTED
        if before in _OFF_DEVICE:  # until the engine can be asked
            columns["shared"][row], columns["synced"][row] = columns["prompt"][row], 0
            columns["asked_at"][row] = -np.inf
        if phase in _OFF_DEVICE:
            columns["asked_at"][row] = np.inf
        return True

    def ended(self, rid: str) -> None:
        """The request is gone."""
        row = self._rows.pop(rid, None)
        self._reqs.pop(rid, None)
        if row is None:
            return
        self._ended.add(self._columns["generated"].item(row))
        self._columns["alive"][row] = False
        self._columns["asked_at"][row] = np.inf
        if self._count - len(self._rows) > max(_FIRST_CAPACITY, len(self._rows)):
            self._compact()

    def reconcile(self, live: set[str]) -> None:
        """End what the engine no longer holds."""
        for rid in [rid for rid in self._rows if rid not in live]:
            self.ended(rid)

    def read_by(self, rid: str, reader: ReaderView, *, now: float) -> None:
        """Who reads a request, and where this reader is; it reads on from there by itself."""
        row = self._rows.get(rid)
        if row is None:
            return
        if now > self._read_on_at:
            self._read_on(now)
        columns = self._columns
        for name, value in zip(_OF_READER, reader, strict=True):
            columns[name][row] = value
        generated = columns["generated"].item(row)
        columns["speed"][row] = 0.0 if reader.paused else reader.rate
        columns["readable"][row] = generated
        columns["consumed"][row] = generated - reader.buffered

    def pass_time(self, now: float) -> None:
        """Readers read on; to be called at every step."""
        if now - self._read_on_at >= _READ_ON_S:
            self._read_on(now)

    def planned(self, plan: Plan) -> list[str]:
        """Take in what a plan for the last view says; the rids of those of whom it says something new."""
        columns, rows, rids = self._columns, self._viewed, self._rids
        why = columns["reason"][: self._count]
        before = why.copy()
        if plan.why_waiting is not Reason.NONE:
            waiting = columns["alive"][: self._count] & (columns["phase"][: self._count] == _WAITING)
            waiting &= why != _HOST_FULL
            why[waiting] = plan.why_waiting
        for row, reason in plan.reasons.items():
            why[rows.item(row)] = reason
        self._writing = [rids[rows.item(row)] for row in plan.write]
        return [rids[row] for row in np.flatnonzero(why != before).tolist()]

    # ---- what is asked -----------------------------------------------------------------------------

    def reason(self, rid: str) -> Reason | None:
        """Why a stream is where it is, by the last plan that said so."""
        row = self._rows.get(rid)
        why = _NO_REASON if row is None else self._columns["reason"].item(row)
        return None if why == _NO_REASON else Reason(why)

    def phase(self, rid: str) -> Phase | None:
        """Where a request is; None if it is not known."""
        row = self._rows.get(rid)
        return None if row is None else Phase(self._columns["phase"].item(row))

    def awaits_first_token(self, rid: str) -> bool:
        """Whether a request is there that has generated nothing yet."""
        row = self._rows.get(rid)
        return row is not None and not self._columns["generated"].item(row)

    @property
    def all_run(self) -> bool:
        """Whether all requests are in the decode batch, so that there is nothing to plan."""
        phase, alive = self._columns["phase"][: self._count], self._columns["alive"][: self._count]
        return not bool((alive & (phase != _RUNNING)).any())

    def view(self, *, now: float, device: Device, costs: Costs) -> tuple[EngineView, list[str]]:
        """The engine at `now`, and the rid of each row."""
        self._read_on(now)
        self._ask(now)
        self._viewed = alive = np.flatnonzero(self._columns["alive"][: self._count])
        ids = list(self._rows)
        column = {
            name: values.take(alive) for name, values in self._columns.items() if name not in _NOT_VIEWED
        }
        phase, generated = column["phase"], column["generated"]
        context = column["prompt"] + generated
        page = device.page_tokens
        on_device = (phase == _RUNNING) | (phase == _PARKED) | (phase == _LOADING)
        owned = (context if page == 1 else -(-context // page) * page) - column["shared"]
        np.maximum(owned, 0, out=owned)
        owned *= on_device
        view = EngineView(
            now=now,
            **device._asdict(),
            costs=costs,
            mean_output=expected_output(generated, self._ended, prior_tokens=_PRIOR_OUTPUT),
            phase=phase,
            arrived=column["arrived"],
            prefill=self._to_prefill(ids, phase, context),
            context=context,
            owned=owned,
            synced=np.minimum(column["synced"], owned),
            generated=generated,
            max_output=column["max_output"],
            buffered=np.where(column["machine"], 0.0, generated - column["consumed"]),
            rate=column["rate"],
            rate_low=column["rate_low"],
            rate_high=column["rate_high"],
            paused=column["paused"],
            machine=column["machine"],
            weight=column["weight"],
            ttft_target=column["ttft_s"],
            lead_cap=column["lead_cap_s"],
            may_park=column["may_park"] & column["reader_may_park"],
            since=column["since"],
            preemptions=column["preemptions"],
        )
        return view, ids

    def _to_prefill(
        self, ids: list[str], phase: NDArray[np.int8], context: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        left: NDArray[np.int64] = np.maximum(context, 1)
        left *= phase == _WAITING
        for row in np.flatnonzero(phase == _PREFILLING).tolist():
            req = self._reqs.get(ids[row])
            done = 0 if req is None else req.extend_end or 0
            left[row] = max(0, context.item(row) - done)
        return left

    def _read_on(self, now: float) -> None:
        """As `VirtualBuffer` does: between two looks a reader reads what was there at the first."""
        columns, rows = self._columns, slice(0, self._count)
        passed_s = max(0.0, now - self._read_on_at)
        self._read_on_at += passed_s
        consumed = columns["consumed"][rows]
        read = consumed + passed_s * columns["speed"][rows]
        np.minimum(read, columns["readable"][rows], out=consumed)
        columns["readable"][rows] = columns["generated"][rows]

    def _ask(self, now: float) -> None:
        """Ask the engine about the memory of those not asked about for long, and of those being written."""
        columns = self._columns
        asked_at = columns["asked_at"][: self._count]
        due = np.flatnonzero(asked_at <= now - _ASK_EVERY_S)
        due = due[columns["generated"].take(due) > 0]
        if len(due) > _ASK_AT_ONCE:
            due = due[asked_at.take(due).argpartition(_ASK_AT_ONCE)[:_ASK_AT_ONCE]]
        rows: list[int] = due.tolist()
        writing = [self._rows[rid] for rid in self._writing if rid in self._rows]
        rows += [row for row in writing if asked_at.item(row) < np.inf]
        for row in rows:
            rid = self._rids[row]
            req = self._reqs.get(rid)
            if req is not None:
                columns["shared"][row] = self._shared_tokens(req)
                columns["synced"][row] = self._synced_tokens(rid)
        asked_at[rows] = now

    def _grow_to(self, rows: int) -> None:
        for name, column in self._columns.items():
            if rows > len(column):
                self._columns[name] = np.concatenate([column, np.zeros_like(column)])

    def _compact(self) -> None:
        alive = np.flatnonzero(self._columns["alive"][: self._count])
        for column in self._columns.values():
            column[: len(alive)] = column[alive]
        self._count = len(alive)
        self._rids = list(self._rows)
        self._rows = {rid: row for row, rid in enumerate(self._rids)}
