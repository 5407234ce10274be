"""What plans cost: `python bench/bench_policy.py`. Milliseconds of CPU time.

`steps`: all of what planning adds to a step of the engine, by the plugin's own planner over its table of
requests: taking in what readers do, making the view, the plan, the orders; nothing where no plan is due
(`planner.py` says when one is). `view` is what making the view takes of that, `first` the first step after
the policy was switched on. `run`: plans alone, as they come in simulation, on an H200 with 512 places whose
memory is full, 2,000 people waiting and more coming; beside each plan's time, the time per pass of the
engine. `shock`: unrelated random views of that size, so that each plan turns the whole engine round. `quiet`:
nobody waits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import click
import numpy as np

from tokenflow_bench.costs import MACHINES
from tokenflow_bench.people import lognormal_rates
from tokenflow_bench.planned import planned_steps
from tokenflow_bench.simulator import simulate
from tokenflow_bench.views import random_view
from tokenflow_bench.workload import Workload, normal_lengths
from tokenflow_engine.policy.base import EngineView, Plan
from tokenflow_engine.policy.registry import POLICIES, policy_named


class Timed:
    """A policy and the milliseconds that its plans took, in views with at least `least` streams."""

    def __init__(self, name: str, *, least: int = 0) -> None:
        self.name = name
        self.times_ms: list[float] = []
        self._policy = policy_named(name)
        self._least = least

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        began = time.thread_time()
        plan = self._policy.plan(view, ids)
        if len(view) >= self._least:
            self.times_ms.append(1e3 * (time.thread_time() - began))
        return plan


def main() -> None:
    arguments = _arguments()
    click.echo(
        f"{'policy':<12}{'views':<8}{'plans':>7}{'median':>9}{'p99':>9}{'max':>9}{'per pass':>10}   ms"
    )
    for name in arguments.policies:
        first, steps = planned_steps(
            MACHINES["h200"],
            policy_named(name),
            running=arguments.running,
            waiting=arguments.waiting,
            steps=arguments.steps,
        )
        _line(name, "first", first.orders_ms)
        _line(name, "steps", steps.orders_ms, len(steps.orders_ms))
        _line(name, "view", steps.views_ms, len(steps.orders_ms))
    for name in arguments.policies:
        timed = Timed(name, least=arguments.running + arguments.waiting)
        passes = _crowd(timed, arguments.running, arguments.waiting, seconds=arguments.seconds)
        _line(name, "run", timed.times_ms, passes)
    for label, waiting in (("shock", arguments.waiting), ("quiet", 0)):
        rng = np.random.default_rng(1)
        views = [
            random_view(rng, machine=MACHINES["h200"], running=arguments.running, waiting=waiting, now=now)
            for now in range(10, 1010, 10)
        ]
        for name in arguments.policies:
            timed = Timed(name)
            _plan_all(timed, views)
            _line(name, label, timed.times_ms)


def _plan_all(timed: Timed, views: Iterable[EngineView]) -> None:
    for view in views:
        timed.plan(view, [str(row) for row in range(len(view))])


def _crowd(timed: Timed, running: int, waiting: int, *, seconds: float) -> int:
    """Simulate; the number of passes."""
    rng = np.random.default_rng(1)
    coming = waiting // 2
    count = running + waiting + coming
    arrived = np.concatenate([np.zeros(count - coming), np.sort(rng.uniform(0, seconds, coming))])
    workload = Workload.of(
        arrived,
        normal_lengths(rng, count, mean=250),
        normal_lengths(rng, count, mean=400),
        lognormal_rates(rng, count),
    )
    machine = replace(MACHINES["h200"], max_running=running)
    return simulate(machine, workload, timed, until_s=seconds).passes


def _line(policy: str, label: str, times_ms: Sequence[float], passes: int | None = None) -> None:
    times = times_ms or [float("nan")]
    median, p99, most = np.percentile(times, [50, 99, 100])
    amortised = f"{sum(times) / passes:>10.3f}" if passes else ""
    click.echo(f"{policy:<12}{label:<8}{len(times):>7}{median:>9.3f}{p99:>9.3f}{most:>9.3f}{amortised}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=512)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of simulated time")
    parser.add_argument("--steps", type=int, default=400, help="of the planner")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
