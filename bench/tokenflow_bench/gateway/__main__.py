"""`make bench-gateway`: this gateway and others in turns, on one core, in front of the same mock engine."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import click

from tokenflow_bench.environment import describe
from tokenflow_bench.gateway import report
from tokenflow_bench.gateway.driver import Driver
from tokenflow_bench.gateway.scenarios import SCENARIOS, Figures, NotServed, Scale
from tokenflow_bench.gateway.targets import TARGETS, Missing, Target, running, running_link

_ROOT = Path(__file__).parents[3]
_SLOW = {"LiteLLM": {"paced500"}}
"""What is not asked of a gateway that is known not to do it: LiteLLM opens no 500 streams."""
_ONCE = {"memory", "stalled_client", "aborts"}
"""Measured in the first round only: they hardly vary."""

Results = dict[str, dict[str, list[Figures]]]
"""Figures of the rounds by gateway and scenario."""


@click.command()
@click.option("--quick", is_flag=True, help="One short round of each.")
@click.option("--rounds", type=int, default=None, help="Rounds, each of all gateways in turn [3; quick: 1].")
@click.option("--gateways", default=",".join(TARGETS), help="Which, separated by commas.")
@click.option("--scenarios", default=",".join(SCENARIOS), help="Which, separated by commas.")
@click.option("--write/--no-write", default=True, help="Write docs/performance.md and the JSON beside it.")
def main(quick: bool, rounds: int | None, gateways: str, scenarios: str, write: bool) -> None:
    """Measure, print, and write docs/performance.md."""
    names = [name for name in TARGETS if name in gateways.split(",")]
    wanted = [name for name in SCENARIOS if name in scenarios.split(",")]
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    gateway_cpu, own_cpu = _cores()
    os.sched_setaffinity(0, {own_cpu})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    driver, scale = Driver(), Scale(quick=quick)
    command = ["make", "bench-gateway", *([f'ARGS="{" ".join(sys.argv[1:])}"'] if sys.argv[1:] else [])]
    document = describe(seed=0, command=command, browsers=False)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tf-") as path, ExitStack() as stack:
        folder = Path(path)
        missing, targets = {}, []
        with driver.serving():
            stack.enter_context(running_link(folder, cpus=str(own_cpu)))
            for name in names:
                try:
                    target = running(name, folder, engine_port=driver.port, cpu=gateway_cpu)
                    targets.append(stack.enter_context(target))
                    click.echo(f"{name} is up", err=True)
                except Missing as reason:
                    missing[name] = str(reason)
                    click.echo(f"{name}: {reason}", err=True)
        gc.collect()
        gc.freeze()
        gc.disable()
        results = _measure(driver, targets, scale, wanted, rounds=rounds or (1 if quick else 3))
    document |= {"missing": missing, "took_s": time.monotonic() - began, "results": results}
    click.echo(report.text(document))
    if write:
        _write(document)


def _measure(
    driver: Driver, targets: list[Target], scale: Scale, wanted: list[str], *, rounds: int
) -> Results:
    """Rounds of all scenarios, and in each scenario the gateways one after another: moments apart."""
    results: Results = {target.name: {} for target in targets}
    refused: set[tuple[str, str]] = {(name, scenario) for name in _SLOW for scenario in _SLOW[name]}
    for number in range(rounds):
        for scenario in wanted:
            if number and scenario in _ONCE:
                continue
            for target in targets:
                if (target.name, scenario) in refused or (target.pid < 0 and scenario in _ONCE):
                    continue
                try:
                    figures = SCENARIOS[scenario](driver, target, scale)
                except NotServed as reason:
                    refused.add((target.name, scenario))
                    click.echo(f"{target.name}, {scenario}: {reason}", err=True)
                    continue
                results[target.name].setdefault(scenario, []).append(figures)
                click.echo(f"{number + 1} {target.name}: " + _line(figures), err=True)
                driver.run_for(0.1)
    return results


def _line(figures: Figures) -> str:
    return ", ".join(f"{name} {value:,.2f}" for name, value in figures.items())


def _cores() -> tuple[int, int]:
    """The gateway's core, and the one of everything else. With more than two, not the first."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise click.ClickException("two cores are needed: one is the gateway's own")
    return cores[-1], cores[-2]


def _write(document: dict[str, object]) -> None:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    out = _ROOT / "bench" / "out" / f"gateway-{stamp}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(document, indent=1))
    page = _ROOT / "docs" / "performance.md"
    page.write_text(report.page(document, page.read_text() if page.exists() else ""))
    click.echo(f"wrote {page.relative_to(_ROOT)} and {out.relative_to(_ROOT)}", err=True)


if __name__ == "__main__":
    main()
