"""The tables of `make bench-gateway`: for the terminal, and docs/performance.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenflow_bench.gateway.targets import PACKAGES
from tokenflow_bench.spread import Spread
from tokenflow_bench.tables import Table, number, spread
from tokenflow_gateway.config import DeliverySettings

__all__ = ["page", "text"]

OURS, NGINX, DIRECT = "TokenFlow", "nginx", "no gateway"
_HELD_KB = DeliverySettings().max_buffered_bytes / 1024
_READ_KB = 16.0
"""What a read may bring beyond that, before the engine is not read any further."""
_KEPT = re.compile(r"<!-- by hand -->.*?<!-- end -->\n", re.DOTALL)


@dataclass(frozen=True)
class _Row:
    title: str
    scenario: str
    figure: str
    digits: int = 1


_ROWS = (
    _Row("CPU per chunk, saturated, us", "saturated", "saturated_us"),
    _Row("CPU per chunk, 100 streams of 50/s, us", "paced100", "paced100_us"),
    _Row("CPU per chunk, 500 streams of 50/s, us", "paced500", "paced500_us"),
    _Row("500 streams: time in transit P99, ms", "paced500", "paced500_transit_p99_ms", 2),
    _Row("500 streams: stretch (1: keeps up)", "paced500", "paced500_stretch", 3),
    _Row("time to first token P50, ms", "first_token", "ttft_p50_ms", 2),
    _Row("time to first token P99, ms", "first_token", "ttft_p99_ms", 2),
    _Row("CPU per request, stream of one chunk, us", "requests", "request_us", 0),
    _Row("memory per open idle stream, kB", "memory", "stream_kb"),
    _Row("client stops reading: engine's bytes taken in, kB", "stalled_client", "stalled_taken_kb", 0),
    _Row("client stops reading: bytes that wait for it, kB", "stalled_client", "stalled_held_kb", 0),
    _Row("client stops reading: growth of the process, kB", "stalled_client", "stalled_grown_kb", 0),
    _Row("client leaves before the first event: engine sees it, ms", "aborts", "abort_before_ms", 2),
    _Row("client leaves after the first event: engine sees it, ms", "aborts", "abort_after_ms", 2),
)


@dataclass(frozen=True)
class _Target:
    """A row of the goals: `of` figures of this run by gateway makes the value."""

    title: str
    figure: str
    most: float
    ambition: float
    unit: str = ""
    against: str | None = None
    """Divided by this gateway's figure, or less it for times that the way without a gateway takes too."""


_TARGETS = (
    _Target("CPU per chunk, saturated", "saturated_us", 2.2, 1.3, " x nginx", NGINX),
    _Target("CPU per chunk, 100 streams of 50/s", "paced100_us", 1.5, 1.15, " x nginx", NGINX),
    _Target("added time to first token P50", "ttft_p50_ms", 0.8, 0.4, " ms", DIRECT),
    _Target("added time to first token P99", "ttft_p99_ms", 1.5, 0.6, " ms", DIRECT),
    _Target("500 streams of 50/s: stretch", "paced500_stretch", 1.01, 1.001),
    _Target("500 streams of 50/s: transit P99", "paced500_transit_p99_ms", 5.0, 1.5, " ms"),
    _Target("CPU per request", "request_us", 250, 120, " us"),
    _Target("memory per open idle stream", "stream_kb", 30, 15, " kB"),
    _Target(
        f"client stops reading: of the configured {_HELD_KB:g} kB (and a read)",
        "stalled_held_kb",
        _HELD_KB + _READ_KB,
        _HELD_KB + _READ_KB,
        " kB",
    ),
    _Target("client leaves before the first event", "abort_before_ms", 10, 2, " ms"),
    _Target("client leaves after it", "abort_after_ms", 10, 2, " ms"),
    _Target("LiteLLM's CPU per saturated chunk, of ours", "saturated_us", 30, 50, " x", "LiteLLM"),
)


def text(document: Mapping[str, Any]) -> str:
    """Both tables for a terminal."""
    return f"{_targets(document).text()}\n\n{_comparison(document).text()}\n"


