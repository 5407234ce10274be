"""`python -m tokenflow_bench load`: readers on sockets against any OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import random
import sys
import time
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import uvloop

from tokenflow_bench.load.asks import asks_of, scanning
from tokenflow_bench.load.driver import Ask, Client, Drive, PauseStyle, drive
from tokenflow_bench.load.summary import Summary, summarise
from tokenflow_bench.people import fixed_rates, lognormal_rates
from tokenflow_bench.tables import Table, number
from tokenflow_bench.trace import read_trace
from tokenflow_bench.workload import (
    Workload,
    burst_arrivals,
    gamma_arrivals,
    normal_lengths,
    poisson_arrivals,
)

__all__ = ["load", "show"]

MAX_LAG_MS = 20.0
"""A tenth of the stall that a stall-free stream may have."""
_UNTRUSTED = 3
"""Exit code of a run whose driver was late."""


@click.command()
@click.argument("url")
@click.option("--model", help="By default the first one of /v1/models.")
@click.option("--route", type=click.Choice(["chat", "completions"]), default="chat", show_default=True)
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Sent as bearer token.", show_envvar=True)
@click.option(
    "--arrivals",
    type=click.Choice(["burst", "poisson", "gamma", "trace"]),
    default="burst",
    show_default=True,
    help="Gamma is burstier than Poisson, as BurstGPT's traces are.",
)
@click.option("--streams", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--per-s", type=float, default=2.0, show_default=True, help="Arrivals per second.")
@click.option("--shape", type=float, default=0.25, show_default=True, help="Of the gamma arrivals.")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="CSV: time, prompt tokens, output tokens. Lengths are the trace's, too.",
)
@click.option("--faster", type=float, default=1.0, show_default=True, help="Replay the trace so much faster.")
@click.option("--prompt", type=int, default=60, show_default=True, help="Mean tokens of a prompt.")
@click.option("--output", type=int, default=200, show_default=True, help="Mean tokens asked for.")
@click.option("--length-spread", type=float, default=0.25, show_default=True, help="Deviation / mean.")
@click.option(
    "--people",
    type=click.Choice(["fixed", "lognormal", "scanning", "machine"]),
    default="lognormal",
    show_default=True,
    help="scanning: they read, scan and pause.",
)
@click.option("--rate", type=float, default=5.3, show_default=True, help="Tokens a person reads per second.")
@click.option("--declare/--no-declare", default=True, show_default=True, help="Tell the gateway the rate.")
@click.option("--report-every", type=float, help="Seconds between progress reports to TokenFlow's gateway.")
@click.option(
    "--pauses",
    type=click.Choice(["report", "stop", "silent"]),
    default="silent",
    show_default=True,
    help="Those who pause say so, stop reading the socket, or leave no trace.",
)
@click.option(
    "--horizon", type=float, default=300.0, show_default=True, help="Seconds until all are given up."
)
@click.option("--ttft-target", type=float, default=1.0, show_default=True, help="Of a good stream, seconds.")
@click.option("--max-lag-ms", type=float, default=MAX_LAG_MS, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option("--log", "log_path", type=click.Path(path_type=Path), help="Write a line for each stream here.")
def load(**given: Any) -> None:
    """Drive URL with an open loop of readers and show what it was like for them.

    Latency counts from each request's scheduled time. Exit code 3, and no claim, if the driver was late.
    """
    work = _workload(given)
    asks = _with_people(asks_of(work, seed=given["seed"], mark=f"{time.time_ns() % 1_000_000}-"), given)
    client = _client(given)
    run = uvloop.run(drive(client, asks, horizon_s=given["horizon"], say=click.echo))
    window_s = max(log.end_s or given["horizon"] for log in run.logs)
    summary = summarise(
        run.logs, horizon_s=given["horizon"], window_s=window_s, target_s=given["ttft_target"]
    )
    objection = run.overhead.objection(max_lag_ms=given["max_lag_ms"])
    click.echo(f"\n{show(summary, run)}")
    _keep(given, summary, run, objection)
    if objection:
        click.echo(f"\nNOT TO BE USED: {objection}", err=True)
        sys.exit(_UNTRUSTED)


def show(summary: Summary, run: Drive) -> str:
    """As a table."""
    seconds = [
        ("time to first token, mean, s", summary.ttft_mean_s),
        ("p50", summary.ttft_p50_s),
        ("p99", summary.ttft_p99_s),
        ("wait (TTFT + stall), mean, s", summary.wait_mean_s),
        ("p99", summary.wait_p99_s),
    ]
    rates = [
        ("tokens per second", summary.raw_tokens_per_s),
        ("read by people, per second", summary.consumed_tokens_per_s),
        ("effective (paper), per second", summary.effective_tokens_per_s),
        ("QoS (paper), per second", summary.qos),
    ]
    rows = [["streams, and whole answers", f"{summary.streams}, {summary.whole}"]]
    rows += [[words, number(value, 2)] for words, value in seconds]
    rows += [["stall-free, %", number(100 * summary.stall_free_share)]]
    rows += [["good, %", number(100 * summary.good_share)]]
    rows += [[words, number(value, 1)] for words, value in rates]
    rows += [["QoE (Andes), mean", number(summary.qoe_mean, 3)]]
    rows += [["text ready, mean, s", number(summary.lead_mean_s, 2)]]
    rows += [["driver: lag p99, ms", number(run.overhead.lag_p99_ms, 1)]]
    rows += [["driver: CPU, % of a core", number(100 * run.overhead.cpu_share)]]
    rows += [["driver: sent late, p99, ms", number(run.overhead.late_p99_ms, 1)]]
    errors = {log.error for log in run.logs if log.error}
    rows += [["error", error] for error in sorted(errors)[:5]]
    return Table(["", ""], rows).text()


def _workload(given: dict[str, Any]) -> Workload:
    rng = np.random.default_rng(given["seed"])
    count = given["streams"]
    if given["arrivals"] == "trace":
        if given["trace"] is None:
            raise click.UsageError("--arrivals trace needs --trace")
        arrived, prompt, output = read_trace(given["trace"], limit=count, faster=given["faster"])
    else:
        arrived = {
            "burst": lambda: burst_arrivals(count),
            "poisson": lambda: poisson_arrivals(rng, count, per_s=given["per_s"]),
            "gamma": lambda: gamma_arrivals(rng, count, per_s=given["per_s"], shape=given["shape"]),
        }[given["arrivals"]]()
        spread = given["length_spread"]
        prompt = normal_lengths(rng, count, mean=given["prompt"], spread=spread)
        output = normal_lengths(rng, count, mean=given["output"], spread=spread)
    if given["people"] == "fixed":
        rates = fixed_rates(len(arrived), rate=given["rate"])
    else:
        rates = lognormal_rates(rng, len(arrived), median=given["rate"])
    work = Workload.of(arrived, prompt, output, rates)
    if given["people"] == "machine":
        return replace(work, machine=np.ones(len(work), dtype=bool))
    return work


def _with_people(asks: list[Ask], given: dict[str, Any]) -> list[Ask]:
    if given["people"] != "scanning":
        return asks
    rng = random.Random(given["seed"])  # noqa: S311 - a workload, not a secret
    return [replace(ask, person=scanning(ask.person.rate, rng)) for ask in asks]


def _client(given: dict[str, Any]) -> Client:
    pauses: PauseStyle = given["pauses"]
    return Client(
        url=given["url"],
        model=given["model"] or _first_model(given["url"], given["api_key"]),
        route="/v1/chat/completions" if given["route"] == "chat" else "/v1/completions",
        api_key=given["api_key"],
        declares_rate=given["declare"],
        report_every_s=given["report_every"],
        pauses=pauses,
    )


def _first_model(url: str, api_key: str | None) -> str:
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{base}/v1/models", headers=headers)  # noqa: S310 - the user's own
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - the user's own
        return str(json.load(answer)["data"][0]["id"])


def _keep(given: dict[str, Any], summary: Summary, run: Drive, objection: str | None) -> None:
    if given["json_path"]:
        document = {"figures": asdict(summary), "driver": asdict(run.overhead), "objection": objection}
        given["json_path"].write_text(json.dumps(document, indent=1) + "\n")
    if given["log_path"]:
        given["log_path"].write_text("".join(f"{json.dumps(log.document())}\n" for log in run.logs))
