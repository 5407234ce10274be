"""Readers other than steady ones, by name: `pauses`, `scanning`, `classes`, `machines:0.5`, joined by `+`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tokenflow_bench.people import Pauses, Scanning
from tokenflow_bench.sla import Sla
from tokenflow_bench.workload import Workload

__all__ = ["CROWDS", "STEADY", "crowd"]

STEADY = "steady"
_Change = Callable[[Workload, np.random.Generator], Workload]

_MIX = (
    Sla(name="premium", share=0.2, weight=8.0, ttft_target_s=1.0),
    Sla(name="standard", share=0.5, weight=1.0, ttft_target_s=2.0),
    Sla(name="economy", share=0.3, weight=0.125, ttft_target_s=10.0),
)
"""Weights and targets are examples of ours."""


def _pauses(given: str, mix: Sequence[Sla]) -> _Change:
    every_s, _, last_s = (given or "20/10").partition("/")
    pauses = Pauses(every_s=float(every_s), last_s=float(last_s))
    return lambda workload, rng: workload.with_pauses(pauses, rng)


def _scanning(given: str, mix: Sequence[Sla]) -> _Change:
    return lambda workload, rng: workload.with_pauses(Scanning(), rng)


def _classes(given: str, mix: Sequence[Sla]) -> _Change:
    return lambda workload, rng: workload.with_classes(mix or _MIX, rng)


def _machines(given: str, mix: Sequence[Sla]) -> _Change:
    share = float(given or "0.3")
    return lambda workload, rng: workload.with_machines(share, rng)


CROWDS: dict[str, Callable[[str, Sequence[Sla]], _Change]] = {
    "pauses": _pauses,
    "scanning": _scanning,
    "classes": _classes,
    "machines": _machines,
}
"""By name. `pauses:20/10`: every 20 s for 10 s, means of exponentials. `machines:0.3`: three in ten."""


def crowd(spelling: str, mix: Sequence[Sla] = ()) -> _Change:
    """What makes a workload's readers such. `mix`: the classes, instead of ours. Raises `ValueError`."""
    changes = []
    for part in [] if spelling == STEADY else spelling.split("+"):
        name, _, given = part.partition(":")
        if name not in CROWDS:
            raise ValueError(f"no readers {name!r}; there are {STEADY}, {', '.join(CROWDS)}")
        try:
            changes.append(CROWDS[name](given, mix))
        except ValueError:
            raise ValueError(f"{part!r}: {given!r} is no number; see `--help`") from None

    def changed(workload: Workload, rng: np.random.Generator) -> Workload:
        for change in changes:
            workload = change(workload, rng)
        return workload

    return changed
