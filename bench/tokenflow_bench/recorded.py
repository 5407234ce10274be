"""A trace of one's own in the simulator: its times and lengths, and readers for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.bound import least_work_s
from tokenflow_bench.costs import Machine
from tokenflow_bench.people import READING_RATE, READING_SIGMA, lognormal_rates
from tokenflow_bench.traces import Trace, TraceError, read_trace
from tokenflow_bench.workload import Workload

__all__ = ["Recorded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Which part of which file, as in `traces.read_trace`, and how fast people read the answers."""

    path: str
    streams: int | None = None
    """At most so many requests."""
    begin_s: float = 0.0
    end_s: float | None = None
    faster: float = 1.0
    length_scale: float = 1.0
    rate: float = READING_RATE
    """Median, in tokens a second."""
    sigma: float = READING_SIGMA
    """Of the logarithm of the rates between readers."""

    @property
    def name(self) -> str:
        """The file's, without its endings."""
        return Path(self.path).name.partition(".")[0]

    def too_long(self, machine: Machine) -> int:
        """How many requests `machine`'s memory could never hold; they are left out.

        Raises `TraceError` for a trace that cannot be read, has no times, or of which nothing is left.
        """
        trace = _read(self)
        if trace.arrived is None:
            raise TraceError(f"{self.path} has no times: the simulator cannot replay it")
        fits = _fits(trace, machine)
        if not fits.any():
            raise TraceError(
                f"{self.path}: no request fits into the {machine.kv_tokens} tokens of {machine.name}"
            )
        return int((~fits).sum())

    def workload(self, machine: Machine, load: float | None, seed: int) -> Workload:
        """What arrives; the seed draws the readers.

        `load`: at so fast a pace that the work that `machine` has at least (`bound.least_work_s`) takes this
        share of the time in which it comes, whatever `faster`. None: at the trace's pace times `faster`.
        Raises `TraceError` where no pace gives that load.
        """
        whole = _read(self)
        assert whole.arrived is not None, "a trace without times is refused"
        fits = _fits(whole, machine)
        trace = replace(
            whole, arrived=whole.arrived[fits], prompt=whole.prompt[fits], output=whole.output[fits]
        )
        rates = lognormal_rates(np.random.default_rng(seed), len(trace), median=self.rate, sigma=self.sigma)
        own = trace.workload(rates)
        if load is None:
            return own
        lasts_s = float(own.arrived[-1])
        if not lasts_s:
            raise TraceError(f"{self.path}: all requests come at once: no pace gives a load")
        return replace(own, arrived=own.arrived * (least_work_s(machine, own) / load / lasts_s))


def _fits(trace: Trace, machine: Machine) -> NDArray[np.bool_]:
    fits: NDArray[np.bool_] = trace.prompt + trace.output + 2 * machine.page_tokens < machine.kv_tokens
    return fits


@lru_cache(maxsize=4)
def _read(recorded: Recorded) -> Trace:
    return read_trace(
        Path(recorded.path),
        limit=recorded.streams,
        begin_s=recorded.begin_s,
        end_s=float("inf") if recorded.end_s is None else recorded.end_s,
        faster=recorded.faster,
        length_scale=recorded.length_scale,
    )