def page(document: Mapping[str, Any], before: str) -> str:
    """docs/performance.md; what stands between its marks, written by hand, stays."""
    kept = _KEPT.search(before)
    machine, versions = document["machine"], document["versions"]
    missing = "".join(
        f"\n- {name} is missing: {' '.join(why.split())}" for name, why in document["missing"].items()
    )
    took_min, load = document["took_s"] / 60, machine["load_before"]
    late_ms = max(_all(document, "paced500_driver_late_ms"), default=0.0)
    return f"""# What the gateway costs

Written by `{document["command"]}` on {document["at"]} in {took_min:.1f} minutes.

One core for the gateway, another for the mock engine, the clients and the engine's end of the link. Chunks
of 250 to 300 bytes, as SGLang sends them; 450 with the usage that TokenFlow asks for and takes out again. CPU
is that of all the gateway's threads, by the system's accounts. The gateways take turns; medians, and the
range over the rounds. Everything is on in TokenFlow: a key is asked for, its tenant's limits are counted (and
never reached), metering, the record of usage, the kernel's view of clients, reports to a linked engine,
metrics; the log has warnings only. LiteLLM asks for a key, too; the others do not. *Saturated*: 100 streams,
a chunk is sent once the client has the one before.

- machine: {machine["cpu"]}, {machine["cores"]} cores, Linux {machine["kernel"]}, load {load:.1f}
- commit {versions["commit"]}, Python {versions["python"]}, uvloop {versions["uvloop"]}, {_peers()}
- the driver itself was at most {late_ms:.0f} ms late on its schedule{missing}

## Goals

{_targets(document).markdown()}

## Beside others

{_comparison(document).markdown()}

Bytes taken in from the engine for a client that does not read include what both kernels buffer. Those that
wait for it are by TokenFlow's own count (`tokenflow_held_bytes`).

{kept[0] if kept else ""}"""


def _peers() -> str:
    return ", ".join(packages[0].replace("==", " ") for packages in PACKAGES.values())


def _targets(document: Mapping[str, Any]) -> Table:
    rows = []
    for target in _TARGETS:
        value = _value(document, target)
        more_is_better = target.against == "LiteLLM"
        reached = "-"
        if value is not None:
            good = value >= target.most if more_is_better else value <= target.most
            best = value >= target.ambition if more_is_better else value <= target.ambition
            reached = "ambition" if best else "yes" if good else "no"
        sign = ">=" if more_is_better else "<="
        rows.append(
            [
                target.title,
                f"{sign} {target.most:g}{target.unit}",
                f"{sign} {target.ambition:g}{target.unit}",
                "-" if value is None else f"{value:,.2f}{target.unit}",
                reached,
            ]
        )
    return Table(["", "to reach", "ambition", "measured", "reached"], rows)


def _value(document: Mapping[str, Any], target: _Target) -> float | None:
    ours = _spread(document, OURS, target.figure).median
    if ours is None or target.against is None:
        return ours
    other = _spread(document, target.against, target.figure).median
    if other is None:
        return None
    if target.against == DIRECT:
        return ours - other
    return other / ours if target.against == "LiteLLM" else ours / other


def _comparison(document: Mapping[str, Any]) -> Table:
    names = list(document["results"])
    rows = [
        [row.title, *(spread(_spread(document, name, row.figure), row.digits) for name in names)]
        for row in _ROWS
    ]
    rows.append(["chunks per second, saturated", *(_rate(document, name) for name in names)])
    return Table(["", *names], rows)


def _rate(document: Mapping[str, Any], name: str) -> str:
    return number(_spread(document, name, "saturated_per_s").median)


def _spread(document: Mapping[str, Any], name: str, figure: str) -> Spread:
    rounds = [
        figures[figure]
        for scenario in document["results"].get(name, {}).values()
        for figures in scenario
        if figure in figures
    ]
    return Spread.of(None if name == DIRECT and figure.endswith("_us") else value for value in rounds)


def _all(document: Mapping[str, Any], figure: str) -> list[float]:
    return [
        figures[figure]
        for scenarios in document["results"].values()
        for rounds in scenarios.values()
        for figures in rounds
        if figure in figures
    ]
