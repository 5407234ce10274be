"""A simulated run as records and figures: the shared set of `metrics`, and what the engine did for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tokenflow_bench.metrics import Record, Summary, summarise
from tokenflow_bench.simulator import Outcome

__all__ = ["Metrics", "measure", "records"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What readers had of a run (`Summary`), and what it took."""

    summary: Summary
    preemptions: float
    """Per stream."""
    gigabytes: float
    """Moved between device and host, both directions."""
    retractions: int
    """Streams whose KV was dropped and computed again."""
    emergencies: int
    """Decode steps for which a policy other than the stock one had left no memory."""
    plans_per_s: float

    def document(self) -> dict[str, Any]:
        """For JSON: flat."""
        own = asdict(self)
        return {**own.pop("summary"), **own}


def records(outcome: Outcome) -> list[Record]:
    """One for each request that had arrived by the end of the run."""
    streams, work = outcome.streams, outcome.streams.work
    return [
        Record(
            due_s=float(work.arrived[row]),
            token_s=streams.token_s(row),
            person=work.person(row),
            output_tokens=int(work.output[row]),
            is_whole=bool(streams.generated[row] >= work.output[row]),
            ttft_target_s=float(work.ttft_target[row]),
            sla=work.class_of(row).name,
        )
        for row in np.flatnonzero(work.arrived <= outcome.duration_s).tolist()
    ]


def measure(outcome: Outcome, *, window_s: float | None = None) -> Metrics:
    """All figures of a run. `window_s`: see `metrics.summarise`; by default the run."""
    duration_s = max(outcome.duration_s, 1e-9)
    return Metrics(
        summary=summarise(records(outcome), horizon_s=duration_s, window_s=window_s or duration_s),
        preemptions=float(outcome.streams.preemptions.mean()),
        gigabytes=outcome.bytes_moved / 1e9,
        retractions=outcome.retractions,
        emergencies=outcome.emergencies,
        plans_per_s=outcome.plans / duration_s,
    )
