"""What the executor has done, for the statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """Totals since the start."""

    parked: int = 0
    offloaded: int = 0
    dropped: int = 0
    """Whose KV was given up as they left the device, for want of host memory."""
    made_room: int = 0
    """Whose KV was given up in host memory, for others that are due back sooner."""
    resumed: int = 0
    loaded: int = 0
    recomputed: int = 0
    """Offloaded streams that came back by a prefill."""
    for_memory: int = 0
    """Preempted by the executor itself, before the engine would have retracted."""
    failed_loads: int = 0
    host_refused: int = 0
    """1 where opening host memory failed, or copies to it were not exact."""
    thrashed: int = 0
    """Preempted within a second of coming back."""
    away_s: float = 0.0
    """Out of the batch, in all, of streams that came back without a prefill."""
    came_back: int = 0
    evicted_tokens: int = 0
    """KV that had to leave the device, and what of it host memory held already when that was decided."""
    evicted_synced_tokens: int = 0
    synced_evictions: Counter[str] = field(default_factory=Counter)
    """Streams that host memory had when they were to leave the device, but for what the last passes had
    added: by the passes after that one until their memory was free, up to 2, or ``more``.
    """
    copy_wait_s: float = 0.0
    """The scheduler waited for copies, because they were not to overlap with anything."""
    fixed: dict[str, int] = field(default_factory=dict)
    """Orders not obeyed because the request cannot be preempted, by reason."""
