"""What a machine must have before `tokenflow up`; `tokenflow doctor` shows the same checks as a table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from tokenflow_engine.control.endpoint import EndpointError, runtime_dir
from tokenflow_gateway.local.environment import disk_needed_bytes, engine_steps
from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.home import Home
from tokenflow_gateway.local.machine import Device, Machine
from tokenflow_gateway.local.model import embedded_dir
from tokenflow_gateway.local.source import package_source
from tokenflow_gateway.local.steps import pending

__all__ = ["Check", "Place", "check_machine", "check_ports", "require"]

GIB = 1024**3
MEMORY_NEEDED_BYTES = 7 * GIB // 2
"""The engine's three processes (measured: 3.2 GiB on a CPU, with its KV cache) and the gateway."""
LOGS_BYTES = GIB // 4
MODEL_BYTES = GIB // 2
"""The embedded model: its download, its GGUF file and its converted files."""
OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding. `advice` is what to do about it, and None where all is well."""

    name: str
    found: str
    advice: str | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an address is used and how a person moves it."""

    name: str
    host: str
    port: int
    variable: str


def check_machine(machine: Machine, *, home: Home, device: Device) -> Iterator[Check]:
    """Everything but the ports."""
    yield _linux(machine)
    yield _python(machine)
    yield _venv(machine)
    yield _writable(home)
    yield _disk(machine, home=home, device=device)
    yield _memory(machine)
    yield _link_directory()


def check_ports(machine: Machine, places: list[Place]) -> Iterator[Check]:
    """One check an address, and that no two are the same."""
    ports = [place.port for place in places]
    if len(set(ports)) < len(ports):
        variables = " and ".join(place.variable for place in places)
        yield Check(name="ports", found=f"{ports[0]} twice", advice=f"{variables} must be different ports")
    for place in places:
        free = machine.port_is_free(place.host, place.port)
        yield Check(
            name=f"{place.name} port",
            found=f"{place.host}:{place.port} is {'free' if free else 'in use'}",
            advice=None
            if free
            else f"Port {place.port} for the {place.name} is in use on {place.host}: "
            f"stop what listens there, or choose another with {place.variable}=PORT",
        )


def require(checks: Iterator[Check]) -> None:
    """Raise `SetupError` at the first check that failed."""
    for check in checks:
        if check.advice is not None:
            raise SetupError(check.advice)


def _linux(machine: Machine) -> Check:
    advice = None if machine.platform == "linux" else "TokenFlow's engine runs on Linux: use a Linux machine"
    return Check(name="system", found=machine.platform, advice=advice)


def _python(machine: Machine) -> Check:
    found = ".".join(map(str, machine.python))
    advice = None if machine.python >= OLDEST_PYTHON else f"Python {found} is too old: install 3.11 or newer"
    return Check(name="python", found=found, advice=advice)


def _venv(machine: Machine) -> Check:
    missing = [name for name in ("venv", "ensurepip") if not machine.has_module(name)]
    if not missing:
        return Check(name="venv", found="venv and ensurepip")
    advice = (
        f"Python's {' and '.join(missing)} missing: install it (Debian, Ubuntu: apt-get install python3-venv)"
    )
    return Check(name="venv", found=f"no {', no '.join(missing)}", advice=advice)


def _writable(home: Home) -> Check:
    existing = next(path for path in (home.root, *home.root.parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Check(name="home", found=str(home.root))
    advice = f"{home.root} cannot be written: name another directory in TOKENFLOW_HOME"
    return Check(name="home", found=f"{home.root}, not writable", advice=advice)


def _disk(machine: Machine, *, home: Home, device: Device) -> Check:
    missing = pending(engine_steps(home, device=device, source=package_source()), stamps=home.stamps)
    needed = LOGS_BYTES + disk_needed_bytes(device=device, missing_steps=missing)
    if not embedded_dir(home).exists():
        needed += MODEL_BYTES
    free = machine.free_bytes(home.root)
    found = f"{_gib(free)} free, {_gib(needed)} needed"
    if free >= needed:
        return Check(name="disk", found=found)
    advice = f"Not enough disk space for {home.root}: {found}. Make room, or name another TOKENFLOW_HOME"
    return Check(name="disk", found=found, advice=advice)


def _memory(machine: Machine) -> Check:
    available = machine.available_memory_bytes()
    found = f"{_gib(available)} available, {_gib(MEMORY_NEEDED_BYTES)} needed"
    enough = available >= MEMORY_NEEDED_BYTES
    return Check(
        name="memory", found=found, advice=None if enough else f"Not enough memory: {found}. End something"
    )


def _link_directory() -> Check:
    try:
        return Check(name="link", found=str(runtime_dir()))
    except (EndpointError, OSError) as error:
        return Check(name="link", found="not usable", advice=str(error))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
