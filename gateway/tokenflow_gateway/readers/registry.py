"""Readers beyond their streams: what is known of one as a stream begins, what is read after its end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from tokenflow_engine.protocol import Reader
from tokenflow_gateway.readers.estimator import Estimate, Source
from tokenflow_gateway.readers.learned import LearnedRates
from tokenflow_gateway.readers.tally import Look
from tokenflow_gateway.readers.track import ReaderTrack, Watched

__all__ = ["GRACE_S", "ReaderRegistry"]

GRACE_S = 300.0
"""How long after the end of an answer its reader may still report."""
_MOST_ENDED = 10_000


class ReaderRegistry:
    """Makes the tracks of new readers, keeps them for a while after the end, and learns from them.

    `count` gets what each look at a reader has found, `tell` what has been learned of one, by the name that
    `learned` has for the reader. Times are monotonic seconds.
    """

    def __init__(
        self,
        *,
        learned: LearnedRates | None,
        count: Callable[[Source, Look], None],
        tell: Callable[[bytes, Watched], None] = lambda name, watched: None,
    ) -> None:
        """Without `learned` every reader begins as an average one."""
        self._learned = learned
        self._count = count
        self._tell = tell
        self._ended: OrderedDict[str, tuple[float, ReaderTrack]] = OrderedDict()
        self.on_done: Callable[[str, ReaderTrack], None] = lambda rid, track: None
        """Called when the grace of a reader is over, with the `rid` of the stream."""

    def __len__(self) -> int:
        """Readers of answers that have ended."""
        return len(self._ended)

    def opened(
        self,
        *,
        tenant: str,
        user: str | None,
        reader: Reader,
        declared_rate: float | None,
        rate_floor: float | None = None,
        max_rate: float | None = None,
        now: float,
    ) -> ReaderTrack:
        """The track of a new stream, with the habit of its reader if that is known."""
        name = habit = None
        if self._learned is not None and user is not None and reader != "machine":
            name = self._learned.name(tenant=tenant, user=user, reader=reader)
            habit = self._learned.habit(name, now=now)
        return ReaderTrack(
            reader=reader,
            declared_rate=declared_rate,
            rate_floor=rate_floor,
            max_rate=max_rate,
            name=name,
            habit=habit,
            now=now,
        )

    def look(self, track: ReaderTrack, *, waiting: bool, now: float) -> Estimate:
        """Estimate one reader, and count what has come since the last look.

        `waiting` as in `ReaderTally.look`.
        """
        estimate = track.estimate(now)
        consumed = track.consumed_tokens(estimate)
        track.leads.look(track.shape.tokens, estimate.consumed)
        self._count(estimate.source, track.tally.look(estimate.state, consumed, waiting=waiting, now=now))
        return estimate

    def ended(self, rid: str, track: ReaderTrack, *, now: float) -> None:
        """The last of the answer has been handed over; its reader may read on."""
        self.look(track, waiting=False, now=now)
        self.learn(track, now=now)
        if track.shape.tokens:
            self._ended[rid] = (now + GRACE_S, track)
        if len(self._ended) > _MOST_ENDED:
            self._forget(now)
        self.expire(now)

    def get(self, rid: str, *, now: float) -> ReaderTrack | None:
        """The reader of an answer that has ended, within its grace."""
        self.expire(now)
        _, track = self._ended.get(rid, (now, None))
        return track

    def learn(self, track: ReaderTrack, *, now: float) -> None:
        """Take over what evidence has shown of a reader since this was last done, once it is enough."""
        if self._learned is None or track.name is None:
            return
        watched = track.watched()
        if watched is not None:
            self.taught(track.name, watched, now=now)
            self._tell(track.name, watched)

    def taught(self, name: bytes, watched: Watched, *, now: float) -> None:
        """Somebody has watched a reader, here or in another worker."""
        if self._learned is not None:
            self._learned.learn(name, ratio=watched.ratio, seconds=watched.seconds, now=now)

    def expire(self, now: float) -> None:
        """Forget those whose grace is over."""
        while self._ended and next(iter(self._ended.values()))[0] <= now:
            self._forget(now)

    def _forget(self, now: float) -> None:
        rid, (_, track) = self._ended.popitem(last=False)
        self.look(track, waiting=False, now=now)
        self.learn(track, now=now)
        self.on_done(rid, track)
