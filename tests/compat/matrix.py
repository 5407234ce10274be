"""``docs/compatibility.md`` from what a run found: ``python -m compat.matrix RESULTS.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compat.clients import CLIENTS
from compat.features import ALL_FEATURES
from tokenflow_bench.environment import describe

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
INTRODUCTION = """\
# Compatibility

Written by `make compat`, which runs the clients in their own processes and environments; not to be edited.
`yes`: the check passed, `-`: the client has no such thing (below), `FAILS`: it did not pass.
The columns of Open WebUI are the path that its server and its page take, in our own words; all others are the
client itself. What curl prints is taken apart by a script.
"""
REPLAYED = """
## Through the gateway, on recorded bytes

The engine is a replay of SGLang's own bytes and of faults made of them. But for errors, which the gateway has
to tell better than the engine, what the client shows must be what it shows without the gateway, and the
engine must get the same request, byte for byte in each field of the client's (images among them).
"""
REAL = """
## Through the gateway, on the real engine

SGLang with the plugin and SmolLM2-135M-Instruct, on the CPU. This model takes no images: there, what has to
be seen is the engine's own refusal.
"""
BARE = """
## Without the gateway

The same clients on bytes that the gateway never sends, and on faults as the engine shows them: what they make
of it is the reason why it does not. It is also the negative control: where a client is harmed or misled, the
checks of the tables above have to fail.
"""
LOAD = """
## Load

An independent program that measures engines, through the gateway.
"""

ENGINE = "engine"
"""What the results call the real engine, beside the clients."""

Results = Mapping[str, Mapping[str, Any]]


def document(results: Results, run: Mapping[str, Any]) -> str:
    """All of the page; `run`: see `describe`. Raises `ValueError` for results that lack a client."""
    missing = [client.name for client in CLIENTS if client.name not in results]
    if missing:
        raise ValueError(f"no results of {', '.join(missing)}: run all of `make compat`")
    parts = [INTRODUCTION, made(results, run), *versions(results), REPLAYED, *table(results, "replayed")]
    parts += [REAL, *table(results, "real"), *cannot(), BARE, *grouped(results, "bare"), LOAD, *load(results)]
    return "\n".join(parts) + "\n"


def made(results: Results, run: Mapping[str, Any]) -> str:
    """When, and of what."""
    engine = results.get(ENGINE, {}).get("version", "no real engine")
    return f"Last run on {run['at']}, at commit {run['versions']['commit']}, with {engine}.\n"


def versions(results: Results) -> Iterator[str]:
    yield "| client | version |\n|---|---|"
    for client in CLIENTS:
        yield f"| {client.name} | {results[client.name]['version']} |"


def table(results: Results, name: str) -> Iterator[str]:
    """A row for each feature that anybody was asked for."""
    yield "| | " + " | ".join(client.name for client in CLIENTS) + " |"
    yield "|---|" + "---|" * len(CLIENTS)
    cells = {client.name: results[client.name]["tables"].get(name, {}) for client in CLIENTS}
    for feature in ALL_FEATURES:
        if any(feature.name in found for found in cells.values()):
            row = (
                "-" if feature.name in client.cannot else cells[client.name].get(feature.name, "not run")
                for client in CLIENTS
            )
            yield f"| {feature.title} | {' | '.join(row)} |"


def cannot() -> Iterator[str]:
    """Why there is a dash."""
    titles = {feature.name: feature.title for feature in ALL_FEATURES}
    yield "\nWhat the dashes stand for:\n"
    for client in CLIENTS:
        reasons: dict[str, list[str]] = {}
        for name, reason in client.cannot.items():
            reasons.setdefault(reason, []).append(titles[name])
        if reasons:
            said = "; ".join(f"{reason} ({', '.join(asked)})" for reason, asked in reasons.items())
            yield f"- {client.name} {said}."


def grouped(results: Results, name: str) -> Iterator[str]:
    """What was found, row by row, with the clients it was found with."""
    rows: dict[str, dict[str, list[str]]] = {}
    for client in CLIENTS:
        for row, found in results[client.name]["tables"].get(name, {}).items():
            rows.setdefault(row, {}).setdefault(found, []).append(client.name)
    yield "| sent | what the client makes of it |\n|---|---|"
    for row, groups in rows.items():
        said = (f"**{found}**: {', '.join(names)}" for found, names in groups.items())
        yield f"| {row} | {'; '.join(said)} |"


def load(results: Results) -> Iterator[str]:
    yield "| client | version | engine |\n|---|---|---|"
    for name, shown in results.items():
        for row in shown["tables"].get("load", {}):
            yield f"| {name} | {shown['version']} | {row} |"


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    DOCUMENT.write_text(document(found, describe(seed=0, command=["make", "compat"], browsers=False)))
