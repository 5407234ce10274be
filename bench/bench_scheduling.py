"""Policies against each other in simulation.

`python bench/bench_scheduling.py --setups 4090-a tiny-burst --loads 0.8 1.2`

Medians over seeds. `stock` is SGLang by itself, `stock+mixed` with `--enable-mixed-chunk`; all other policies
run on an engine with mixed passes. Options of a policy follow its name: `adaptive:lead_cap_s=5,ahead_s=1`.
"""

from __future__ import annotations

import argparse
import time
from ast import literal_eval
from dataclasses import asdict

import click
import numpy as np

from tokenflow_bench.metrics import Metrics, measure
from tokenflow_bench.setups import SETUPS, Setup
from tokenflow_bench.simulator import simulate
from tokenflow_engine.policy.registry import policy_named

_STOCK = {"stock": ("fcfs", False), "stock+mixed": ("fcfs", True)}
_COLUMNS = {
    "ttft_mean": "TTFT mean",
    "ttft_p50": "p50",
    "ttft_p99": "p99",
    "wait_mean": "wait mean",
    "wait_p99": "p99",
    "stall_free": "stall-free",
    "raw": "raw tok/s",
    "effective": "effective",
    "preemptions": "preempt.",
    "gigabytes": "GB",
    "retractions": "dropped",
    "emergencies": "emerg.",
}


def main() -> None:
    arguments = _arguments()
    for name in arguments.setups:
        for load in arguments.loads:
            click.echo(f"\n{name}, load {load:g}, seeds {arguments.seeds}")
            click.echo(f"{'':<34}" + "".join(f"{title:>11}" for title in _COLUMNS.values()))
            for policy in arguments.policies:
                _report(policy, SETUPS[name], load, arguments.seeds)


def _report(policy: str, setup: Setup, load: float, seeds: list[int]) -> None:
    began = time.perf_counter()
    results = [asdict(_run(policy, setup, load, seed)) for seed in seeds]
    values = [float(np.median([result[column] for result in results])) for column in _COLUMNS]
    seconds = time.perf_counter() - began
    click.echo(f"{policy[:33]:<34}" + "".join(f"{value:>11.2f}" for value in values) + f"{seconds:>8.1f} s")


def _run(policy: str, setup: Setup, load: float, seed: int) -> Metrics:
    label, _, given = policy.partition(":")
    options = {
        key: literal_eval(value) for key, value in (pair.split("=") for pair in given.split(",") if pair)
    }
    name, mixed = _STOCK.get(label, (label, True))
    workload = setup.workload(load, seed)
    return measure(simulate(setup.machine, workload, policy_named(name, **options), mixed=mixed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--loads", nargs="+", type=float, default=[0.8, 1.2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument(
        "--policies", nargs="+", default=["stock", "stock+mixed", "andes", "tokenflow", "adaptive"]
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
