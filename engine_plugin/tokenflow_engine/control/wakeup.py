"""A thread's doorbell: any thread may ring it, one thread polls its file descriptor."""

from __future__ import annotations

import contextlib
import os

__all__ = ["Wakeup"]


class Wakeup:
    """An eventfd (Linux). Ringing never blocks; rings before a `clear` are one ring.

    `clear` is free when nobody has rung, so that it can be called in every turn of a busy loop.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._has_rung = False

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        """Make the descriptor readable."""
        # Before the write, which lets the other thread run: it would poll and clear in vain until this one
        # gets its turn again, after five milliseconds. And after it: a `clear` may have come too early.
        self._has_rung = True
        os.eventfd_write(self._fd, 1)
        self._has_rung = True

    def clear(self) -> None:
        """Make the descriptor unreadable until the next ring."""
        if not self._has_rung:
            return
        self._has_rung = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Give the descriptor back; nobody may ring any more."""
        os.close(self._fd)
