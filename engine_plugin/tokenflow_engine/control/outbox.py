"""Updates on their way to the gateways, coalesced: the latest of a stream is the one that goes."""

from __future__ import annotations

from collections.abc import Iterable

from tokenflow_engine.control.owners import Owner, Update
from tokenflow_engine.protocol import StreamState, StreamStates

__all__ = ["Outbox"]

_STATE_DELAY_S = 0.02
_COUNT_DELAY_S = 0.1


class Outbox:
    """Owned by the link's thread. Times are monotonic seconds; `at` of a message is wall-clock."""

    def __init__(self) -> None:
        self._latest: dict[Owner, dict[str, Update]] = {}
        self._due: dict[Owner, float] = {}

    def add(self, updates: Iterable[Update], *, is_urgent: bool, now: float) -> None:
        """Queue updates, to go within 20 ms where a state changed, within 100 ms where only counts did."""
        due = now + (_STATE_DELAY_S if is_urgent else _COUNT_DELAY_S)
        for update in updates:
            self._latest.setdefault(update.owner, {})[update.rid] = update
            self._due[update.owner] = min(due, self._due.get(update.owner, due))

    def next_due(self) -> float | None:
        """When the next message must go."""
        return min(self._due.values(), default=None)

    def take_due(self, *, now: float, at: float) -> list[tuple[Owner, StreamStates]]:
        """The messages that must go now."""
        owners = [owner for owner, due in self._due.items() if due <= now]
        return [(owner, self._take(owner, at)) for owner in owners]

    def take(self, owner: Owner, *, at: float) -> StreamStates | None:
        """The message of this owner, due or not: what must not be overtaken by another message."""
        return self._take(owner, at) if owner in self._due else None

    def _take(self, owner: Owner, at: float) -> StreamStates:
        del self._due[owner]
        latest = self._latest.pop(owner).values()
        states = [
            StreamState(
                rid=u.rid,
                state=u.state,
                generated=u.generated,
                buffered=u.buffered,
                reason=u.reason,
                offloaded=u.offloaded,
            )
            for u in latest
        ]
        return StreamStates(at=at, states=states)
