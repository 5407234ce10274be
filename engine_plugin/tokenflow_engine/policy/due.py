"""Whose copy may go when host memory is full: that of streams due back later than the one that wants in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np

from tokenflow_engine.policy.base import EngineView, Phase
from tokenflow_engine.policy.options import Options
from tokenflow_engine.policy.rows import lowest

__all__ = ["due_back", "gives_way"]

Key = TypeVar("Key")

_OFFLOADED = int(Phase.OFFLOADED)
_PATIENCE_S = Options().patience_s
"""Within which `adaptive` brings a machine's stream back, by default; taken for other policies, too."""
_PAUSED_S = 1e6
"""Later than any reader who reads, for who has paused; and by as much as it has been away already."""
_SOON_S = 3.0
"""Who is due by then is about to come back: a plan may be a second old, and a load takes its time."""
_CLEAR_S = 2.0
"""Later by less is no reason to give up a copy that has been made."""
_MOST = 64
"""Streams in host memory that one plan names."""


def due_back(view: EngineView, leaving: Iterable[int]) -> dict[int, float]:
    """In how many seconds rows are due back, latest first: those in host memory alone, and who may join them.

    Those are the parked ones and `leaving`, as if they left now. Readers are due when they have read all, who
    has paused last of all, the longest away first. A heavier class is due sooner than the lightest of them by
    as much as it weighs more. Empty while host memory has room for all that is on the device, or has nobody's
    only copy.
    """
    if view.host_free >= view.kv_tokens:
        return {}
    away = np.flatnonzero(view.phase == _OFFLOADED)
    if not len(away):
        return {}
    due_s = view.buffered / np.maximum(view.rate_high, 1e-6)
    away_s = np.where(view.running, 0.0, view.now - view.since)
    due_s = np.where(view.paused, _PAUSED_S + away_s, np.minimum(due_s, _PAUSED_S))
    due_s = np.where(view.machine, _PATIENCE_S - away_s, due_s)
    here = np.zeros(len(view), dtype=bool)
    here[list(leaving)] = True
    here |= view.parked
    lightest = min(float(view.weight.take(away).min()), float(view.weight.min(where=here, initial=np.inf)))
    due_s = np.where(due_s > 0, due_s * lightest / view.weight, due_s * view.weight / lightest)
    rows = np.concatenate([lowest(-due_s, away, _MOST), np.flatnonzero(here)])
    return {row: due_s.item(row) for row in lowest(-due_s, rows, len(rows)).tolist()}


def gives_way(due_s: Mapping[Key, float], leaving: Key) -> list[Key]:
    """Of those in `due_back`, who is due so much later than `leaving` that its copy may go; the latest first.

    Who leaves unexpectedly, for memory, is taken to be due at once.
    """
    after_s = max(due_s.get(leaving, 0.0) + _CLEAR_S, _SOON_S)
    return [key for key, seconds in due_s.items() if seconds > after_s]
