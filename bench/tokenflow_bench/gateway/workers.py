"""`make bench-workers`: what a second worker adds, where clients and engine need the same cores.

One worker and two take turns, saturated by 100 streams; all processes may use all cores. A driver that costs
`d` a chunk beside workers that cost `g` lets two cores carry at most 2 / (g + d) chunks a second. So workers
scale as far as a chunk costs two of them what it costs one, and no core is left idle.

Then once more with a share of a core for each worker, which leaves enough for the driver: so it is the
workers alone that limit what goes through.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import click

from tokenflow_bench.gateway.driver import Driver
from tokenflow_bench.gateway.quota import NoQuota, limited
from tokenflow_bench.gateway.scenarios import Figures, Scale, saturated
from tokenflow_bench.gateway.targets import Target, running_link, running_workers
from tokenflow_bench.spread import Spread
from tokenflow_bench.tables import Table, spread

__all__ = ["main"]

_COUNTS = (1, 2)


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds, each of one worker and two.")
@click.option(
    "--share", default=0.35, show_default=True, help="Of a core, for each worker in the second table."
)
def main(rounds: int, share: float) -> None:
    """Measure and print."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    driver, scale = Driver(), Scale(quick=False)
    with tempfile.TemporaryDirectory(prefix="tf-") as path, ExitStack() as stack:
        folder = Path(path) / "TokenFlow"
        folder.mkdir()
        with driver.serving():
            stack.enter_context(running_link(Path(path), cpus=_all_cores()))
            targets = [
                stack.enter_context(running_workers(count, folder, engine_port=driver.port))
                for count in _COUNTS
            ]
        free = [[_figures(driver, target, scale) for target in targets] for _ in range(rounds)]
        click.echo(f"{cores} cores, load before: {load:.1f}; 100 streams, saturated; median (range)")
        click.echo(_table(free).text())
        try:
            for target in targets:
                stack.enter_context(limited(target.pids(), cores=share))
        except NoQuota as reason:
            raise click.ClickException(str(reason)) from reason
        shared = [[_figures(driver, target, scale) for target in targets] for _ in range(rounds)]
        click.echo(f"\nThe same with {share:g} of a core for each worker")
        click.echo(_table(shared).text())


def _figures(driver: Driver, target: Target, scale: Scale) -> Figures:
    used_s, begun = time.process_time(), time.monotonic()
    figures = saturated(driver, target, scale)
    share = (time.process_time() - used_s) / (time.monotonic() - begun)
    return {
        **figures,
        "driver_us": 1e6 * share / figures["saturated_per_s"],
        "cores": share + figures["saturated_core"],
    }


def _table(results: list[list[Figures]]) -> Table:
    rows = [
        [
            title,
            *(spread(Spread.of(figures[number][name] for figures in results), digits) for number in (0, 1)),
        ]
        for title, name, digits in (
            ("CPU of the workers per chunk, us", "saturated_us", 1),
            ("CPU of the driver per chunk, us", "driver_us", 1),
            ("chunks per second", "saturated_per_s", 0),
            ("cores used by the workers", "saturated_core", 2),
            ("cores used in all", "cores", 2),
        )
    ]
    gain = [two["saturated_per_s"] / one["saturated_per_s"] for one, two in results]
    rows.append(["chunks per second, of those of one worker", "1", spread(Spread.of(gain), 2)])
    return Table(["", "1 worker", "2 workers"], rows)


def _all_cores() -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


if __name__ == "__main__":
    main()
