"""`make paper`: run all sections, say which goals are met, write the report."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
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
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run nothing: judge the figures of this result again, and write the page.",
)
@click.option("--no-page", is_flag=True, help="Leave docs/results.md and its pictures alone.")
def main(
    *,
    names: Sequence[str],
    seeds: Sequence[int],
    jobs: int,
    out: Path | None,
    source: Path | None,
    no_page: bool,
) -> None:
    """Simulate the paper's set-ups and what lies beyond it; all sections write docs/results.md.

    What is interrupted goes on where it stopped, as long as simulator and policies remain the same.
    """
    path = out or _ROOT / _OUT / "paper.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = Kept(path.with_suffix(".partial.jsonl"))
    if source is None:
        sections = [section for section in SECTIONS if not names or section.name in names]
        document = _measured(sections, seeds, jobs, kept)
    else:
        document = _judged_again(json.loads(source.read_text()))
    path.write_text(json.dumps(document) + "\n")
    click.echo(f"wrote {path}")
    whole = len(document["sections"]) == len(SECTIONS)
    if whole and source is None:
        kept.forget()
    if document["goals"]:
        click.echo(f"\n{goals_table(document).text()}")
    if whole and not no_page:
        for written in write_report(
            document, page=_ROOT / "docs" / "results.md", html=path.with_suffix(".html")
        ):
            click.echo(f"wrote {written}")


def _measured(sections: Sequence[Section], seeds: Sequence[int], jobs: int, kept: Kept) -> dict[str, Any]:
    cases = _all_cases(sections, seeds)
    click.echo(f"{len(cases)} runs on {jobs} {'cores' if jobs > 1 else 'core'}")
    to_do = sum(kept.get(case) is None for case in cases)
    began = time.monotonic()
    results = dict(zip(cases, run_all(cases, jobs=jobs, say=click.echo, kept=kept), strict=True))
    took = f"{to_do} runs in {(time.monotonic() - began) / 60:.1f} min on {jobs} of the cores"
    click.echo(took)
    head = environment.describe(seed=seeds[0], command=_command(), browsers=False)
    return head | {"took": took} | _document(sections, seeds, results)


def _judged_again(document: dict[str, Any]) -> dict[str, Any]:
    """The same figures with the goals and words of now."""
    found = {_named(result): result for result in document["cases"]}
    names = [section["name"] for section in document["sections"]]
    sections = [section for section in SECTIONS if section.name in names]
    cases = _all_cases(sections, document["seeds"])
    missing = [case for case in cases if _named(asdict(case)) not in found]
    if missing:
        raise click.ClickException(f"the result lacks {len(missing)} runs, for one {missing[0]}")
    results = {case: found[_named(asdict(case))] for case in cases}
    head = environment.describe(seed=document["seed"], command=[], browsers=False)
    judged = {"judged_at": head["at"], "judged_by": head["versions"]["commit"]}
    return document | _document(sections, document["seeds"], results) | judged


def _named(case: Mapping[str, Any]) -> str:
    """What tells a case of these sections from all others, in a result as well."""
    names = ("setup", "policy", "seed", "load", "rates", "readers")
    return json.dumps([*(case.get(name) or None for name in names), bool(case.get("timeline"))])


def _all_cases(sections: Sequence[Section], seeds: Sequence[int]) -> list[Case]:
    return list(dict.fromkeys(case for section in sections for case in _cases(section, seeds)))


def _cases(section: Section, seeds: Sequence[int]) -> list[Case]:
    return cases_of(section, seeds[:1] if section.name == "timelines" else seeds)


def _document(
    sections: Sequence[Section], seeds: Sequence[int], results: Mapping[Case, Mapping[str, Any]]
) -> dict[str, Any]:
    number = {case: position for position, case in enumerate(results)}

    def figures_of(case: Case) -> Mapping[str, Any]:
        figures: Mapping[str, Any] = results[case]["figures"]
        return figures

    return {
        "kind": "paper",
        "seeds": list(seeds),
        "sections": [
            {
                "name": section.name,
                "title": section.title,
                "words": section.words,
                "cases": [number[case] for case in _cases(section, seeds)],
            }
            for section in sections
        ],
        "goals": [asdict(verdict) for verdict in verdicts(figures_of, seeds)]
        if any(section.name == "goals" for section in sections)
        else [],
        "cases": list(results.values()),
    }


def _command() -> list[str]:
    """As it can be typed again."""
    given = " ".join(sys.argv[1:])
    return ["make", "paper", *([f'ARGS="{given}"'] if given else [])]


if __name__ == "__main__":
    main()
