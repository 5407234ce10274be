"""All streams of a run as columns, and what their readers do as time goes on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.workload import Workload
from tokenflow_engine.policy.base import Phase

__all__ = ["DONE", "FUTURE", "Streams"]

Rows = NDArray[np.int64]

FUTURE, DONE = 100, 101
"""Phases that no policy sees."""


class Streams:
    """One row a request of the workload. Readers read at their rate whenever there is something to read.

    `stalled_s` is the time a reader spent on an empty buffer after the first token and before the last,
    pauses apart. `useful` sums the weights of the paper's effective throughput.
    """

    def __init__(self, workload: Workload) -> None:
        count = len(workload)
        self.work = workload
        self.phase = np.full(count, FUTURE, dtype=np.int8)
        self.generated = np.zeros(count, dtype=np.int64)
        self.consumed = np.zeros(count)
        self.paused = np.zeros(count, dtype=bool)
        self.read_until = np.zeros(count)
        self.to_prefill = np.zeros(count, dtype=np.int64)
        self.held = np.zeros(count, dtype=np.int64)
        """Device tokens, whole pages."""
        self.synced = np.zeros(count, dtype=np.int64)
        """Tokens that the host holds."""
        self.since = np.zeros(count)
        self.preemptions = np.zeros(count, dtype=np.int64)
        self.first_at = np.full(count, np.nan)
        self.last_at = np.full(count, np.nan)
        self.stalled_s = np.zeros(count)
        self.useful = np.zeros(count)

    def rows(self, phase: Phase) -> Rows:
        """Rows in this phase, in order of arrival."""
        return np.flatnonzero(self.phase == phase)

    def live(self) -> Rows:
        """Arrived and not finished."""
        return np.flatnonzero(self.phase < FUTURE)

    def context(self, rows: Rows) -> Rows:
        """Prompt and generated tokens."""
        return self.work.prompt[rows] + self.generated[rows]

    def move(self, row: int, phase: int, *, now: float) -> None:
        """Change the row's place."""
        self.phase[row] = phase
        self.since[row] = now

    def read(self, rows: Rows, *, now: float) -> None:
        """Let the readers of `rows` read until `now`."""
        passed = now - self.read_until[rows]
        self.read_until[rows] = now
        reading = ~self.paused[rows] & (self.generated[rows] > 0)
        rows, passed = rows[reading], passed[reading]
        rate = self.work.rate[rows]
        unread_s = (self.generated[rows] - self.consumed[rows]) / rate
        self.consumed[rows] += rate * np.minimum(passed, unread_s)
        waiting = ~self.work.machine[rows] & (self.generated[rows] < self.work.output[rows])
        self.stalled_s[rows[waiting]] += np.maximum(passed - unread_s, 0.0)[waiting]

    def generate(self, rows: Rows, *, now: float) -> None:
        """One more token for each of `rows`."""
        self.read(rows, now=now)
        first = rows[self.generated[rows] == 0]
        self.first_at[first] = now
        self.generated[rows] += 1
        share = (self.generated[rows] - self.consumed[rows]) / self.work.output[rows]
        self.useful[rows] += np.clip((0.2 - share) / 0.1, 0.0, 1.0)
