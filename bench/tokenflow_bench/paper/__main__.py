"""`make paper`: run all sections, say which goals are met, write the report."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tokenflow_bench import environment
from tokenflow_bench.cases import Case
from tokenflow_bench.kept import Kept
from tokenflow_bench.paper.goals import verdicts
from tokenflow_bench.paper.sections import SECTIONS, Section, cases_of
from tokenflow_bench.pool import run_all
from tokenflow_bench.report.goals import goals_table
from tokenflow_bench.report.write import write_report

__all__ = ["main"]

_ROOT = Path(__file__).parents[3]
_OUT = Path("bench", "out")
_NAMES = [section.name for section in SECTIONS]


@click.command()
@click.option("--section", "names", multiple=True, type=click.Choice(_NAMES), help="By default all.")
@click.option("--seed", "seeds", multiple=True, type=int, default=[1, 2, 3, 4, 5], show_default=True)
@click.option("--jobs", type=click.IntRange(min=1), default=min(os.cpu_count() or 1, 2), show_default=True)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="By default bench/out/paper.json."
)
@click.option("--no-page", is_flag=True, help="Leave docs/results.md and its pictures alone.")
def main(*, names: Sequence[str], seeds: Sequence[int], jobs: int, out: Path | None, no_page: bool) -> None:
    """Simulate the paper's set-ups and what lies beyond it; all sections write docs/results.md.

    What is interrupted goes on where it stopped, as long as simulator and policies remain the same.
    """
    sections = [section for section in SECTIONS if not names or section.name in names]
    began = time.monotonic()
    path = out or _ROOT / _OUT / "paper.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = Kept(path.with_suffix(".partial.jsonl"))
    document = _measured(sections, seeds, jobs, kept)
    took_s = time.monotonic() - began
    path.write_text(json.dumps(document) + "\n")
    if len(sections) == len(SECTIONS):
        kept.forget()
    click.echo(f"{len(document['cases'])} runs in {took_s / 60:.1f} min; wrote {path}")
    if document["goals"]:
        click.echo(f"\n{goals_table(document).text()}")
    whole = len(sections) == len(SECTIONS)
    if whole and not no_page:
        for written in write_report(
            document, page=_ROOT / "docs" / "results.md", html=path.with_suffix(".html")
        ):
            click.echo(f"wrote {written}")


def _measured(sections: Sequence[Section], seeds: Sequence[int], jobs: int, kept: Kept) -> dict[str, Any]:
    by_section = {
        section.name: cases_of(section, seeds[:1] if section.name == "timelines" else seeds)
        for section in sections
    }
    cases = list(dict.fromkeys(case for some in by_section.values() for case in some))
    click.echo(f"{len(cases)} runs on {jobs} {'cores' if jobs > 1 else 'core'}")
    results = run_all(cases, jobs=jobs, say=click.echo, kept=kept)
    number = {case: position for position, case in enumerate(cases)}

    def figures_of(case: Case) -> dict[str, Any]:
        figures: dict[str, Any] = results[number[case]]["figures"]
        return figures

    head = environment.describe(seed=seeds[0], command=_command(), browsers=False)
    return head | {
        "kind": "paper",
        "seeds": list(seeds),
        "sections": [
            {
                "name": section.name,
                "title": section.title,
                "words": section.words,
                "cases": [number[case] for case in by_section[section.name]],
            }
            for section in sections
        ],
        "goals": [asdict(verdict) for verdict in verdicts(figures_of, seeds)]
        if "goals" in by_section
        else [],
        "cases": results,
    }


def _command() -> list[str]:
    """As it can be typed again."""
    given = " ".join(sys.argv[1:])
    return ["make", "paper", *([f'ARGS="{given}"'] if given else [])]


if __name__ == "__main__":
    main()
