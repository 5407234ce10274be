"""`tokenflow bench`: readers on sockets against any OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop

from tokenflow_bench import environment
from tokenflow_bench.load.asks import asks_of
from tokenflow_bench.load.driver import Client, Drive, drive
from tokenflow_bench.load.http import Server
from tokenflow_bench.load.plan import ARRIVALS, LENGTHS, PEOPLE, Plan, PlanError
from tokenflow_bench.load.show import show
from tokenflow_bench.load.summary import LoadSummary, summarise
from tokenflow_bench.people import READING_RATE, READING_SIGMA, SPEECH_RATE
from tokenflow_bench.sla import Sla, parse_sla
from tokenflow_bench.traces import FORMATS, TraceError
from tokenflow_bench.workload import BURSTGPT_SHAPE

__all__ = ["MAX_LAG_MS", "bench", "first_model"]

MAX_LAG_MS = 20.0
"""A tenth of the stall that a stall-free stream may have."""
_NOTHING, _UNTRUSTED = 1, 3
"""Exit codes: no answer came to its end; the driver was late."""
_ASK_S = 10.0
_POSITIVE = click.FloatRange(min=0, min_open=True)
_ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

Command = TypeVar("Command", bound=Callable[..., Any])


def _classes(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[Sla, ...]:
    try:
        classes = tuple(parse_sla(value) for value in values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if len({sla.name for sla in classes}) < len(classes):
        raise click.BadParameter("two classes of one name")
    return classes


def _url(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        Server.at(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several at once, in this order in the help."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_arrival_options = _options(
    click.option(
        "--arrivals",
        type=click.Choice(ARRIVALS),
        default="burst",
        show_default=True,
        help="All at once, Poisson, Gamma (burstier, as in BurstGPT), or a trace's own times.",
    ),
    click.option(
        "--streams",
        type=click.IntRange(min=1),
        default=50,
        show_default=True,
        help="Requests; of a trace at most so many.",
    ),
    click.option("--per-s", type=_POSITIVE, default=2.0, show_default=True, help="Mean arrivals per second."),
    click.option(
        "--shape", type=_POSITIVE, default=BURSTGPT_SHAPE, show_default=True, help="Of the Gamma arrivals."
    ),
    click.option(
        "--trace",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help=f"Recorded traffic ({', '.join(FORMATS)}; .gz too): its times with --arrivals trace, its "
        "lengths then and with --lengths trace.",
    ),
    click.option(
        "--begin", "begin_s", type=float, default=0.0, show_default=True, help="Of a window of the trace, s."
    ),
    click.option(
        "--end", "end_s", type=float, default=float("inf"), show_default=True, help="Of that window, s."
    ),
    click.option(
        "--faster", type=_POSITIVE, default=1.0, show_default=True, help="Replay the trace so much faster."
    ),
    click.option(
        "--length-scale", type=_POSITIVE, default=1.0, show_default=True, help="Times the trace's lengths."
    ),
)
_length_options = _options(
    click.option(
        "--lengths",
        type=click.Choice(LENGTHS),
        help="By default the trace's with --arrivals trace, else normal.",
    ),
    click.option("--prompt", type=_POSITIVE, default=60, show_default=True, help="Mean tokens of a prompt."),
    click.option("--output", type=_POSITIVE, default=200, show_default=True, help="Mean tokens asked for."),
    click.option(
        "--length-spread", type=float, default=0.25, show_default=True, help="Normal: deviation / mean."
    ),
    click.option(
        "--most-tokens",
        type=click.IntRange(min=1),
        default=2048,
        show_default=True,
        help="Longer ones are cut.",
    ),
    click.option(
        "--ignore-eos", is_flag=True, help="Make the engine generate all it is asked for (SGLang, vLLM)."
    ),
)
_people_options = _options(
    click.option(
        "--people",
        type=click.Choice(PEOPLE),
        default="lognormal",
        show_default=True,
        help="One rate; a rate for each; who read, scan and pause; who listen; programs.",
    ),
    click.option(
        "--rate",
        type=_POSITIVE,
        help=f"Tokens a second, the median.  [default: {READING_RATE} read, {SPEECH_RATE} heard]",
    ),
    click.option(
        "--sigma", type=float, default=READING_SIGMA, show_default=True, help="Of the rates' logarithms."
    ),
    click.option(
        "--machines",
        type=click.FloatRange(0, 1),
        default=0.0,
        show_default=True,
        help="Share of requests by programs.",
    ),
    click.option(
        "--sla",
        "classes",
        multiple=True,
        callback=_classes,
        metavar="NAME:SHARE[,weight=][,ttft=][,rate=][,park=]",
        help="A class of service; give several.",
    ),
    click.option(
        "--declare/--no-declare", default=True, show_default=True, help="Tell the gateway the rate."
    ),
    click.option(
        "--report-every", type=_POSITIVE, help="Seconds between progress reports to TokenFlow's gateway."
    ),
    click.option(
        "--pauses",
        type=click.Choice(["report", "stop", "silent"]),
        default="silent",
        show_default=True,
        help="Those who pause say so, stop reading the socket, or leave no trace.",
    ),
)
_run_options = _options(
    click.option("--model", help="By default the first one of /v1/models."),
    click.option("--route", type=click.Choice(list(_ROUTES)), default="chat", show_default=True),
    click.option("--api-key", envvar="OPENAI_API_KEY", help="Sent as bearer token.", show_envvar=True),
    click.option(
        "--horizon", type=_POSITIVE, default=300.0, show_default=True, help="Seconds until all are given up."
    ),
    click.option("--ttft-target", type=_POSITIVE, help="Of a good stream, s.  [default: its class's, or 1]"),
    click.option(
        "--max-lag-ms",
        type=float,
        default=MAX_LAG_MS,
        show_default=True,
        help="A later driver makes no claim.",
    ),
    click.option(
        "--seed", default=1, show_default=True, help="The same one makes the same requests and readers."
    ),
    click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here."),
    click.option(
        "--log", "log_path", type=click.Path(path_type=Path), help="Write a line for each stream here."
    ),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("url", callback=_url)
@_arrival_options
@_length_options
@_people_options
@_run_options
def bench(**given: Any) -> None:
    """Drive URL with an open loop of readers on sockets and show what it was like for them.

    Requests leave on time however late the answers are, and latency counts from the scheduled time. Exit code
    3, and no claim, if the driver itself was late; 1 if no answer came to its end.

    \b
    Examples:
      tokenflow bench http://127.0.0.1:8080
      tokenflow bench http://127.0.0.1:8080 --arrivals gamma --per-s 4 --streams 200 --people scanning \\
          --report-every 1 --pauses report
      tokenflow bench http://127.0.0.1:8080 --arrivals trace --trace azure.csv --end 600 --faster 2
      tokenflow bench http://127.0.0.1:8080 --sla premium:1,weight=4,ttft=0.5 --sla economy:3,ttft=5
    """  # noqa: D301  # \b keeps click from filling a paragraph
    if given["pauses"] == "report" and not given["report_every"]:
        raise click.UsageError("--pauses report needs --report-every SECONDS")
    plan = Plan(**{field.name: given[field.name] for field in fields(Plan)})
    try:
        work = plan.workload()
    except PlanError as error:
        raise click.UsageError(str(error)) from None
    except TraceError as error:
        raise click.ClickException(str(error)) from None
    mark = f"{time.time_ns() % 1_000_000}-"
    client = _client(given)
    document = environment.describe(seed=plan.seed, command=_command(sys.argv[1:]), browsers=False)
    run = uvloop.run(
        drive(client, asks_of(work, seed=plan.seed, mark=mark), horizon_s=given["horizon"], say=click.echo)
    )
    window_s = max(log.end_s or given["horizon"] for log in run.logs)
    summary = summarise(
        run.logs, horizon_s=given["horizon"], window_s=window_s, target_s=given["ttft_target"]
    )
    objection = run.overhead.objection(max_lag_ms=given["max_lag_ms"])
    click.echo(f"\n{show(summary, run)}")
    _keep(given, document | _results(plan, client, mark, window_s, run, summary, objection), run)
    if given["report_every"] and not any(log.stream for log in run.logs):
        click.echo(
            "\nNothing was reported: the endpoint named no streams, so it is no TokenFlow gateway.", err=True
        )
    if not summary.figures.whole:
        click.echo("\nNo answer came to its end.", err=True)
        sys.exit(_NOTHING)
    if objection:
        click.echo(f"\nNOT TO BE USED: {objection}", err=True)
        sys.exit(_UNTRUSTED)


def _client(given: dict[str, Any]) -> Client:
    url = given["url"]
    return Client(
        url=url,
        model=given["model"] or first_model(url, given["api_key"]),
        route=_ROUTES[given["route"]],  # type: ignore[arg-type]
        api_key=given["api_key"],
        declares_rate=given["declare"],
        people="voice" if given["people"] == "listening" else "human",
        report_every_s=given["report_every"],
        pauses=given["pauses"],
        body={"ignore_eos": True} if given["ignore_eos"] else {},
    )


def first_model(url: str, api_key: str | None) -> str:
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{base}/v1/models", headers=headers)  # noqa: S310 - the user's own
    try:
        with urllib.request.urlopen(request, timeout=_ASK_S) as answer:  # noqa: S310 - the user's own
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise click.ClickException(
            f"{base}/v1/models names no model ({error}). Is it running? Or give --model."
        ) from None


def _results(
    plan: Plan,
    client: Client,
    mark: str,
    window_s: float,
    run: Drive,
    summary: LoadSummary,
    objection: str | None,
) -> dict[str, Any]:
    return {
        "plan": asdict(plan) | {"trace": plan.trace and str(plan.trace)},
        "client": {name: value for name, value in asdict(client).items() if name != "api_key"},
        "mark": mark,
        "horizon_s": run.horizon_s,
        "window_s": window_s,
        "figures": summary.document(),
        "driver": run.overhead.document(),
        "reports": {str(status): count for status, count in run.report_statuses.items()},
        "errors": sorted({log.error for log in run.logs if log.error}),
        "objection": objection,
    }


def _keep(given: dict[str, Any], document: dict[str, Any], run: Drive) -> None:
    if given["json_path"]:
        given["json_path"].write_text(json.dumps(_finite(document), indent=1, allow_nan=False) + "\n")
    if given["log_path"]:
        given["log_path"].write_text("".join(f"{json.dumps(log.document())}\n" for log in run.logs))


def _finite(value: Any) -> Any:
    """With null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _command(arguments: Sequence[str]) -> list[str]:
    """As it can be typed again, but for the key."""
    shown, hides = [], False
    for argument in arguments:
        shown.append("..." if hides else "--api-key=..." if argument.startswith("--api-key=") else argument)
        hides = argument == "--api-key"
    return ["tokenflow", shlex.join(shown)]
