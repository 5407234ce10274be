"""`make proof`: stock scheduling against ours on the real engine, and the simulator held to it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from tokenflow_bench.burst.machine import calibrated_setup
from tokenflow_bench.burst.others import MAX_OTHERS
from tokenflow_bench.burst.report import terminal
from tokenflow_bench.burst.scenarios import Plan
from tokenflow_bench.burst.setups import SETUPS, Setup
from tokenflow_bench.calibrate.machine import toml_entry
from tokenflow_bench.costs import Machine, read_machines
from tokenflow_bench.experiment import keep, measured, objections
from tokenflow_bench.load.cli import MAX_LAG_MS
from tokenflow_bench.proof.page import html, page
from tokenflow_bench.proof.plots import proof_plots
from tokenflow_bench.proof.schedule import schedule
from tokenflow_bench.report.write import write_plots
from tokenflow_bench.simulator.validate import comparison_table, in_short, validate

__all__ = ["main"]

_ROOT = Path(__file__).parents[3]
_PAGE = _ROOT / "docs" / "results-proof.md"
_MACHINES = _ROOT / "bench" / "out" / "machines.toml"
_LOADS = (0.8, 1.2)
_TARGET_S = 1.0
_CALIBRATION_ROUNDS = 3
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
    help="Of an earlier calibration, instead of another one.",
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
        say=_say,
    )
    chosen = [SETUPS[name] for name in setups or SETUPS]
    todo = schedule(plan, chosen, within_s=60 * minutes)
    _say(f"calibration and {todo.plan.runs} rounds: about {todo.seconds / 60:.0f} minutes")
    given = f' ARGS="{" ".join(sys.argv[1:])}"' if sys.argv[1:] else ""
    try:
        machines = _machines(chosen, machines_file, max_lag_ms=max_lag_ms, max_others=max_others, seed=seed)
        document = measured(todo.plan, todo.work, command=[f"make proof{given}"])
    except (RuntimeError, ValueError, OSError, AssertionError) as error:
        raise click.ClickException("\n".join([str(error), *getattr(error, "__notes__", ())])) from error
    comparisons = validate(document, machines)
    document["calibration"] = {name: asdict(machine) for name, machine in machines.items()}
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


def _machines(
    setups: Sequence[Setup], path: Path | None, *, max_lag_ms: float, max_others: float, seed: int
) -> dict[str, Machine]:
    """By name: of this calibration, which is kept, or of an earlier one. Raises as `calibrated_setup`."""
    if path is not None:
        return read_machines(path)
    found = [
        calibrated_setup(
            setup.name,
            kv_tokens=None,
            rounds=_CALIBRATION_ROUNDS,
            seed=seed,
            say=_say,
            max_lag_ms=max_lag_ms,
            max_others=max_others,
        )
        for setup in setups
    ]
    _MACHINES.parent.mkdir(parents=True, exist_ok=True)
    _MACHINES.write_text("\n".join(map(toml_entry, found)))
    _say(f"kept {_MACHINES.relative_to(_ROOT)}")
    return {machine.name: machine for machine in found}


def _say(line: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')}  {line}")


if __name__ == "__main__":
    main()
