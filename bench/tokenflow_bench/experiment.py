"""`make bench-burst`: the paper's experiment at the scale of this machine, on the real engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from support.real_engine import engine_python
from tokenflow_bench import environment
from tokenflow_bench.burst import idle
from tokenflow_bench.burst.others import MAX_OTHERS
from tokenflow_bench.burst.report import page, terminal
from tokenflow_bench.burst.scenarios import Comparison, Plan, ablation, burst, measure, pauses, seconds
from tokenflow_bench.burst.setups import SETUPS, Setup
from tokenflow_bench.load.cli import MAX_LAG_MS

__all__ = ["keep", "main", "measured", "objections"]

_ROOT = Path(__file__).parents[2]
_OUT = _ROOT / "bench" / "out"
_PAGE = _ROOT / "docs" / "results-burst.md"
_SMALL = "tiny"
_UNTRUSTED = 3
"""Exit code when some runs' driver was late, or other programs ran beside them."""
_TERMINATED = 128 + signal.SIGTERM
_PARTS = ("quick", "setups", "policies", "loads", "pauses", "ablation", "idle", "kv_tokens", "threads")
"""Options with which the results are not the whole page."""


@click.command()
@click.option("--quick", is_flag=True, help="The tiny model, stock and adaptive, one round; writes no page.")
@click.option(
    "--runs", type=click.IntRange(min=1), help="Rounds of each table; 5, or 1 with --quick, 70 with --idle."
)
@click.option("--setup", "setups", type=click.Choice(list(SETUPS)), multiple=True, help="By default all.")
@click.option(
    "--policy", "policies", multiple=True, help="By default the set-up's; stock is always among them."
)
@click.option("--load", "loads", type=float, multiple=True, help="Sum of rates / capacity; 0.8 and 1.2.")
@click.option("--pauses", is_flag=True, help="Instead: every second reader pauses for ten seconds.")
@click.option("--ablation", is_flag=True, help="Instead: adaptive with parts taken away.")
@click.option("--idle", is_flag=True, help="Instead: what the plugin costs where nothing is to be scheduled.")
@click.option("--kv-tokens", type=int, help="The engine's KV memory, instead of looking for the right size.")
@click.option("--threads", type=click.IntRange(min=1), help="Of the model; by default the set-up's.")
@click.option("--ttft-target", default=1.0, show_default=True, help="Seconds, of a good stream.")
@click.option("--max-lag-ms", default=MAX_LAG_MS, show_default=True, help="Above, a run is not to be used.")
@click.option(
    "--max-others", default=MAX_OTHERS, show_default=True, help="Cores for other programs; likewise."
)
@click.option("--seed", default=1, show_default=True)
@click.option("--write-page", is_flag=True, help="Write docs/results-burst.md in any case.")
@click.option(
    "--from",
    "sources",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    help="Show this result again; with --write-page several become one page, in this order.",
)
def main(**given: Any) -> None:
    """Measure, show tables, and write bench/out/*.json and docs/results-burst.md."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # ends engine and gateway, too
    if given["sources"]:
        documents = [json.loads(source.read_text()) for source in given["sources"]]
    else:
        documents = [_idle(given) if given["idle"] else _measured(given)]
        keep(documents[0])
    click.echo(f"\n{terminal(*documents)}")
    objected = [words for document in documents for words in objections(document)]
    is_whole = not given["sources"] and not any(given[part] for part in _PARTS)
    if given["write_page"] or (is_whole and not objected):
        _PAGE.write_text(page(*documents))
        click.echo(f"\nwrote {_PAGE.relative_to(_ROOT)}")
    if objected:
        click.echo(f"\nSome runs are NOT TO BE USED: {objected[0]}", err=True)
        sys.exit(_UNTRUSTED)


def _measured(given: dict[str, Any]) -> dict[str, Any]:
    quick, special = given["quick"], given["pauses"] or given["ablation"]
    plan = Plan(
        policies=given["policies"] or (("adaptive",) if quick else ()),
        loads=given["loads"] or ((1.2,) if special else (0.8, 1.2)),
        runs=given["runs"] or (1 if quick else 5),
        seed=given["seed"],
        target_s=given["ttft_target"],
        max_lag_ms=given["max_lag_ms"],
        max_others=given["max_others"],
        kv_tokens=given["kv_tokens"],
        threads=given["threads"],
        say=_say,
    )
    scenario = pauses if given["pauses"] else ablation if given["ablation"] else burst
    setups = [SETUPS[name] for name in given["setups"] or ((_SMALL,) if quick or special else tuple(SETUPS))]
    return measured(plan, [(setup, scenario(plan, setup)) for setup in setups], command=_command())


def measured(
    plan: Plan, work: Sequence[tuple[Setup, Sequence[Comparison]]], *, command: Sequence[str]
) -> dict[str, Any]:
    """The result's document: each set-up's comparisons on an engine of its own.

    What ends it early, a signal too, leaves the tables that are finished in bench/out/unfinished-*.json.
    """
    document = environment.describe(seed=plan.seed, command=command, browsers=False)
    document["versions"] |= _engine_versions()
    document |= {"runs": plan.runs, "target_s": plan.target_s, "tables": []}
    minutes = sum(seconds(plan, setup, comparisons) for setup, comparisons in work) / 60
    cases = ", ".join(f"{setup.name}: {_runs_of(comparisons)}" for setup, comparisons in work)
    plan.say(f"{plan.runs} rounds of {cases}; about {minutes:.0f} minutes")
    try:
        for setup, comparisons in work:
            for table in measure(plan, setup, comparisons):
                document["tables"].append(table)
    except BaseException:
        if document["tables"]:
            keep(document, "unfinished")
        raise
    return document


def _idle(given: dict[str, Any]) -> dict[str, Any]:
    document = environment.describe(seed=given["seed"], command=_command(), browsers=False)
    document["versions"] |= _engine_versions()
    document["tables"] = [
        table
        for name in given["setups"] or (_SMALL,)
        for table in idle.measure(
            SETUPS[name],
            pairs=given["runs"] or 70,
            seed=given["seed"],
            threads=given["threads"],
            say=_say,
        )
    ]
    return document


def _runs_of(comparisons: Sequence[Comparison]) -> str:
    return " and ".join(f"{len(each.cases)} cases ({each.title})" for each in comparisons)


def _engine_versions() -> dict[str, str]:
    ask = "import importlib.metadata as m; print(*(m.version(p) for p in ('sglang', 'torch')))"
    said = subprocess.run([engine_python(), "-c", ask], capture_output=True, text=True, check=True)
    sglang, torch = said.stdout.split()
    return {"sglang": sglang, "torch": torch}


def _command() -> list[str]:
    """As it can be typed again."""
    given = " ".join(sys.argv[1:])
    return ["make", "bench-burst", *([f'ARGS="{given}"'] if given else [])]


def objections(document: dict[str, Any]) -> list[str]:
    """Why runs are not to be used, one for each."""
    runs = [run for table in document["tables"] for case in table.get("cases", {}).values() for run in case]
    return [run["objection"] for run in runs if run["objection"]]


def keep(document: dict[str, Any], name: str = "burst") -> Path:
    """Write it to bench/out; where."""
    _OUT.mkdir(parents=True, exist_ok=True)
    path = _OUT / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    click.echo(f"kept {path.relative_to(_ROOT)}")
    return path


def _say(line: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')}  {line}")


if __name__ == "__main__":
    main()
