"""What is needed to draw a run: tokens and reading of some streams, buffers and places of all over time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tokenflow_bench.metrics import Record
from tokenflow_bench.reading import read_times
from tokenflow_bench.simulated import records
from tokenflow_bench.simulator import Outcome

__all__ = ["readers_timeline", "timeline"]

_STREAMS = 3
"""Drawn token by token."""
_POINTS = 200
"""Of each curve."""
_DIGITS = 4
"""Of seconds."""


def timeline(outcome: Outcome) -> dict[str, Any]:
    """Of a simulated run, for JSON: `readers_timeline`, and `engine`: samples."""
    every = max(len(outcome.samples) // _POINTS, 1)
    return {
        **readers_timeline(records(outcome)),
        "engine": {
            name: [getattr(sample, name) for sample in outcome.samples[::every]]
            for name in ("at_s", "running", "waiting", "preempted", "kv_share")
        },
    }


def readers_timeline(served: Iterable[Record]) -> dict[str, Any]:
    """Of any run, for JSON.

    `streams`: of some people, the time of each n-th token and of reading it. `buffers`: percentiles over the
    streams that have begun and are not read to their end, in seconds of reading.
    """
    people = [one for one in served if not one.person.is_machine and len(one.token_s)]
    read_s = [read_times(one.person, one.token_s) for one in people]
    grid = np.linspace(0.0, max((float(times[-1]) for times in read_s), default=0.0), _POINTS)
    leads = []
    for one, times in zip(people, read_s, strict=True):
        came = np.searchsorted(one.token_s, grid, side="right")
        read = np.searchsorted(times, grid, side="right")
        lead = (came - read) / one.person.rate
        lead[(came == 0) | (read >= len(times))] = np.nan
        leads.append(lead)
    shown = np.linspace(0, len(people) - 1, _STREAMS).astype(int).tolist() if people else []
    return {
        "ttft_s": sorted(_rounded([one.token_s[0] - one.due_s for one in people])),
        "streams": [_stream(people[at], read_s[at]) for at in shown],
        "buffers": {
            "at_s": _rounded(grid),
            **_percentiles(np.array(leads).reshape(len(people), _POINTS)),
        },
    }


def _stream(served: Record, read_s: Any) -> dict[str, Any]:
    every = max(len(read_s) // _POINTS, 1)
    return {
        "arrived_s": round(served.due_s, _DIGITS),
        "tokens": (np.arange(len(read_s))[::every] + 1).tolist(),
        "token_s": _rounded(served.token_s[::every]),
        "read_s": _rounded(read_s[::every]),
    }


def _percentiles(table: Any) -> dict[str, list[float | None]]:
    """Over the rows of a table with gaps; None where there is nobody."""
    found: dict[str, list[float | None]] = {"p10": [], "p50": [], "p90": []}
    for column in table.T:
        known = column[~np.isnan(column)]
        for name, values in found.items():
            values.append(round(float(np.percentile(known, int(name[1:]))), _DIGITS) if len(known) else None)
    return found


def _rounded(seconds: Any) -> list[float]:
    rounded: list[float] = np.round(np.asarray(seconds, dtype=float), _DIGITS).tolist()
    return rounded
