"""A calibrated machine: its TOML entry, and what the engine says of its own memory."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from tokenflow_bench.calibrate.fit import Costs
from tokenflow_bench.costs import Machine

__all__ = ["calibrated", "engine_facts", "toml_entry"]

_ASK_S = 10.0
_SERVER_INFO = {
    "kv_tokens": ("max_total_num_tokens", "max_total_tokens"),
    "page_tokens": ("page_size",),
    "max_running": ("max_running_requests",),
    "chunk_tokens": ("chunked_prefill_size",),
}
"""Fields of `Machine`, and their names in SGLang's `/server_info`."""


def engine_facts(url: str) -> dict[str, int]:
    """Fields of `Machine` as SGLang itself or TokenFlow's gateway at `url` says them; empty for others."""
    info = _json(f"{url}/server_info")
    if info:
        found = {field: _first(info, names) for field, names in _SERVER_INFO.items()}
        return {field: value for field, value in found.items() if value}
    engines = (_json(f"{url}/admin/engines") or {}).get("engines", [])
    known = [int(engine["kv_tokens"]) for engine in engines if engine.get("kv_tokens")]
    return {"kv_tokens": known[0]} if len(known) == 1 else {}


def calibrated(like: Machine, costs: Costs, *, name: str, source: str, facts: Mapping[str, Any]) -> Machine:
    """`like` with the costs that were fitted and the `facts` that are known; the rest remains."""
    return replace(
        like,
        name=name,
        step_base_s=costs.step_base_s,
        step_per_stream_s=costs.step_per_stream_s,
        step_per_context_token_s=costs.step_per_context_token_s,
        prefill_base_s=costs.prefill_base_s,
        prefill_per_token_s=costs.prefill_per_token_s,
        late_tokens=costs.is_late,
        quality=f"{costs.words()}; copies as {like.name}",
        source=source,
        **facts,
    )


def toml_entry(machine: Machine) -> str:
    """As `costs.read_machines` reads it."""
    lines = [f"[{json.dumps(machine.name)}]"]
    for field in fields(machine):
        value = getattr(machine, field.name)
        if field.name != "name" and value != "":
            lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _first(info: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first that is a positive number, here or in the first of the engine's internal states."""
    states = info.get("internal_states") or [{}]
    values = [place.get(name) for name in names for place in (info, states[0])]
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _json(url: str) -> Any:
    """None where there is no such page."""
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S) as answer:  # noqa: S310 - the user's own endpoint
            return json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        return None
    except (urllib.error.URLError, ValueError):
        return None
