"""A turn for who has been outside so long that a policy's ranks do not count any more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Floats, Place, Reason
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.room import why_gone
from tokenflow_engine.policy.rows import ascending, lowest

__all__ = ["Turns"]

_STEPS = 4
"""A stream that would fill the whole pool within so many has no turn: no draft would find it room."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Who has been outside for `after_s` is next, the longest wait first, whatever it costs others.

    Ranks by utility per token never pick a long context, or a machine, while short ones keep coming. Who came
    in so late stays for `stay_s`. So a stream waits at most `after_s + stay_s * (number of those before it)`
    beyond the time that its way in takes, if all that run may be parked; those that may not have to end
    first. Readers who have paused need no turn.
    """

    after_s: float
    stay_s: float

    def next(self, view: EngineView) -> int | None:
        """The row whose turn it is. None if nobody has waited for so long."""
        page = view.page_tokens
        fits_alone = -(-(view.context + _STEPS) // page) * page <= view.kv_tokens
        late = view.outside & fits_alone & (view.now - view.since >= self.after_s)
        late &= ~(view.paused & view.started)
        rows = lowest(view.since, np.flatnonzero(late), 1).tolist()
        return rows[0] if rows else None

    def stays(self, view: EngineView) -> Bools:
        """Running ones that came late and have not had their `stay_s`."""
        late = view.since - view.arrived >= self.after_s
        return view.running & late & (view.now - view.since < self.stay_s)

    def give(self, draft: Draft, row: int, rank: Floats, place: Place = Place.LOAD) -> bool:
        """Bring `row` in; those of the lowest `rank` leave for it. False if too few may leave.

        Its place is kept free until then: nobody else comes in, so that those who end make room for it.
        """
        view, decoding = draft.view, draft.view.running
        may_go = (decoding | view.parked) & view.may_park & (view.owned > 0) & ~self.stays(view)
        may_go[[row, *draft.plan.reasons]] = False
        tokens, places = draft.needs(row) - draft.soon, 1 - draft.places
        rows = 0 if view.parked[row] else 1 - draft.rows
        leaving: list[int] = []
        for victim in ascending(rank, np.flatnonzero(may_go)):
            if tokens <= 0 and places <= 0 and rows <= 0:
                break
            if tokens > 0 or rows > 0 or decoding[victim]:
                leaving.append(victim)
                tokens -= int(view.owned[victim])
                places -= int(decoding[victim])
                rows -= 1
        if tokens > 0 or places > 0 or rows > 0:
            if view.in_batch.any() or view.kv_freeing:
                draft.hold(row, Reason.NO_ROOM)
            return False
        for victim in leaving:
            draft.evict(victim, why_gone(view, victim))
        if not draft.bring(row, Reason.URGENT, place):
            draft.hold(row, Reason.NO_ROOM)
        return True
