"""How fast the simulator is: `python bench/bench_sim.py`. Twenty minutes of a real trace, on one core.

The first 1,200 seconds of Azure's conversations (bench/data), at their own pace, on an H200, which they leave
idle at times, and on an RTX 4090, which they overload. Seconds of CPU time, workload and figures included.
Exits with 1 if a run takes more than `--most` seconds, by default a minute.
"""

from __future__ import annotations

import argparse
import sys
import time

import click

from tokenflow_bench.cases import Case
from tokenflow_bench.costs import MACHINES
from tokenflow_bench.recorded import Recorded
from tokenflow_bench.setups import AZURE

_TRACE = Recorded(path=str(AZURE), end_s=1200.0, rate=15.0)


def main() -> None:
    given = _arguments()
    click.echo(f"{'machine':<10}{'policy':<12}{'requests':>10}{'simulated s':>13}{'CPU s':>8}")
    took_s = [_run(machine, policy) for machine in given.machines for policy in given.policies]
    if max(took_s) > given.most:
        click.echo(f"the slowest took more than {given.most:g} s", err=True)
        sys.exit(1)


def _run(machine: str, policy: str) -> float:
    case = Case(setup=_TRACE.name, policy=policy, seed=1, machine=MACHINES[machine], recorded=_TRACE)
    began = time.process_time()
    figures = case.run()["figures"]
    took_s = time.process_time() - began
    click.echo(
        f"{machine:<10}{policy:<12}{figures['streams']:>10}{figures['makespan_s']:>13.0f}{took_s:>8.1f}"
    )
    return took_s


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=["h200", "4090"])
    parser.add_argument("--policies", nargs="+", default=["stock", "andes", "tokenflow", "adaptive"])
    parser.add_argument("--most", type=float, default=60.0, help="seconds of CPU time that a run may take")
    return parser.parse_args()


if __name__ == "__main__":
    main()
