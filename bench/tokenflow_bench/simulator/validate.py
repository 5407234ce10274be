"""The simulator against the real engine: the same requests and policies, simulated on a calibrated machine.

What is compared with what: a result of `make bench-burst` has, for each run, what came (as the engine counts
tokens) and what it was like; the same requests go through the simulator once for each run. Where the result
also says what passes cost before and after each round (`make proof`), the machine of a round has those costs:
on a shared host a core can be a sixth faster in one minute than in another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np

from tokenflow_bench.calibrate.fit import Costs, mean_costs
from tokenflow_bench.calibrate.machine import calibrated
from tokenflow_bench.costs import MACHINES, Machine, read_machines
from tokenflow_bench.reading import pause_spans
from tokenflow_bench.simulated import measure
from tokenflow_bench.simulator import Part, simulate
from tokenflow_bench.spread import Spread
from tokenflow_bench.tables import Table, number, spread
from tokenflow_bench.workload import Workload
from tokenflow_engine.policy.registry import policy_named
from tokenflow_engine.policy.spelling import spelled

__all__ = ["TOLERANCE", "Comparison", "comparison_table", "in_short", "machines_of", "validate"]

TOLERANCE = 0.15
"""Of a figure of the real engine, how far the simulated one may be off."""
_PARTS = {
    "offload": Part.OFFLOAD,
    "write_through": Part.WRITES,
    "overlap": Part.OVERLAP,
    "pauses": Part.REPORTS,
}
"""Parts of the plugin that a policy's spelling takes away by ``=0``, as the simulator calls them."""
_BETWEEN_S = 0.0012
"""Requests of a burst reach the engine one after the other, through gateway and tokenizer, about so far
apart: while the first one of the tiny model is prefilled, twelve more come. With 2 ms they are eight; the
engine's own batch then begins with 16 streams in place of 13, and its slowest first token comes 6 % later."""
_WAY_S = 0.015
"""From a client through gateway and tokenizer to the engine's first pass, and of the token's way back."""
_MIXED = "--enable-mixed-chunk"
_Run = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Figure:
    words: str
    real: Callable[[_Run], float]
    simulated: Callable[[Mapping[str, float]], float]
    digits: int


def _shared(words: str, name: str, digits: int) -> _Figure:
    return _Figure(
        words, lambda run: float(run["figures"][name]), lambda figures: float(figures[name]), digits
    )


def _real_preemptions(run: _Run) -> float:
    """Whom a policy took out of the batch, and whom SGLang retracted."""
    engine = run["engine"]
    return float(engine.get("tokenflow_engine_preemptions{parked}", 0.0) + engine["retracted"])


