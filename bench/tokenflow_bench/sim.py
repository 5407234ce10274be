"""`tokenflow sim`: policies against each other on a simulated engine."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click

from tokenflow_bench import environment
from tokenflow_bench.cases import BOUND, Case
from tokenflow_bench.costs import MACHINES, Machine, read_machines
from tokenflow_bench.crowds import STEADY, crowd
from tokenflow_bench.people import READING_RATE, READING_SIGMA
from tokenflow_bench.pool import run_all
from tokenflow_bench.recorded import Recorded
from tokenflow_bench.setups import AZURE, SETUPS
from tokenflow_bench.sla import parse_sla
from tokenflow_bench.spread import Spread
from tokenflow_bench.tables import Table, number
from tokenflow_bench.traces import FORMATS, TraceError
from tokenflow_bench.variants import Variant

__all__ = ["sim"]

_SETUPS = ("4090-a",)
_LOADS = (0.8, 1.2)
_MACHINE = "4090"
_TRACE_OPTIONS = ("streams", "begin_s", "end_s", "faster", "length_scale", "rate", "sigma")
_POSITIVE = click.FloatRange(min=0, min_open=True)
POLICIES = ("stock", "stock+mixed", "andes", "tokenflow", "adaptive")
_COLUMNS = {
    "ttft_mean_s": ("TTFT mean", 2),
    "ttft_p50_s": ("p50", 2),
    "ttft_p99_s": ("p99", 2),
    "wait_mean_s": ("wait mean", 2),
    "wait_p99_s": ("p99", 2),
    "stall_free_share": ("stall-free", 2),
    "good_share": ("good", 2),
    "raw_tokens_per_s": ("raw tok/s", 0),
    "consumed_tokens_per_s": ("read tok/s", 0),
    "effective_tokens_per_s": ("effective", 0),
    "effective_capped_tokens_per_s": ("capped", 0),
    "preemptions": ("preempt.", 2),
    "gigabytes": ("GB", 0),
    "retractions": ("dropped", 0),
    "emergencies": ("emerg.", 0),
}


def _setups(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if value not in SETUPS:
            raise click.BadParameter(f"no set-up {value!r}; `tokenflow sim --list` shows them")
    if any(SETUPS[value].arrivals == "trace" for value in values) and not AZURE.exists():
        raise click.BadParameter(f"this set-up needs {AZURE.name}, which comes with a clone of the project")
    return values


def _policies(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    for value in values:
        try:
            _ = value == BOUND or Variant.parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return values


def _readers(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    for value in values:
        try:
            crowd(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return values


def _mix(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> Sequence[Any]:
    try:
        return tuple(parse_sla(value) for value in values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _machines(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> dict[str, Machine]:
    try:
        return read_machines(value) if value else {}
    except (ValueError, LookupError) as error:
        raise click.BadParameter(str(error)) from None


def _machine_of(setup: str, machines: dict[str, Machine]) -> Machine | None:
    """None: the set-up's own."""
    name = SETUPS[setup].machine.name
    if machines and name not in machines and len(machines) > 1:
        raise click.UsageError(f"--machines: {setup} needs a [{name}], or the file one machine alone")
    return machines.get(name, next(iter(machines.values()), None))


