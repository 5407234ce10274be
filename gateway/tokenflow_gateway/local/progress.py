"""What a person sees while something takes time: one line a stage, with elapsed seconds."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["Progress", "Stage"]

NOTE_CHARACTERS = 70
REPEAT_S = 15.0
"""Between two lines about the same stage where output is no terminal."""


class Stage:
    """A running stage. `note` may be called often; it writes only when there is something to show."""

    def __init__(self, title: str, *, stream: TextIO, clock: Callable[[], float]) -> None:
        self._title = title
        self._stream = stream
        self._clock = clock
        self._started_at = self._shown_at = clock()
        self._live = stream.isatty()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the stage began."""
        return self._clock() - self._started_at

    def begin(self) -> None:
        """Announce the stage."""
        self._show("...")

    def note(self, text: str) -> None:
        """Say what the stage is at now: in place on a terminal, now and then elsewhere."""
        every_s = 0.5 if self._live else REPEAT_S
        if self._clock() - self._shown_at >= every_s:
            self._shown_at = self._clock()
            self._show(f"... {self.elapsed_s:.0f} s  {text[:NOTE_CHARACTERS]}")

    def finish(self, word: str) -> None:
        """Say how it ended."""
        self._show(f"{word} ({self.elapsed_s:.0f} s)", end="\n")

    def _show(self, text: str, *, end: str = "") -> None:
        line = f"{self._title} {text}"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{line[:width]}{end}")
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()


class Progress:
    """Numbers the stages of one run, `total` in all: ``[2/5] PyTorch ... 12 s``."""

    def __init__(
        self, total: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._stream = stream or sys.stderr
        self._clock = clock
        self._number = 0

    def skip(self) -> None:
        """Count a stage that has nothing to do."""
        self._number += 1

    @contextmanager
    def stage(self, title: str) -> Iterator[Stage]:
        """Show a stage from its announcement to ``done`` or ``stopped``."""
        self._number += 1
        stage = Stage(f"[{self._number}/{self._total}] {title}", stream=self._stream, clock=self._clock)
        stage.begin()
        try:
            yield stage
        except BaseException:
            stage.finish("stopped")
            raise
        stage.finish("done")

    def say(self, text: str) -> None:
        """One line outside any stage."""
        self._stream.write(f"{text}\n")
        self._stream.flush()
