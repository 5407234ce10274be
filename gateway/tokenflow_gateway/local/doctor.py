"""`tokenflow doctor`: all checks as a table."""

from __future__ import annotations

from collections.abc import Iterator

from tokenflow_gateway.local.checks import Check, Place, check_machine, check_ports
from tokenflow_gateway.local.environment import find_engine_python
from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.home import Home
from tokenflow_gateway.local.machine import Device, Machine
from tokenflow_gateway.local.model import EMBEDDED_MODEL, problem_of

__all__ = ["examine", "table"]


def examine(machine: Machine, *, home: Home, device: Device, places: list[Place]) -> list[Check]:
    """Every check of `tokenflow up`, and what is installed already."""
    found = [*check_machine(machine, home=home, device=device), *check_ports(machine, places)]
    return [*found, *_state(machine, home=home, device=device)]


def _state(machine: Machine, *, home: Home, device: Device) -> Iterator[Check]:
    """What never blocks: `up` makes what is missing."""
    gpus = ", ".join(machine.gpu_names()) or "no GPU"
    yield Check(name="device", found=f"{device} ({gpus})")
    yield Check(name="engine", found=_engine(home))
    yield Check(name="model", found=f"{EMBEDDED_MODEL}: {problem_of(home) or 'complete'}")


def _engine(home: Home) -> str:
    try:
        return str(find_engine_python(home))
    except SetupError:
        return "not installed yet (tokenflow up does it)"


def table(checks: list[Check]) -> str:
    """One line a check, what to do below those that failed."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{'ok' if check.advice is None else 'PROBLEM':<8} {check.name:<{width}}  {check.found}")
        if check.advice is not None:
            lines.append(f"{'':<8} {'':<{width}}  -> {check.advice}")
    return "\n".join(lines)
