"""Room for the batch's next steps, and for somebody when nothing runs: what no policy may leave undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Ints, Phase, Reason
from tokenflow_engine.policy.draft import Draft
from tokenflow_engine.policy.rows import paged

__all__ = ["free_memory", "wake", "why_gone"]

_WAITING = int(Phase.WAITING)


def why_gone(view: EngineView, row: int) -> Reason:
    """What makes the row one that can leave."""
    if view.machine[row]:
        return Reason.NO_READER
    return Reason.PAUSED if view.paused[row] else Reason.AHEAD


def free_memory(draft: Draft, in_turn: Callable[[Bools], Iterable[int]]) -> None:
    """Evict until the batch can take its next steps: parked streams, then running ones.

    `in_turn` puts rows in the order in which they are to go. The last in the batch stays while it can take
    one step: evicting it would make no room for anybody else's.
    """
    if draft.soon >= 0:
        return
    view = draft.view
    may_go = view.may_park & (view.owned > 0)
    batch = int(np.count_nonzero(view.in_batch))
    for row in in_turn(may_go & view.parked):
        draft.evict(row, Reason.MEMORY)
        if draft.soon >= 0:
            return
    for row in in_turn(may_go & view.running):
        if batch == 1 and _can_step_alone(draft, row):
            return
        draft.evict(row, Reason.MEMORY)
        batch -= 1
        if draft.soon >= 0:
            return


def wake(draft: Draft, order: Ints) -> Draft:
    """`draft`, or another for its view if following it would leave the engine idle for ever.

    Nothing runs, is coming or going: the first of `order` that fits comes in. If none does, parked streams
    leave the device, last of `order` first, until one will. Each such plan brings somebody in or leaves fewer
    parked, and with nobody parked all memory is free: so somebody runs after a finite number of plans.
    Reserves are for one step, as the engine's own bound on a request's length leaves no more.
    """
    view, plan = draft.view, draft.plan
    moves = plan.evict or plan.resume or plan.load or plan.admit
    if moves or view.kv_freeing or bool(view.in_batch.any()):
        return draft
    least = Draft(view, steps=1)
    rows: list[int] = order.tolist()
    if _bring_first(least, rows):
        return least
    may_go = view.parked & view.may_park & (view.owned > 0)
    for row in reversed(rows):
        if not may_go[row]:
            continue
        least.evict(row, Reason.MEMORY)
        if any(not least.taken(other) and least.will_fit(other) for other in rows):
            break
    _bring_first(least, rows)
    return least


def _bring_first(draft: Draft, rows: list[int]) -> bool:
    """Bring in the first of `rows` that fits; whether one did."""
    waiting = draft.view.phase == _WAITING
    return any(
        not draft.taken(row) and draft.bring(row, Reason.ADMITTED if waiting[row] else Reason.RESUMED)
        for row in rows
    )


def _can_step_alone(draft: Draft, row: int) -> bool:
    """There is, or will be, memory for the next token of `row` with nobody else in the batch."""
    view = draft.view
    free = view.kv_free + view.kv_freeing + int(view.owned[draft.plan.evict].sum())
    context, page = view.context.item(row), view.page_tokens
    return free >= paged(context + 1, page) - paged(context, page)
