"""From readings of a connection to what its application has read: bounds, positions, and proofs of a pause.

Pure: the caller gives readings and the time (monotonic seconds). Measured on Linux 6.18 over loopback:
segments of 64 kB and of 1400 bytes, events of 60 to 1000 bytes, receive buffers from 4 kB to the default.

- What has been acknowledged bounds what has been read, always.
- The window's right edge less the window of an empty buffer, ``edge - empty``, is what has been read as long
  as the application keeps up: within three events, or 0.6 kB.
- An application that falls behind is seen in steps. Its kernel opens the window again only once a whole
  packet of its queue, into which up to 17 events are joined, has been taken out: 2 to 4 kB with a receive
  buffer of 4 kB, the size of the buffer at the most. Until the window is first closed the edge also moves
  because the kernel lets the window grow, and a full buffer holds 1.3 to 1.6 times `empty`: by the edge
  alone reading is over-estimated by up to 0.6 of `empty`, and never under-estimated by more than `empty`.
- An application with default buffers (`empty` is 64 kB) may leave 120 kB unread. Nothing of that can be seen
  before half the window is gone, and never the first 60 kB or so.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from tokenflow_gateway.readers.transport import SocketReading

__all__ = ["WindowEvidence", "WindowWatch"]

SMALL_BUFFER_BYTES = 16 * 1024
"""Up to this window of an empty buffer, the edge is taken for the position of a reader that falls behind."""
QUIET_S = 0.25
"""A client that has kept up, and leaves what comes untouched for so long, has paused."""
_KEPT_UP_S = 1.0
_OWN_PACE_S = 1.0
"""A client with a small buffer that leaves it more than half full for so long reads at a pace of its own."""
_PATIENCE = 1.5
"""Silence that is taken for a pause, in times of what reading the whole buffer takes."""
_SHUT_S = 0.75
"""A client that has not been seen to read slowly, and whose window stays shut for so long, takes nothing."""
_SHUT_SHARE = 16
"""A window is shut when less than this part of the empty buffer's is left of it."""
_LONGEST_GAPS = 2.0
"""Or in times of the longest silence of the last seconds, where there were enough of them."""
_LOOK_BACK_S = 5.0
_TYPICAL_BYTES_PER_S = 1000.0
"""Five events of 200 bytes: the speed of a reader who has not been seen reading."""
_NEWS_SHARE = 0.5
_TOLERANCE_BYTES = 600
_TOLERANCE_EVENTS = 3.2
"""What seems to be unread, and may not be, while a client keeps up: so much, or so many events."""
_GRAIN_BYTES = 8192
_GRAIN_SHARE = 8
"""What a client with a large buffer reads before its closed window opens: so much, or this part of it."""
_OVERFILL = 0.4
"""What a buffer that is kept full holds beyond `empty`, in times of that."""
_GROWTH = 0.6
"""Of what arrives, a kernel whose application does not read lets the window grow by less than this share."""


class WindowEvidence(msgspec.Struct, frozen=True, gc=False):
    """Bytes from the beginning of the connection."""

    at_most: int | None
    """What the application may have read; None: everything, but for what is on its way this moment."""
    read_as_shown: int
    """What it has read as far as the edge tells; too much by as much as the buffer has grown."""
    moved: bool
    """It reads at a pace of its own, and `read_as_shown` is news of where it is."""
    stalled: bool
    """It does not read although there is something to read."""
    settled: bool
    """Nothing is on its way or unread: as long as nothing more is written, there is nothing to see."""


