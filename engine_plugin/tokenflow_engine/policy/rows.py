"""Questions about the rows of a view, answered for all of them at once."""

from __future__ import annotations

import numpy as np

from tokenflow_engine.policy.base import Bools, EngineView, Floats, Ints, Phase

__all__ = ["heaviest_first", "in_batch", "lowest", "outside", "paged", "preempted", "running", "started"]

# Plain numbers: looking up a member of an enumeration costs as much as a small array operation.
_WAITING, _RUNNING, _PREFILLING, _LOADING = (
    int(phase) for phase in (Phase.WAITING, Phase.RUNNING, Phase.PREFILLING, Phase.LOADING)
)


def running(view: EngineView) -> Bools:
    """In the decode batch."""
    rows: Bools = view.phase == _RUNNING
    return rows


def in_batch(view: EngineView) -> Bools:
    """Holds one of `max_running` places: running, or about to."""
    rows: Bools = (view.phase == _RUNNING) | (view.phase == _PREFILLING) | (view.phase == _LOADING)
    return rows


def outside(view: EngineView) -> Bools:
    """Not in the batch and not on the way: waiting, parked or offloaded."""
    return ~in_batch(view)


def preempted(view: EngineView) -> Bools:
    """Parked or offloaded."""
    rows: Bools = outside(view) & (view.phase != _WAITING)
    return rows


def started(view: EngineView) -> Bools:
    """Its reader has had a first token."""
    rows: Bools = view.generated > 0
    return rows


def paged(tokens: int, page_tokens: int) -> int:
    """`tokens`, rounded up to whole pages."""
    return -(-tokens // page_tokens) * page_tokens


def lowest(keys: Floats, rows: Ints, count: int) -> Ints:
    """The `count` of `rows` with the lowest `keys`, lowest first, ties in row order."""
    ordered = keys.take(rows)
    if bool((ordered[1:] >= ordered[:-1]).all()):
        return rows[:count]  # as newcomers of one class are, by their arrival
    if len(rows) > count:
        near = np.flatnonzero(ordered <= np.partition(ordered, count - 1)[count - 1])
        rows, ordered = rows.take(near), ordered.take(near)
    return rows[ordered.argsort(kind="stable")[:count]]


def heaviest_first(urgency: Floats, weight: Floats, rows: Ints, most: int) -> Ints:
    """At most `most` of `rows`, all of a heavier class before any of a lighter one, the most urgent first.

    Else many of a light class who have waited for minutes would be all that is looked at.
    """
    weights = weight.take(rows)
    levels = np.unique(weights)[::-1].tolist()
    if len(levels) <= 1:
        return lowest(urgency, rows, most)
    first: list[Ints] = []
    for level in levels:
        first.append(lowest(urgency, rows[weights == level], most))
        most -= len(first[-1])
        if most <= 0:
            break
    return np.concatenate(first)