_FIGURES = (
    _shared("TTFT, mean, s", "ttft_mean_s", 2),
    _shared("TTFT, p99, s", "ttft_p99_s", 2),
    _shared("raw, tokens/s", "raw_tokens_per_s", 0),
    _Figure("preemptions", _real_preemptions, lambda figures: figures["preempted"], 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of one case, over the rounds. `ratio` of the medians, simulated to real; None for x / 0."""

    setup: str
    title: str
    case: str
    figure: str
    real: Spread
    simulated: Spread
    digits: int
    ratio: float | None

    @property
    def is_within(self) -> bool:
        """Off by at most `TOLERANCE`; or both nothing."""
        if self.ratio is None:
            return self.real.median == self.simulated.median
        return abs(self.ratio - 1.0) <= TOLERANCE

    @property
    def is_in_range(self) -> bool:
        """No further off than the real engine's own rounds are from each other."""
        low, high = self.real.low, self.real.high
        if low is None or high is None or self.simulated.median is None:
            return False
        return low <= self.simulated.median <= high

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"is_within": self.is_within, "is_in_range": self.is_in_range}


def validate(document: Mapping[str, Any], machines: Mapping[str, Machine]) -> list[Comparison]:
    """All tables whose machine, ``laptop-SETUP``, is given, but for rounds before which none was measured.

    Raises `ValueError` for a result that does not say what came.
    """
    return [
        comparison
        for table in document["tables"]
        if f"laptop-{table['setup']}" in machines
        for comparison in _of_table(table, machines_of(table, machines[f"laptop-{table['setup']}"]))
    ]


def machines_of(table: Mapping[str, Any], machine: Machine) -> list[Machine | None]:
    """`machine` in each round of `table`, with the mean of the costs before and after; None without any."""
    facts = {"kv_tokens": table["kv_tokens"]}
    costs = table.get("costs")
    if not costs:
        return [replace(machine, **facts)] * max(map(len, table["cases"].values()), default=0)
    name = f"{table['setup']}, {table['title']}"
    source = "measured before the round and after it"
    machines = []
    for place, measured in enumerate(pairwise(costs), 1):
        known = [Costs(**found) for found in measured if found]
        machines.append(
            calibrated(machine, mean_costs(known), name=f"{name}, round {place}", source=source, facts=facts)
            if known
            else None
        )
    return machines


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """A row each."""
    head = ("set-up", "", "policy", "figure", "real engine", "simulated", "ratio", "within 15 %")
    return Table(
        head,
        [
            (
                one.setup,
                one.title,
                one.case,
                one.figure,
                spread(one.real, one.digits),
                spread(one.simulated, one.digits),
                number(one.ratio, 2),
                "yes" if one.is_within else "no, but in range" if one.is_in_range else "**no**",
            )
            for one in comparisons
        ],
    )


def in_short(comparisons: Sequence[Comparison]) -> str:
    """How many are within, or in the range of the real rounds, and which are not."""
    beyond = [one for one in comparisons if not one.is_within]
    missed = [one for one in beyond if not one.is_in_range]
    words = f"{len(comparisons) - len(beyond)} of {len(comparisons)} figures within {100 * TOLERANCE:.0f} %"
    if len(missed) < len(beyond):
        words += f", {len(beyond) - len(missed)} more in the range of the real rounds"
    named = [f"{one.setup}, {one.title}, {one.case}: {one.figure} x{number(one.ratio, 2)}" for one in missed]
    return "; not: ".join([words, *(["; ".join(named)] if named else [])])


def _of_table(table: Mapping[str, Any], machines: Sequence[Machine | None]) -> Iterator[Comparison]:
    told = table.get("told", ())
    for case, all_runs in table["cases"].items():
        known = [
            (run, machine) for run, machine in zip(all_runs, machines, strict=True) if machine is not None
        ]
        if not known:
            continue
        runs = [run for run, _ in known]
        without = [] if case in told else [Part.REPORTS]
        simulated = [
            _simulated(
                machine,
                _workload(table, run),
                table["policies"][case],
                mixed=_MIXED in table["flags"],
                without=without,
            )
            for run, machine in known
        ]
        for figure in _FIGURES:
            real = Spread.of(figure.real(run) for run in runs)
            found = Spread.of(figure.simulated(figures) for figures in simulated)
            assert found.median is not None, "a case has runs"
            yield Comparison(
                setup=table["setup"],
                title=table["title"],
                case=case,
                figure=figure.words,
                real=real,
                simulated=found,
                digits=figure.digits,
                ratio=found.median / real.median if real.median else None,
            )


def _simulated(
    machine: Machine, work: Workload, policy: str, *, mixed: bool, without: Sequence[Part]
) -> dict[str, float]:
    name, options = spelled(policy)
    without = [*without, *(part for option, part in _PARTS.items() if not options.pop(option, 1))]
    outcome = simulate(machine, work, policy_named(name, **options), mixed=mixed, without=without)
    preempted = float(outcome.streams.preemptions.sum())
    figures = measure(outcome).document()
    return figures | {
        "ttft_mean_s": figures["ttft_mean_s"] + _WAY_S,
        "ttft_p99_s": figures["ttft_p99_s"] + _WAY_S,
        "preempted": preempted,
    }


def _workload(table: Mapping[str, Any], run: _Run) -> Workload:
    requests = run.get("requests")
    if requests is None or (table["pausing"] and "pauses" not in requests):
        raise ValueError("this result is of an earlier version: it does not say what came")
    due_s = np.array(requests["arrived"])
    behind_s = _BETWEEN_S * np.arange(len(due_s))
    pauses = requests.get("pauses", ())
    work = Workload.of(
        np.maximum.accumulate(due_s - behind_s) + behind_s,
        np.array(requests["prompt"], dtype=np.int64),
        np.array(requests["output"], dtype=np.int64),
        np.array(requests["rate"]),
        max_output=np.array(requests["max_output"], dtype=np.int64),
    )
    return replace(work, spans=tuple(map(pause_spans, pauses))) if any(pauses) else work


@click.command()
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--machines",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML, of `tokenflow calibrate`: for a result that has no calibrations of its own.",
)
def main(result: Path, machines: Path | None) -> None:
    """Simulate what RESULT, of `make bench-burst` or `make proof`, measured."""
    known = MACHINES if machines is None else read_machines(machines)
    comparisons = validate(json.loads(result.read_text()), known)
    click.echo(comparison_table(comparisons).text())
    click.echo(f"\n{in_short(comparisons)}")


if __name__ == "__main__":
    main()
