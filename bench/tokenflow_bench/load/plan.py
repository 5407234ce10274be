"""From the options of `tokenflow bench` to a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.people import (
    READING_RATE,
    READING_SIGMA,
    SPEECH_RATE,
    Scanning,
    fixed_rates,
    listening_rates,
    lognormal_rates,
)
from tokenflow_bench.sla import Sla
from tokenflow_bench.traces import Trace, read_trace
from tokenflow_bench.workload import (
    BURSTGPT_SHAPE,
    Workload,
    burst_arrivals,
    gamma_arrivals,
    lognormal_lengths,
    normal_lengths,
    poisson_arrivals,
    sharegpt_lengths,
)

__all__ = ["ARRIVALS", "LENGTHS", "PEOPLE", "Plan", "PlanError"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ARRIVALS = ("burst", "poisson", "gamma", "trace")
LENGTHS = ("normal", "lognormal", "sharegpt", "trace")
PEOPLE = ("fixed", "lognormal", "scanning", "listening", "machine")


class PlanError(ValueError):
    """Options that do not go together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `tokenflow bench` was asked for; the same plan makes the same workload."""

    arrivals: str = "burst"
    lengths: str | None = None
    """By default those of the trace, if the arrivals are its, and else normal."""
    people: str = "lognormal"
    streams: int = 50
    per_s: float = 2.0
    shape: float = BURSTGPT_SHAPE
    trace: Path | None = None
    begin_s: float = 0.0
    end_s: float = float("inf")
    faster: float = 1.0
    length_scale: float = 1.0
    prompt: float = 60.0
    output: float = 200.0
    length_spread: float = 0.25
    most_tokens: int = 2048
    rate: float | None = None
    sigma: float = READING_SIGMA
    machines: float = 0.0
    classes: tuple[Sla, ...] = ()
    seed: int = 1

    def workload(self) -> Workload:
        """Raises `PlanError`, and `TraceError` for a trace that cannot be read."""
        rng = np.random.default_rng(self.seed)
        trace = self._trace()
        count = self.streams if trace is None else len(trace)
        arrived = self._arrived(rng, count, trace)
        prompt, output = self._lengths(rng, count, trace)
        work = Workload.of(arrived, prompt, output, self._rates(rng, count))
        if self.people == "scanning":
            work = work.with_pauses(Scanning(), rng)
        if self.classes:
            work = work.with_classes(self.classes, rng)
        return work.with_machines(1.0 if self.people == "machine" else self.machines, rng)

    def _trace(self) -> Trace | None:
        uses = "trace" in (self.arrivals, self.lengths)
        if uses and self.trace is None:
            raise PlanError("arrivals or lengths of a trace need --trace FILE")
        if self.trace is None:
            return None
        if not uses:
            raise PlanError("--trace FILE needs --arrivals trace or --lengths trace")
        return read_trace(
            self.trace,
            limit=self.streams,
            begin_s=self.begin_s,
            end_s=self.end_s,
            faster=self.faster,
            length_scale=self.length_scale,
        )

    def _arrived(self, rng: np.random.Generator, count: int, trace: Trace | None) -> Floats:
        if self.arrivals == "trace":
            assert trace is not None, "it was asked for"
            if trace.arrived is None:
                raise PlanError(f"{self.trace} has no times: use --lengths trace with --arrivals poisson")
            return trace.arrived
        draw: dict[str, Callable[[], Floats]] = {
            "burst": lambda: burst_arrivals(count),
            "poisson": lambda: poisson_arrivals(rng, count, per_s=self.per_s),
            "gamma": lambda: gamma_arrivals(rng, count, per_s=self.per_s, shape=self.shape),
        }
        return draw[self.arrivals]()

    def _lengths(self, rng: np.random.Generator, count: int, trace: Trace | None) -> tuple[Ints, Ints]:
        lengths = self.lengths or ("trace" if self.arrivals == "trace" else "normal")
        if lengths == "trace":
            assert trace is not None, "it was asked for"
            return np.minimum(trace.prompt, self.most_tokens), np.minimum(trace.output, self.most_tokens)
        if lengths == "sharegpt":
            return sharegpt_lengths(rng, count, most=self.most_tokens)
        if lengths == "lognormal":
            return (
                lognormal_lengths(rng, count, mean=self.prompt, most=self.most_tokens),
                lognormal_lengths(rng, count, mean=self.output, most=self.most_tokens),
            )
        return (
            normal_lengths(rng, count, mean=self.prompt, spread=self.length_spread),
            normal_lengths(rng, count, mean=self.output, spread=self.length_spread),
        )

    def _rates(self, rng: np.random.Generator, count: int) -> Floats:
        if self.people == "listening":
            return listening_rates(rng, count, median=self.rate or SPEECH_RATE)
        rate = self.rate or READING_RATE
        if self.people == "fixed":
            return fixed_rates(count, rate=rate)
        return lognormal_rates(rng, count, median=rate, sigma=self.sigma)
