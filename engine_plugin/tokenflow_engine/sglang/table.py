"""All requests of one engine as the columns of an `EngineView`, kept up as things happen.

On the rank that plans. What an event changes is written where it happens; what time changes (buffers, KV
held) is filled in when somebody plans, not at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

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
_FIRST_CAPACITY = 256
_PRIOR_OUTPUT = 256
"""Tokens: how long an answer is taken to be before any has ended."""
_READ_ON_S = 0.03
"""What a reader has read of tokens that came in the meantime is looked at so often."""
_TEND_S = 0.03
"""The memory of some requests is looked at so often."""
_AVERAGE_S = 0.15
"""How long answers get is worked out so often."""
_ASK_EVERY_S = 0.5
_ASK_AT_ONCE = 16
"""Requests whose memory the engine is asked about at one time, besides those that are being written: it takes
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


def _as_it_is(name: str) -> Any:
    """A column of a view that is one of the table's, read when it is first asked for."""
    return cached_property(lambda view: view._columns[name].take(view._rows))


class _View(EngineView):
    """Rows of a table. Plans leave out most of a crowd, and ask little of those whom they leave out."""

    _columns: Mapping[str, NDArray[Any]]
    _rows: NDArray[np.int64]
    _left_to_prefill: Callable[[int], int]
    _engine: Mapping[str, Any]

    def __init__(
        self,
        columns: Mapping[str, NDArray[Any]],
        rows: NDArray[np.int64],
        *,
        left_to_prefill: Callable[[int], int],
        engine: Mapping[str, Any],
    ) -> None:
        """`left_to_prefill`: tokens of a row that is being prefilled. `engine`: what is no column."""
        self.__dict__.update(
            engine, _columns=columns, _rows=rows, _left_to_prefill=left_to_prefill, _engine=engine
        )

    phase = _as_it_is("phase")
    arrived = _as_it_is("arrived")
    generated = _as_it_is("generated")
    max_output = _as_it_is("max_output")
    rate = _as_it_is("rate")
    rate_low = _as_it_is("rate_low")
    rate_high = _as_it_is("rate_high")
    paused = _as_it_is("paused")
    machine = _as_it_is("machine")
    weight = _as_it_is("weight")
    ttft_target = _as_it_is("ttft_s")
    lead_cap = _as_it_is("lead_cap_s")
    since = _as_it_is("since")
    preemptions = _as_it_is("preemptions")
    _prompt = _as_it_is("prompt")
    _shared = _as_it_is("shared")
    _synced = _as_it_is("synced")
    _consumed = _as_it_is("consumed")
    _request_may_park = _as_it_is("may_park")
    _reader_may_park = _as_it_is("reader_may_park")

    def part(self, rows: NDArray[np.int64]) -> EngineView:
        return _View(
            self._columns,
            self._rows.take(rows),
            left_to_prefill=self._left_to_prefill,
            engine=self._engine,
        )

    @cached_property
    def context(self) -> NDArray[np.int64]:
        tokens: NDArray[np.int64] = self._prompt + self.generated
        return tokens

    @cached_property
    def owned(self) -> NDArray[np.int64]:
        page = self.page_tokens
        tokens: NDArray[np.int64] = self.context if page == 1 else -(-self.context // page) * page
        tokens = np.maximum(tokens - self._shared, 0)
        tokens *= (self.phase == _RUNNING) | (self.phase == _PARKED) | (self.phase == _LOADING)
        return tokens

    @cached_property
    def synced(self) -> NDArray[np.int64]:
        tokens: NDArray[np.int64] = np.minimum(self._synced, self.owned)
        return tokens

    @cached_property
    def buffered(self) -> NDArray[np.float64]:
        return np.where(self.machine, 0.0, self.generated - self._consumed)

    @cached_property
    def may_park(self) -> NDArray[np.bool_]:
        rows: NDArray[np.bool_] = self._request_may_park & self._reader_may_park
        return rows

    @cached_property
    def prefill(self) -> NDArray[np.int64]:
        left: NDArray[np.int64] = np.maximum(self.context, 1)
        left *= self.phase == _WAITING
        for row in np.flatnonzero(self.phase == _PREFILLING).tolist():
            left[row] = self._left_to_prefill(self._rows.item(row))
        return left


class _Names(Sequence[str]):
    """The rid of each row of a view: a plan names a few of thousands."""

    def __init__(self, rids: list[str], rows: NDArray[np.int64]) -> None:
        self._rids, self._rows = rids, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self._rids[row] for row in self._rows[at].tolist()]
        return self._rids[self._rows.item(at)]


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
        self._tended_at = self._averaged_at = -np.inf
        self._mean_output = float(_PRIOR_OUTPUT)
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
        if self._count - len(self._rows) > max(_FIRST_CAPACITY, len(self._rows) // 4):
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
        """Readers read on; for steps without a view, which does the same."""
        if now - self._read_on_at >= _READ_ON_S:
            self._read_on(now)

    def tend(self, now: float) -> None:
        """Look at what a view need not be exact in; between two views, so that none has to wait for it."""
        if now - self._tended_at < _TEND_S:
            return
        self._tended_at = now
        written = [self._rows[rid] for rid in self._writing if rid in self._rows]
        self._ask([*self._due_to_be_asked(now - _ASK_EVERY_S), *written], now)
        if now - self._averaged_at >= _AVERAGE_S:
            self._averaged_at = now
            alive = np.flatnonzero(self._columns["alive"][: self._count])
            generated = self._columns["generated"].take(alive)
            self._mean_output = expected_output(generated, self._ended, prior_tokens=_PRIOR_OUTPUT)

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

    def view(self, *, now: float, device: Device, costs: Costs) -> tuple[EngineView, Sequence[str]]:
        """The engine at `now`, and the rid of each row. To be used before anything else happens."""
        self._read_on(now)
        self.tend(now)
        self._ask(self._due_to_be_asked(-np.inf), now)  # of whom nothing is known
        self._viewed = np.flatnonzero(self._columns["alive"][: self._count])
        engine = {**device._asdict(), "now": now, "costs": costs, "mean_output": self._mean_output}
        view = _View(self._columns, self._viewed, left_to_prefill=self._left_to_prefill, engine=engine)
        return view, _Names(self._rids, self._viewed)

    def _left_to_prefill(self, row: int) -> int:
        req = self._reqs.get(self._rids[row])
        done: int = 0 if req is None else req.extend_end or 0
        context: int = self._columns["prompt"].item(row) + self._columns["generated"].item(row)
        return max(0, context - done)

    def _read_on(self, now: float) -> None:
        """As `VirtualBuffer` does: between two looks a reader reads what was there at the first."""
        columns, rows = self._columns, slice(0, self._count)
        passed_s = max(0.0, now - self._read_on_at)
        self._read_on_at += passed_s
        consumed = columns["consumed"][rows]
        read = consumed + passed_s * columns["speed"][rows]
        np.minimum(read, columns["readable"][rows], out=consumed)
        columns["readable"][rows] = columns["generated"][rows]

    def _due_to_be_asked(self, since: float) -> list[int]:
        """Rows with KV on the device of which the engine has not been asked since then, oldest first."""
        asked_at = self._columns["asked_at"][: self._count]
        due = np.flatnonzero(asked_at <= since)
        due = due[self._columns["generated"].take(due) > 0]
        if len(due) > _ASK_AT_ONCE:
            due = due[asked_at.take(due).argpartition(_ASK_AT_ONCE)[:_ASK_AT_ONCE]]
        rows: list[int] = due.tolist()
        return rows

    def _ask(self, rows: list[int], now: float) -> None:
        """Ask the engine about the memory of those of `rows` that are on the device."""
        columns = self._columns
        asked_at = columns["asked_at"]
        for row in rows:
            rid = self._rids[row]
            req = self._reqs.get(rid)
            if asked_at.item(row) < np.inf:
                asked_at[row] = now
                if req is not None:
                    columns["shared"][row] = self._shared_tokens(req)
                    columns["synced"][row] = self._synced_tokens(rid)

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