def _places(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Who comes to which machine, at which loads: fields of `Case`."""
    machines, loads = given["machines"], given["loads"]
    if given["trace"] is None:
        for option in ("machine", *_TRACE_OPTIONS):
            if given[option] is not None:
                raise click.UsageError(f"--{option.removesuffix('_s').replace('_', '-')} goes with --trace")
        return [
            {"setup": setup, "load": load, "machine": _machine_of(setup, machines)}
            for setup, load in product(given["setups"] or _SETUPS, loads or _LOADS)
        ]
    if given["setups"]:
        raise click.UsageError("--setup or --trace, not both")
    machine = _machine_named(given["machine"], machines)
    recorded = Recorded(
        path=str(given["trace"]),
        **{name: given[name] for name in _TRACE_OPTIONS if given[name] is not None},
    )
    try:
        too_long = recorded.too_long(machine)
        for load in loads:
            recorded.workload(machine, load, seed=0)
    except TraceError as error:
        raise click.ClickException(str(error)) from None
    if too_long:
        click.echo(f"{too_long} requests left out: longer than the memory of {machine.name}", err=True)
    return [
        {"setup": recorded.name, "load": load, "machine": machine, "recorded": recorded}
        for load in loads or (None,)
    ]


def _machine_named(name: str | None, machines: dict[str, Machine]) -> Machine:
    known = machines or MACHINES
    name = name or (next(iter(machines)) if len(machines) == 1 else _MACHINE)
    if name not in known:
        raise click.UsageError(f"--machine: no {name!r}; there are {', '.join(known)}")
    return known[name]


def _list(context: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        rows = [
            (setup.name, setup.machine.gpu, setup.machine.model, setup.words, number(setup.capacity))
            for setup in SETUPS.values()
        ]
        click.echo(Table(("set-up", "machine", "model", "who comes", "tok/s at load 1"), rows).text())
        click.echo()
        costs = [(machine.name, machine.quality, machine.source) for machine in MACHINES.values()]
        click.echo(Table(("machine", "how good its costs are", "source"), costs).text())
        context.exit()


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--setup",
    "setups",
    multiple=True,
    callback=_setups,
    help="Who comes to which machine. May be given more than once, as all that follow.  "
    f"[default: {_SETUPS[0]}]",
)
@click.option(
    "--load",
    "loads",
    multiple=True,
    type=_POSITIVE,
    help="Sum of readers' rates / what the engine can generate; of a trace, its least work / its time.  "
    "[default: 0.8, 1.2; with --trace, its own pace]",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"Instead of a set-up: recorded traffic ({', '.join(FORMATS)}; .gz too), as of `tokenflow bench`.",
)
@click.option(
    "--machine", help=f"On which a trace is replayed.  [default: {_MACHINE}, or --machines' only one]"
)
@click.option("--streams", type=click.IntRange(min=1), help="At most so many requests of the trace.")
@click.option("--begin", "begin_s", type=float, help="Of a window of the trace, s.")
@click.option("--end", "end_s", type=float, help="Of that window, s.")
@click.option("--faster", type=_POSITIVE, help="Replay the trace so much faster; with --load, of no effect.")
@click.option("--length-scale", type=_POSITIVE, help="Times the trace's lengths.")
@click.option(
    "--rate", type=_POSITIVE, help=f"Of a trace's readers, tokens a second.  [default: {READING_RATE}]"
)
@click.option(
    "--sigma", type=click.FloatRange(min=0), help=f"Of those rates' logarithms.  [default: {READING_SIGMA}]"
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=POLICIES,
    show_default=True,
    callback=_policies,
    help="With options after a colon (adaptive:least_s=1,write_s=0), and parts of the engine taken away by a "
    "minus: -mixed, -offload, -writes, -overlap, -reports. `bound` is the fluid limit.",
)
@click.option(
    "--readers",
    multiple=True,
    default=[STEADY],
    show_default=True,
    callback=_readers,
    help="steady, pauses, pauses:20/10 (each 20 s for 10 s), scanning, classes, machines:0.3; joined by +.",
)
@click.option(
    "--sla",
    "mix",
    multiple=True,
    callback=_mix,
    metavar="NAME:SHARE[,weight=W][,ttft=S][,rate=R][,park=no]",
    help="A class of `--readers classes`, instead of the built-in ones.",
)
@click.option("--seed", "seeds", multiple=True, type=int, default=[1, 2, 3], show_default=True)
@click.option(
    "--machines",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=_machines,
    help="Of `tokenflow calibrate` (TOML): a set-up runs on the one of its machine's name, or the only one.",
)
@click.option("--timeline", is_flag=True, help="Keep what `tokenflow report` needs to draw each run.")
@click.option("--jobs", type=click.IntRange(min=1), default=min(os.cpu_count() or 1, 2), show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write everything there (JSON).")
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="Show set-ups.")
def sim(
    *,
    policies: Sequence[str],
    readers: Sequence[str],
    mix: Sequence[Any],
    seeds: Sequence[int],
    timeline: bool,
    jobs: int,
    out: Path | None,
    **given: Any,
) -> None:
    """Simulate an engine that executes the policies as they ship; medians over seeds.

    `stock` is SGLang by itself, `stock+mixed` SGLang with --enable-mixed-chunk; all others run on an engine
    with that flag. The same command gives the same figures.

    \b
    Examples:
      tokenflow sim --setup h200-a --load 1.2
      tokenflow sim --setup 4090-gamma --policy stock --policy adaptive:margin_s=1 --readers pauses
      tokenflow sim --setup 4090-azure --load 1 --out azure.json
      tokenflow sim --trace mine.csv --end 1200 --machine h200 --policy stock --policy adaptive
    """  # noqa: D301  # \b keeps click from filling a paragraph
    cases = [
        Case(
            **place,
            readers=who,
            mix=tuple(mix) if "classes" in who else (),
            policy=policy,
            seed=seed,
            timeline=timeline and policy != BOUND,
        )
        for place, who, policy, seed in product(_places(given), readers, policies, seeds)
    ]
    results = run_all(cases, jobs=jobs, say=lambda line: click.echo(line, err=True))
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case, result in zip(cases, results, strict=True):
        groups.setdefault((case.setup, case.load, case.readers), []).append(result)
    for (setup, load, who), members in groups.items():
        pace = "its own pace" if load is None else f"load {load:g}"
        click.echo(f"\n{setup}, {pace}, {who} readers, seeds {', '.join(map(str, seeds))}")
        click.echo(_table(members).text())
    if out is not None:
        command = ["tokenflow", "sim", *(shlex.quote(argument) for argument in sys.argv[2:])]
        head = environment.describe(seed=seeds[0], command=command, browsers=False)
        document = head | {"kind": "simulation", "seeds": list(seeds), "cases": results}
        out.write_text(json.dumps(document) + "\n")
        click.echo(f"\nwrote {out}")


def _table(results: Sequence[dict[str, Any]]) -> Table:
    by_policy: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_policy.setdefault(result["policy"], []).append(result["figures"])
    rows = []
    for policy, figures in by_policy.items():
        medians = {name: Spread.of(figure.get(name) for figure in figures).median for name in _COLUMNS}
        rows.append([policy, *(number(medians[name], digits) for name, (_, digits) in _COLUMNS.items())])
    return Table(["", *(title for title, _ in _COLUMNS.values())], rows)
