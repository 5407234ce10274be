"""`make bench-readers`: how well the gateway knows its readers, and what a thousand of them cost."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from tokenflow_bench import environment
from tokenflow_bench.readers.accuracy.rows import Plan
from tokenflow_bench.readers.accuracy.run import AccuracyRun, run_accuracy
from tokenflow_bench.readers.paused.plan import PausedRun
from tokenflow_bench.readers.paused.run import run_paused
from tokenflow_bench.readers.report import page, terminal

__all__ = ["main"]

_ROOT = Path(__file__).parents[3]
_OUT = _ROOT / "bench" / "out"
_PAGE = _ROOT / "docs" / "results-readers.md"
_PARTS = ("accuracy", "streams")


@click.command()
@click.option("--quick", is_flag=True, help="Once, shorter, with fewer streams; writes no page.")
@click.option("--part", type=click.Choice(_PARTS), help="Only this one; writes no page.")
@click.option(
    "--row", "rows", multiple=True, help="Only these readers of the accuracy table; writes no page."
)
@click.option("--repetitions", type=click.IntRange(min=1), help="Of each part; 3, or 1 with --quick.")
@click.option("--seed", default=1, show_default=True, help="Draws the person of whom nothing is known.")
@click.option("--traces", is_flag=True, help="A CSV of each reader, moment by moment, in bench/out.")
@click.option(
    "--page",
    "page_path",
    type=click.Path(path_type=Path),
    help="Write the page there, whatever was measured.",
)
@click.option(
    "--from", "source", type=click.Path(exists=True, path_type=Path), help="Show this result again."
)
def main(
    *,
    quick: bool,
    part: str | None,
    rows: tuple[str, ...],
    repetitions: int | None,
    seed: int,
    traces: bool,
    page_path: Path | None,
    source: Path | None,
) -> None:
    """Measure, show tables, and write bench/out/*.json and docs/results-readers.md."""
    if source:
        document = json.loads(source.read_text())
    else:
        times = repetitions or (1 if quick else 3)
        document = environment.describe(seed=seed, command=environment.this_command())
        if part in (None, "accuracy"):
            try:
                document["accuracy"] = run_accuracy(_accuracy(quick, times, seed, rows, traces))
            except ValueError as error:
                raise click.UsageError(str(error)) from error
        if part in (None, "streams") and not rows:
            document["paused"] = run_paused(_paused(quick, times))
        _keep(document)
    click.echo(f"\n{terminal(document)}")
    if page_path is None and not (quick or part or rows or source):
        page_path = _PAGE
    if page_path is not None:
        page_path.write_text(page(document))
        click.echo(f"\nwrote {page_path}")


def _accuracy(quick: bool, repetitions: int, seed: int, rows: tuple[str, ...], traces: bool) -> AccuracyRun:
    plan = Plan(before_s=3, pause_s=3, after_s=3) if quick else Plan(before_s=6, pause_s=5, after_s=9)
    _OUT.mkdir(parents=True, exist_ok=True)
    return AccuracyRun(
        plan=plan,
        repetitions=repetitions,
        seed=seed,
        say=_say,
        only=rows,
        traces=_OUT if traces else None,
    )


def _paused(quick: bool, repetitions: int) -> PausedRun:
    if quick:
        return PausedRun(
            streams=300,
            stopped=45,
            reported=45,
            settle_s=4,
            window_s=8,
            repetitions=repetitions,
            say=_say,
        )
    return PausedRun(
        streams=1000, stopped=150, reported=150, settle_s=8, window_s=16, repetitions=repetitions, say=_say
    )


def _keep(document: dict[str, Any]) -> None:
    _OUT.mkdir(parents=True, exist_ok=True)
    path = _OUT / f"readers-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    click.echo(f"kept {path.relative_to(_ROOT)}")


def _say(line: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')}  {line}")


if __name__ == "__main__":
    main()