class WindowWatch:
    """Follows one connection through one answer. Before its first byte, at `first`, all had been read."""

    __slots__ = (
        "_empty",
        "_full_since",
        "_kept_up_since",
        "_last",
        "_moved_at",
        "_moves",
        "_own_pace",
        "_prompt",
        "_reads_slowly",
        "_shut_since",
        "_silent",
        "_silent_before",
        "_speed",
        "_up_to_date",
    )

    def __init__(self, first: SocketReading, *, now: float) -> None:
        self._empty = max(0, first.edge - first.written)
        self._last = first
        self._moved_at = now
        self._moves: list[tuple[float, int]] = []
        self._speed = _TYPICAL_BYTES_PER_S
        self._silent = self._silent_before = False
        self._up_to_date = (now, first)
        self._kept_up_since: float | None = now
        self._prompt = False
        self._full_since: float | None = None
        self._own_pace = False
        self._shut_since: float | None = None
        self._reads_slowly = False

    @property
    def small(self) -> bool:
        """Whether the client's receive buffer is small enough for the edge to tell its position."""
        return self._empty <= SMALL_BUFFER_BYTES

    @property
    def doubt_bytes(self) -> int:
        """By how much `WindowEvidence.read_as_shown` may be too much."""
        return 2 * self._empty

    @property
    def _grain(self) -> int:
        return max(_GRAIN_BYTES, self._empty // _GRAIN_SHARE)

    def look(self, reading: SocketReading, *, event_bytes: float, now: float) -> WindowEvidence:
        """Take one reading in. `event_bytes`: of one event, on average."""
        read = max(0, min(reading.acked, reading.edge - self._empty))
        behind = reading.acked - read > max(_TOLERANCE_BYTES, _TOLERANCE_EVENTS * event_bytes)
        half_full = reading.window < self._empty / 2
        went_on = reading.acked > self._last.acked or reading.edge > self._last.edge
        moved = self._follow(reading, now)
        self._watch_shut(reading, went_on=went_on, moved=moved, now=now)
        self._watch_promptness(reading, behind=behind, now=now)
        stalled = self._is_shut_out(reading, now) or (behind and self._is_silent(reading, now))
        self._silent |= stalled
        self._watch_pace(half_full=half_full, stalled=stalled, now=now)
        return WindowEvidence(
            at_most=self._at_most(reading, read, half_full=half_full),
            read_as_shown=max(0, read - self._overfill(reading, behind=behind)),
            moved=moved and self._own_pace,
            stalled=stalled,
            settled=not behind and not half_full and reading.written == reading.acked,
        )

    def _follow(self, reading: SocketReading, now: float) -> bool:
        """Note how the edge moved since the last reading; whether because something was read."""
        came, step = reading.acked - self._last.acked, reading.edge - self._last.edge
        moved = step > 0 and step >= _GROWTH * came
        if moved:
            self._moved_at = now
            self._take_speed(reading.edge, now)
        self._last = reading
        return moved

    def _take_speed(self, edge: int, now: float) -> None:
        """Silence is a pause, and says nothing of the speed; silence twice in a row is slower reading."""
        if self._silent and not self._silent_before:
            self._moves.clear()
        self._silent_before, self._silent = self._silent, False
        while len(self._moves) > 1 and now - self._moves[1][0] >= _LOOK_BACK_S:
            self._moves.pop(0)
        if self._moves and now - self._moves[0][0] >= _OWN_PACE_S:
            speed = (edge - self._moves[0][1]) / (now - self._moves[0][0])
            self._speed += _NEWS_SHARE * (speed - self._speed)
        self._moves.append((now, edge))

    def _overfill(self, reading: SocketReading, *, behind: bool) -> int:
        waits = behind or reading.queued + reading.buffered > 0
        return int(_OVERFILL * self._empty) if self._own_pace and waits else 0

    def _watch_promptness(self, reading: SocketReading, *, behind: bool, now: float) -> None:
        """A prompt client has kept up for a while, and has not read on slowly since."""
        if not behind:
            if self._kept_up_since is None:
                self._kept_up_since = now
            self._prompt = now - self._kept_up_since >= _KEPT_UP_S
            self._up_to_date = now, reading
            self._reads_slowly = False
            return
        self._kept_up_since = None
        if self._reads_on(reading) and now - self._up_to_date[0] > _KEPT_UP_S:
            self._prompt = False

    def _reads_on(self, reading: SocketReading) -> bool:
        """Whether more has been read since the client was last up to date than growing windows feign."""
        _, before = self._up_to_date
        return reading.edge - before.edge >= _GROWTH * (reading.acked - before.acked)

    def _watch_shut(self, reading: SocketReading, *, went_on: bool, moved: bool, now: float) -> None:
        waits = reading.notsent > 0 or reading.buffered > 0
        if not waits or went_on or reading.window > self._empty // _SHUT_SHARE:
            self._reads_slowly |= moved and self._shut_since is not None
            self._shut_since = None
        elif self._shut_since is None:
            self._shut_since = now

    def _is_shut_out(self, reading: SocketReading, now: float) -> bool:
        """The server cannot write, since the window is shut, and not because it is opened in large steps.

        A small buffer is shut most of the time, and tells its reader's speed: see `_patience_s`.
        """
        if self._shut_since is None or self.small or self._reads_slowly or self._reads_on(reading):
            return False
        return now - self._shut_since >= _SHUT_S

    def _is_silent(self, reading: SocketReading, now: float) -> bool:
        if self._prompt:
            return now - self._up_to_date[0] > QUIET_S and not self._reads_on(reading)
        return now - self._moved_at > self._patience_s()

    def _patience_s(self) -> float:
        if not self.small:  # its edge moves by growth as much as by reading, and tells no speed
            return _PATIENCE * self._grain / _TYPICAL_BYTES_PER_S
        patience_s = _PATIENCE * self._empty / self._speed
        if self._moves and self._moves[-1][0] - self._moves[0][0] >= _LOOK_BACK_S / 2:
            longest_s = max(later[0] - earlier[0] for earlier, later in pairwise(self._moves))
            patience_s = min(patience_s, _LONGEST_GAPS * longest_s)
        return max(QUIET_S, patience_s)

    def _watch_pace(self, *, half_full: bool, stalled: bool, now: float) -> None:
        if not half_full or stalled:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        elif self.small and now - self._full_since >= _OWN_PACE_S:
            self._own_pace = True

    def _at_most(self, reading: SocketReading, read: int, *, half_full: bool) -> int | None:
        """A window that is more than half open is not updated by reading alone: all may have been read."""
        if not half_full:
            return reading.acked if reading.notsent or reading.buffered else None
        unseen = self._empty if self.small else reading.window + self._grain
        return min(reading.acked, read + unseen)
