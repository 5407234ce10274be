"""`make proof`: stock scheduling against ours on the real engine, and the simulator held to it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from tokenflow_bench.burst.others import MAX_OTHERS
from tokenflow_bench.burst.report import terminal
from tokenflow_bench.burst.scenarios import Plan
from tokenflow_bench.burst.setups import SETUPS
from tokenflow_bench.calibrate.machine import toml_entry
from tokenflow_bench.costs import MACHINES, Machine, read_machines
from tokenflow_bench.experiment import keep, measured, objections
from tokenflow_bench.load.cli import MAX_LAG_MS
from tokenflow_bench.proof.page import html, page
from tokenflow_bench.proof.plots import proof_plots
from tokenflow_bench.proof.schedule import schedule
from tokenflow_bench.report.write import write_plots
from tokenflow_bench.simulator.validate import comparison_table, in_short, machines_of, validate

__all__ = ["keep_machines", "machines_used", "main"]

_ROOT = Path(__file__).parents[3]
_PAGE = _ROOT / "docs" / "results-proof.md"
_MACHINES = _ROOT / "bench" / "out" / "machines.toml"
_LOADS = (0.8, 1.2)
_TARGET_S = 1.0
_CONTEXT_TOKENS = 200
"""Of a stream half-way, for which machines are compared."""
_UNTRUSTED = 3
_TERMINATED = 128 + signal.SIGTERM


@click.command()
@click.option("--minutes", type=click.FloatRange(min=1), default=30.0, show_default=True, help="There are.")
@click.option("--setup", "setups", type=click.Choice(list(SETUPS)), multiple=True, help="By default all.")
@click.option("--max-lag-ms", default=MAX_LAG_MS, show_default=True, help="Above, a run is not to be used.")
@click.option(
    "--max-others", default=MAX_OTHERS, show_default=True, help="Cores for other programs; likewise."
)
@click.option(
    "--machines",
    "machines_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Of an earlier calibration, instead of one before each round.",
)
@click.option("--seed", default=1, show_default=True)
def main(
    *,
    minutes: float,
    setups: tuple[str, ...],
    max_lag_ms: float,
    max_others: float,
    machines_file: Path | None,
    seed: int,
) -> None:
    """Write bench/out/proof-*.{json,html} and machines.toml; with all set-ups, docs/results-proof.md, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # ends engine and gateway, too
    plan = Plan(
        policies=(),
        loads=_LOADS,
        runs=1,
        seed=seed,
        target_s=_TARGET_S,
        max_lag_ms=max_lag_ms,
        max_others=max_others,
        kv_tokens=None,
        threads=None,
        calibrates=machines_file is None,
        say=_say,
    )
    chosen = [SETUPS[name] for name in setups or SETUPS]
    todo = schedule(plan, chosen, within_s=60 * minutes)
    _say(f"{todo.plan.runs} rounds: about {todo.seconds / 60:.0f} minutes")
    given = f' ARGS="{" ".join(sys.argv[1:])}"' if sys.argv[1:] else ""
    try:
        known = MACHINES if machines_file is None else read_machines(machines_file)
        document = measured(todo.plan, todo.work, command=[f"make proof{given}"])
    except (RuntimeError, ValueError, OSError, AssertionError) as error:
        raise click.ClickException("\n".join([str(error), *getattr(error, "__notes__", ())])) from error
    comparisons = validate(document, known)
    machines = machines_used(document, known)
    document["calibration"] = {machine.name: asdict(machine) for machine in machines}
    if machines_file is None:
        keep_machines(document, known)
    document["validation"] = [one.document() for one in comparisons]
    kept = keep(document, "proof")
    plots = proof_plots(document, comparisons)
    written = kept.with_suffix(".html")
    written.write_text(html(document, machines, comparisons, plots))
    click.echo(f"\n{terminal(document)}\n\n{comparison_table(comparisons).text()}\n\n{in_short(comparisons)}")
    click.echo(f"\nwrote {written.relative_to(_ROOT)}")
    if objections(document):
        click.echo(f"\nSome runs are NOT TO BE USED: {objections(document)[0]}", err=True)
        sys.exit(_UNTRUSTED)
    if not setups:
        _PAGE.write_text(page(document, machines, comparisons, plots))
        for path in (_PAGE, *write_plots(plots, _PAGE.parent / "img")):
            click.echo(f"wrote {path.relative_to(_ROOT)}")


def machines_used(document: Mapping[str, Any], known: Mapping[str, Machine]) -> list[Machine]:
    """What was simulated on: one for each round, or one for each set-up where those of a file were used.

    None of a set-up whose machine, ``laptop-SETUP``, is not known.
    """
    found = [
        machine
        for table in document["tables"]
        if f"laptop-{table['setup']}" in known
        for machine in machines_of(table, known[f"laptop-{table['setup']}"])
        if machine is not None
    ]
    return list({machine.name: machine for machine in found}.values())


def keep_machines(document: Mapping[str, Any], known: Mapping[str, Machine]) -> None:
    """For `tokenflow sim --machines`: of each set-up the round in the middle, from slow to fast."""
    entries = []
    for setup in dict.fromkeys(table["setup"] for table in document["tables"]):
        tables = {"tables": [table for table in document["tables"] if table["setup"] == setup]}
        found = sorted(machines_used(tables, known), key=lambda machine: machine.capacity(_CONTEXT_TOKENS))
        if found:
            middle = found[len(found) // 2]
            source = f"make proof: {middle.name}; {tables['tables'][0]['cores']}"
            entries.append(toml_entry(replace(middle, name=f"laptop-{setup}", source=source)))
    if not entries:
        return
    _MACHINES.parent.mkdir(parents=True, exist_ok=True)
    _MACHINES.write_text("\n".join(entries))
    _say(f"kept {_MACHINES.relative_to(_ROOT)}")


def _say(line: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')}  {line}")


if __name__ == "__main__":
    main()
