"""A plan in the making, and what it leaves of device memory, batch places and request rows.

Every policy that does not leave admission to the engine writes its plan through a `Draft`, so that none of
them can promise memory that is not there. Each stream in the batch keeps a reserve for the tokens of its next
steps.
"""

from __future__ import annotations

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Phase, Place, Plan, Reason
from tokenflow_engine.policy.due import due_back

__all__ = ["Draft"]

_WAITING, _RUNNING, _PARKED, _OFFLOADED = (
    int(phase) for phase in (Phase.WAITING, Phase.RUNNING, Phase.PARKED, Phase.OFFLOADED)
)


class Draft:
    """Collects rows; refuses what does not fit. `steps`: decode steps for which the batch keeps its reserve.

    `free` is memory that is there now; `soon` also counts pages that are free once copies to the host are
    done. Both may be negative: then the batch cannot take its next steps.
    """

    def __init__(self, view: EngineView, *, steps: int = 2) -> None:
        self.view = view
        self.plan = Plan()
        page = view.page_tokens
        inside, decoding, parked = view.in_batch, view.running, view.parked
        grown = view.context + steps
        if page > 1:
            grown = -(-grown // page) * page
            growth = grown - -(-view.context // page) * page
        else:
            growth = np.full(len(grown), steps)
        self._phases: list[int] = view.phase.tolist()
        self._growth = growth
        self._needs = np.where(parked, growth, grown)
        batch, coming = int(np.count_nonzero(inside)), int(np.count_nonzero(inside & ~decoding))
        # A load has taken its pages; a prefill takes those of the rest of its prompt as it goes on.
        reserve = int(growth[decoding].sum()) + coming * -(-steps // page) * page
        if coming:
            reserve += int(view.prefill[inside].sum())
        self.free = view.kv_free - reserve
        self.soon = self.free + view.kv_freeing
        self.places = view.max_running - batch
        self.rows = view.max_resident - batch - int(np.count_nonzero(parked))

    def needs(self, row: int) -> int:
        """Tokens of free memory that the row takes when it comes into the batch."""
        needed: int = self._needs.item(row)
        return needed

    def needs_of(self, rows: Bools) -> int:
        """The same for several."""
        return int(self._needs[rows].sum())

    def beyond_all(self) -> Bools:
        """Rows that an empty pool could not take."""
        rows: Bools = self._needs > self.view.kv_tokens
        return rows

    def fits(self, row: int) -> bool:
        """There is a place for it now."""
        return self._needs.item(row) <= self.free and self._has_place(row)

    def will_fit(self, row: int) -> bool:
        """There is a place for it once pending copies are done."""
        return self._needs.item(row) <= self.soon and self._has_place(row)

    def bring(self, row: int, reason: Reason, place: Place = Place.LOAD) -> bool:
        """Put the row into the batch, as its phase asks for. False if there is no place for it now."""
        if not self.fits(row):
            return False
        phase = self._phases[row]
        if phase == _PARKED:
            self.plan.resume.append(row)
        elif phase == _OFFLOADED:
            self.plan.load.append((row, place))
        else:
            assert phase == _WAITING, "only streams outside can be brought back"
            self.plan.admit.append(row)
        self.hold(row, reason)
        return True

    def hold(self, row: int, reason: Reason) -> None:
        """Keep a place for a row: nobody after it in this plan may take it."""
        needs = self.needs(row)
        self.free -= needs
        self.soon -= needs
        self.places -= 1
        self.rows -= int(self._phases[row] != _PARKED)
        self.plan.reasons[row] = reason

    def evict(self, row: int, reason: Reason) -> None:
        """Take the row's KV off the device. What the host holds already is free at once."""
        decoding = self._phases[row] == _RUNNING
        owned, synced = self.view.owned.item(row), self.view.synced.item(row)
        page = self.view.page_tokens
        growth = self._growth.item(row) if decoding else 0
        self.free += growth + min(synced, owned) // page * page
        self.soon += growth + owned
        self.rows += 1
        self.places += int(decoding)
        self.plan.evict.append(row)
        self.plan.reasons[row] = reason

    def park(self, row: int, reason: Reason) -> None:
        """Out of the batch; its KV stays."""
        assert self._phases[row] == _RUNNING, "only running streams can be parked"
        self.free += self._growth.item(row)
        self.soon += self._growth.item(row)
        self.places += 1
        self.plan.park.append(row)
        self.plan.reasons[row] = reason

    def taken(self, row: int) -> bool:
        """The plan has decided on this row."""
        return row in self.plan.reasons

    def full_at(self) -> float:
        """When the batch, growing as it decodes, will have used up `free`; at least one step from now."""
        rows = self.view.running
        batch = int(np.count_nonzero(rows))
        if not batch:
            return float("inf")
        step_s = self.view.costs.decode_s(batch, float(self.view.context[rows].sum()))
        return self.view.now + max(max(self.free, 0) / batch, 1.0) * step_s

    def finish(self, *, next_at: float, why_waiting: Reason = Reason.NO_ROOM) -> Plan:
        """The plan. Waiting rows that it does not admit, and that have no reason yet, get `why_waiting`."""
        self.plan.due_s = due_back(self.view, [*self.plan.evict, *self.plan.write])
        self.plan.why_waiting = why_waiting
        self.plan.next_at = next_at
        return self.plan

    def _has_place(self, row: int) -> bool:
        return self.places > 0 and (self.rows > 0 or self._phases[row] == _PARKED)
