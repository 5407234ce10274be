"""The engine for a stream: where it begins in time, then where its conversation is, then the least busy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from tokenflow_gateway.engines.affinity import favourite
from tokenflow_gateway.engines.engine import Engine

__all__ = ["Placement", "Wish"]

_MOST_S = 1.0
"""A wait in an engine that is enough for it never to idle, however patient those are who wait."""
_SOON = 0.25
"""Of its target, a wait that counts as none."""
_UNEVEN, _UNEVEN_STREAMS = 1.25, 2
"""A conversation goes back to its engine unless that has more than so many times the streams of the least."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream asks of an engine."""

    ttft_s: float = 1.0
    behind: frozenset[str] = frozenset()
    """Classes that an engine serves after this one's."""
    tokens: int = 1
    """Of KV that it needs to begin."""
    key: bytes | None = None
    """Its conversation; see `affinity`."""


class Placement:
    """Chooses.

    An engine without a plugin, or with its link down, has room for all, as it queues by itself; where it is
    configured how many it runs, it has room for these.
    """

    def __init__(self, *, engine_queue: int = 4) -> None:
        """`engine_queue`: streams that may wait in an engine for however long, so that it never idles."""
        self.engine_queue = engine_queue
        self._turn = itertools.count()

    def wait_s(self, engine: Engine, wish: Wish, now: float) -> float | None:
        """Seconds until the engine would begin, as far as it is known; None where it would be too late.

        Too late is more than half of the target: the rest is for the prefill, and for estimates that are off.
        More than a second is too late for everybody: here one can still be overtaken, or go elsewhere.
        """
        if engine.welcome is not None:
            ahead = engine.load.ahead(
                now, behind=wish.behind, places=engine.welcome.max_running, tokens=wish.tokens
            )
        elif engine.config.max_running is not None:
            ahead = engine.load.beyond(now, at_work=engine.at_work, places=engine.config.max_running)
        else:
            return 0.0
        wait_s = engine.load.begins_in_s(ahead)
        if wait_s <= min(wish.ttft_s / 2, _MOST_S):
            return wait_s
        return min(wait_s, wish.ttft_s) if ahead < self.engine_queue else None

    def choose(self, engines: Sequence[Engine], wish: Wish, now: float) -> Engine | None:
        """The best of these, or None where all are too late."""
        if len(engines) == 1:
            return None if self.wait_s(engines[0], wish, now) is None else engines[0]
        in_time, soon = [], []
        for engine in engines:
            wait_s = self.wait_s(engine, wish, now)
            if wait_s is not None:
                in_time.append(engine)
                if wait_s <= _SOON * wish.ttft_s:
                    soon.append(engine)
        return self._among(soon or in_time, wish, now) if in_time else None

    def least_loaded(self, engines: Sequence[Engine], wish: Wish, now: float) -> Engine:
        """The best of these for a stream that is not to wait."""
        if len(engines) == 1:
            return engines[0]
        return self.choose(engines, wish, now) or self._among(engines, wish, now)

    def _among(self, engines: Sequence[Engine], wish: Wish, now: float) -> Engine:
        if len(engines) == 1:
            return engines[0]
        loads = {engine: _load(engine, now) for engine in engines}
        least = min(loads.values())
        if wish.key is not None:
            name = favourite(wish.key, (engine.name for engine in engines))
            engine = next(engine for engine in engines if engine.name == name)
            if loads[engine] <= _UNEVEN * least + _UNEVEN_STREAMS:
                return engine
        equals = [engine for engine in engines if loads[engine] == least]
        return equals[next(self._turn) % len(equals)]


def _load(engine: Engine, now: float) -> int:
    """Streams on an engine: those of other gateways too, where it tells."""
    stats = engine.stats if engine.linked else None
    if stats is None:
        return engine.at_work + engine.load.unseen(now)
    told = stats.running + stats.waiting + stats.parked + stats.offloaded
    return max(len(engine.streams), told + engine.load.unseen(now))
