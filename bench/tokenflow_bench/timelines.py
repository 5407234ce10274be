"""What is needed to draw a run: tokens and reading of some streams, buffers and places of all over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenflow_bench.reading import read_times
from tokenflow_bench.simulator import Outcome

__all__ = ["timeline"]

_STREAMS = 3
"""Drawn token by token."""
_POINTS = 200
"""Of each curve."""


def timeline(outcome: Outcome) -> dict[str, Any]:
    """For JSON.

    `streams`: of some people, the time of each n-th token and of reading it. `buffers`: percentiles over the
    streams that have begun and are not read to their end, in seconds of reading. `engine`: samples.
    """
    streams, work = outcome.streams, outcome.streams.work
    people = np.flatnonzero(~work.machine & (streams.generated > 0)).tolist()
    token_s = {row: streams.token_s(row) for row in people}
    read_s = {row: read_times(work.person(row), token_s[row]) for row in people}
    end_s = max((float(times[-1]) for times in read_s.values()), default=outcome.duration_s)
    grid = np.linspace(0.0, end_s, _POINTS)
    leads = []
    for row in people:
        came = np.searchsorted(token_s[row], grid, side="right")
        read = np.searchsorted(read_s[row], grid, side="right")
        lead = (came - read) / work.rate[row]
        lead[(came == 0) | (read >= len(token_s[row]))] = np.nan
        leads.append(lead)
    table = np.array(leads).reshape(len(people), _POINTS)
    shown = [people[at] for at in np.linspace(0, len(people) - 1, _STREAMS).astype(int)] if people else []
    every = max(len(outcome.samples) // _POINTS, 1)
    return {
        "ttft_s": sorted(float(token_s[row][0] - work.arrived[row]) for row in people),
        "streams": [_stream(float(work.arrived[row]), token_s[row], read_s[row]) for row in shown],
        "buffers": {"at_s": grid.tolist(), **_percentiles(table)},
        "engine": {
            name: [getattr(sample, name) for sample in outcome.samples[::every]]
            for name in ("at_s", "running", "waiting", "preempted", "kv_share")
        },
    }


def _stream(arrived_s: float, token_s: Any, read_s: Any) -> dict[str, Any]:
    every = max(len(token_s) // _POINTS, 1)
    return {
        "arrived_s": arrived_s,
        "tokens": (np.arange(len(token_s))[::every] + 1).tolist(),
        "token_s": token_s[::every].tolist(),
        "read_s": read_s[::every].tolist(),
    }


def _percentiles(table: Any) -> dict[str, list[float | None]]:
    """Over the rows of a table with gaps; None where there is nobody."""
    found: dict[str, list[float | None]] = {"p10": [], "p50": [], "p90": []}
    for column in table.T:
        known = column[~np.isnan(column)]
        for name, values in found.items():
            values.append(float(np.percentile(known, int(name[1:]))) if len(known) else None)
    return found
