"""Streams that are out of the decode batch, and how far out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenflow_engine.policy.base import Phase

__all__ = ["AWAY", "PHASES", "Held", "Hold"]


class Hold(IntEnum):
    PARKED = 0
    LEAVING = 1
    """Its KV is on its way to host memory."""
    OFFLOADED = 2
    LOADING = 3
    ENDING = 4
    """Aborted; a copy still touches its slots."""


PHASES = {
    Hold.PARKED: Phase.PARKED,
    Hold.LEAVING: Phase.OFFLOADED,
    Hold.OFFLOADED: Phase.OFFLOADED,
    Hold.LOADING: Phase.LOADING,
    Hold.ENDING: Phase.PARKED,
}


AWAY = (Hold.LEAVING, Hold.OFFLOADED, Hold.LOADING)


@dataclass(slots=True, eq=False)
class Held:
    req: Any
    hold: Hold
    since: float
    is_sound: bool = True
    """Whether what its slots hold is its KV; not so during a load."""
    is_unsaved: bool = False
    """A copy of it to host memory failed as it was leaving."""
    synced_at: int | None = None
    """The scheduling pass in which it was to leave the device, if host memory had it then but for what the
    last passes had added.
    """
