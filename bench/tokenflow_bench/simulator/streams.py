"""All streams of a run as columns, and what their readers do as time goes on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.workload import Workload
from tokenflow_engine.policy.lengths import EndedOutputs

__all__ = ["DONE", "FUTURE", "Streams"]

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]

_AT_ONCE_S = 1e-9
FUTURE, DONE = 100, 101
"""Phases that no policy sees."""


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What never changes of some rows, gathered once: passes go over the same ones again and again."""

    rows: Rows
    prompt: Rows
    output: Rows
    token_seconds: Floats
    first_token: Rows


class Streams:
    """One row a request of the workload.

    Readers are fluid: a token is 1/rate seconds of reading, done whenever there is text and the reader reads.
    Each has a clock of its own, which runs at the reader's `factor` (0 in a pause, 1 at its rate), and
    `read_at` is the time on that clock at which all text so far will have been read.
    """

    def __init__(self, workload: Workload) -> None:
        count = len(workload)
        self.work = workload
        self.phase = np.full(count, FUTURE, dtype=np.int8)
        self.generated = np.zeros(count, dtype=np.int64)
        self.factor = np.ones(count)
        self.read_at = np.full(count, -np.inf)
        self.to_prefill = np.zeros(count, dtype=np.int64)
        self.held = np.zeros(count, dtype=np.int64)
        """Device tokens, whole pages."""
        self.synced = np.zeros(count, dtype=np.int64)
        """Tokens that the host holds."""
        self.since = np.zeros(count)
        self.preemptions = np.zeros(count, dtype=np.int64)
        self.ended = EndedOutputs()
        self._clock = np.zeros(count)
        """Time of each reader's clock at `_clock_set`."""
        self._clock_set = np.zeros(count)
        self._token_seconds = 1.0 / workload.rate
        self._first_token = np.concatenate([[0], np.cumsum(workload.output)])
        self._token_at = np.full(int(self._first_token[-1]), np.nan)
        self._is_steady = True
        """No reader has changed its pace: all clocks are at `now`."""
        self._fixed = self._gather(np.flatnonzero(self.phase < FUTURE))
        self._rows: dict[int, Rows] = {}
        """By phase, until somebody moves."""
        self._live: Rows | None = None

    def rows(self, phase: int) -> Rows:
        """Rows in this phase, in order of arrival. Not to be written to."""
        rows = self._rows.get(phase)
        if rows is None:
            live = self.live()
            rows = self._rows[phase] = live[self.phase[live] == phase]
        return rows

    def live(self) -> Rows:
        """Arrived and not finished. Not to be written to."""
        if self._live is None:
            self._live = np.flatnonzero(self.phase < FUTURE)
        return self._live

    def context(self, rows: Rows) -> Rows:
        """Prompt and generated tokens."""
        return self._of(rows).prompt + self.generated[rows]

    def move(self, row: int, phase: int, *, now: float) -> None:
        """Change the row's place."""
        before = int(self.phase[row])
        self._rows.pop(before, None)
        self._rows.pop(phase, None)
        if before >= FUTURE or phase >= FUTURE:
            self._live = None
        self.phase[row] = phase
        self.since[row] = now
        if phase == DONE:
            self.ended.add(int(self.work.output[row]))

    def set_factor(self, row: int, factor: float, *, now: float) -> None:
        """The row's reader reads at `factor` times its rate from now on; 0: it pauses."""
        self._clock[row] += self.factor[row] * (now - self._clock_set[row])
        self._clock_set[row] = now
        self.factor[row] = factor
        self._is_steady = False

    def unread(self, rows: Rows, *, now: float) -> Floats:
        """Generated tokens that the rows' readers have not read."""
        seconds = np.maximum(self.read_at[rows] - self._clock_of(rows, now), 0.0)
        return np.minimum(seconds * self.work.rate[rows], self.generated[rows])

    def generate(self, rows: Rows, *, now: float) -> Rows:
        """One more token for each of `rows`. Those whose answers are whole with it."""
        fixed, generated = self._of(rows), self.generated[rows]
        self._token_at[fixed.first_token + generated] = now
        generated += 1
        self.generated[rows] = generated
        begin = np.maximum(self.read_at[rows], self._clock_of(rows, now))
        self.read_at[rows] = begin + fixed.token_seconds
        return rows[generated >= fixed.output]

    def token_s(self, row: int) -> Floats:
        """When each token of the row was generated, so far."""
        first = int(self._first_token[row])
        return self._token_at[first : first + int(self.generated[row])]

    def send_late(self, begins: Floats, ends: Floats) -> None:
        """Let each pass's tokens have come when the next one was over, if that began at once.

        `begins`, `ends`: of all passes. Readers as policies saw them remain.
        """
        at_once = np.append(begins[1:] - ends[:-1] <= _AT_ONCE_S, False)
        sent = np.where(at_once, np.append(ends[1:], np.inf), ends)
        made = ~np.isnan(self._token_at)
        self._token_at[made] = sent[np.searchsorted(ends, self._token_at[made])]

    def _clock_of(self, rows: Rows, now: float) -> Floats | float:
        if self._is_steady:
            return now
        clock: Floats = self._clock[rows] + self.factor[rows] * (now - self._clock_set[rows])
        return clock

    def _of(self, rows: Rows) -> _Fixed:
        if self._fixed.rows is not rows:
            self._fixed = self._gather(rows)
        return self._fixed

    def _gather(self, rows: Rows) -> _Fixed:
        work = self.work
        return _Fixed(
            rows, work.prompt[rows], work.output[rows], self._token_seconds[rows], self._first_token[rows]
        )
