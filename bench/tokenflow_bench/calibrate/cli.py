"""`tokenflow calibrate`: a machine of the simulator from an engine that runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click
import uvloop

from tokenflow_bench.calibrate.machine import calibrated, engine_facts, toml_entry
from tokenflow_bench.calibrate.runs import calibrate as run_and_fit
from tokenflow_bench.costs import MACHINES, Machine
from tokenflow_bench.load.cli import first_model
from tokenflow_bench.load.driver import Client

__all__ = ["calibrate"]

_SETUPS = ("tiny", "smollm2")
_COUNT = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("url", required=False)
@click.option(
    "--setup",
    type=click.Choice(_SETUPS),
    help="Instead of URL: start that engine of `make bench-burst` here, in a clone.",
)
@click.option("--name", help="Of the machine.  [default: --like's]")
@click.option(
    "--like",
    type=click.Choice(list(MACHINES)),
    help="Where memory and copies are taken from, unless the engine or an option says them.  "
    "[default: laptop-smollm2, or that of --setup]",
)
@click.option("--model", help="By default the endpoint's first.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True)
@click.option("--kv-tokens", type=_COUNT, help="KV memory.")
@click.option("--page-tokens", type=_COUNT, help="SGLang's --page-size.")
@click.option("--max-running", type=_COUNT, help="SGLang's --max-running-requests.")
@click.option("--chunk-tokens", type=_COUNT, help="SGLang's --chunked-prefill-size.")
@click.option("--kv-token-bytes", type=_COUNT, help="Of one token's KV.")
@click.option("--host-tokens", type=_COUNT, help="Of host memory.")
@click.option("--rounds", type=_COUNT, default=3, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write it there.")
def calibrate(
    *, url: str | None, setup: str | None, out: Path | None, rounds: int, seed: int, **given: Any
) -> None:
    """Measure what passes cost on an engine, and make it a machine of `tokenflow sim --machines`.

    Short runs of many streams, while nothing else is to run there, and without prefix cache hits. Works with
    any endpoint that streams tokens one by one and counts prompt tokens (`stream_options.include_usage`);
    SGLang and TokenFlow's gateway also say what memory they have.

    \b
    Examples:
      tokenflow calibrate http://127.0.0.1:30000 --name mine --like 4090 --out mine.toml
      tokenflow calibrate --setup tiny --out tiny.toml
      tokenflow sim --machines tiny.toml --setup tiny-burst
    """  # noqa: D301  # \b keeps click from filling a paragraph
    if (url is None) == (setup is None):
        raise click.UsageError("give a URL, or --setup")
    like = MACHINES[given["like"] or f"laptop-{setup or 'smollm2'}"]
    chosen = ("kv_tokens", "page_tokens", "max_running", "chunk_tokens", "kv_token_bytes", "host_tokens")
    facts = {name: given[name] for name in chosen if given[name]}
    command = shlex.join(["tokenflow", "calibrate", *sys.argv[2:]])
    try:
        if url is None:
            machine = _of_setup(str(setup), facts.get("kv_tokens"), rounds=rounds, seed=seed)
        else:
            machine = _of_endpoint(url.rstrip("/"), like, facts, given, command, rounds=rounds, seed=seed)
    except (RuntimeError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    entry = toml_entry(machine)
    click.echo(entry)
    if out is not None:
        out.write_text(entry)
        click.echo(f"wrote {out}", err=True)


def _of_endpoint(
    url: str,
    like: Machine,
    facts: dict[str, Any],
    given: dict[str, Any],
    command: str,
    *,
    rounds: int,
    seed: int,
) -> Machine:
    facts = engine_facts(url) | facts
    client = Client(
        url=url, model=given["model"] or first_model(url, given["api_key"]), api_key=given["api_key"]
    )
    costs = uvloop.run(
        run_and_fit(
            client,
            kv_tokens=facts.get("kv_tokens", like.kv_tokens),
            max_running=facts.get("max_running", like.max_running),
            seed=seed,
            rounds=rounds,
            say=_say,
        )
    )
    return calibrated(like, costs, name=given["name"] or like.name, source=command, facts=facts)


def _of_setup(name: str, kv_tokens: int | None, *, rounds: int, seed: int) -> Machine:
    try:
        from tokenflow_bench.burst.machine import calibrated_setup
    except ModuleNotFoundError as error:
        raise click.UsageError(f"--setup works in a clone, with PYTHONPATH=bench:tests ({error})") from error
    return calibrated_setup(name, kv_tokens=kv_tokens, rounds=rounds, seed=seed, say=_say)


def _say(line: str) -> None:
    click.echo(line, err=True)
