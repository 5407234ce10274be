"""`tokenflow up`: install what is missing, start engine and gateway, watch over them, end them together."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tokenflow_gateway.local.checks import Place, check_machine, check_ports, require
from tokenflow_gateway.local.engine_command import EngineCommand
from tokenflow_gateway.local.home import Home
from tokenflow_gateway.local.install import install
from tokenflow_gateway.local.logfile import open_log
from tokenflow_gateway.local.machine import Device, Machine
from tokenflow_gateway.local.model import EMBEDDED_MODEL, resolve
from tokenflow_gateway.local.probe import first_model, wants_key
from tokenflow_gateway.local.process import run_logged
from tokenflow_gateway.local.progress import Progress
from tokenflow_gateway.local.service import Service
from tokenflow_gateway.local.supervise import stop_all, wait_until_ready, watch

__all__ = ["Up", "UpOptions"]

GATEWAY_GRACE_S = 4.0
ENGINE_GRACE_S: dict[Device, float] = {
    "cpu": 3.0,  # nothing to give back
    "cuda": 7.0,  # it looks for a stop every 5 s, then frees the GPU's memory
}


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What a person may choose."""

    model: str
    host: str
    port: int
    engine_port: int
    config_file: Path | None


class Up:
    """One run of `tokenflow up`, in the foreground until Ctrl-C, SIGTERM or a failure."""

    def __init__(self, options: UpOptions, *, home: Home, machine: Machine, device: Device) -> None:
        self._options = options
        self._home = home
        self._machine = machine
        self._device = device

    def prepare(self) -> None:
        """Check the machine and install; start nothing. Raises `SetupError`."""
        _obey_signals()
        require(check_machine(self._machine, home=self._home, device=self._device))
        self._install(further_stages=0)

    def run(self) -> None:
        """Everything, until a person ends it (returns) or it cannot go on (raises `SetupError`)."""
        _obey_signals()
        resolve(self._options.model, home=self._home)  # a wrong name is said before a long installation
        require(check_machine(self._machine, home=self._home, device=self._device))
        require(check_ports(self._machine, self._places()))
        python, progress = self._install(further_stages=1)
        require(check_ports(self._machine, self._places()))
        self._serve(self._engine(python), self._gateway(), progress=progress)

    def _places(self) -> list[Place]:
        options = self._options
        return [
            Place(name="gateway", host=options.host, port=options.port, variable="TOKENFLOW_PORT"),
            Place(
                name="engine", host="127.0.0.1", port=options.engine_port, variable="TOKENFLOW_ENGINE_PORT"
            ),
        ]

    def _install(self, *, further_stages: int) -> tuple[Path, Progress]:
        return install(
            self._home,
            device=self._device,
            model=self._options.model,
            run=run_logged,
            further_stages=further_stages,
        )

    def _engine(self, python: Path) -> Service:
        options = self._options
        command = EngineCommand(
            python=python,
            model=resolve(options.model, home=self._home),
            served_name=EMBEDDED_MODEL if options.model == EMBEDDED_MODEL else None,
            host="127.0.0.1",
            port=options.engine_port,
            device=self._device,
            available_memory_bytes=self._machine.available_memory_bytes(),
        )
        return Service(
            name="engine",
            argv=command.argv(),
            environ=command.environ(os.environ),
            log=self._new_log(f"engine-{options.engine_port}.log"),
            ready_url=f"{self._engine_url}/ready",
            grace_s=ENGINE_GRACE_S[self._device],
        )

    def _gateway(self) -> Service:
        options = self._options
        argv = [sys.executable, "-m", "tokenflow_gateway.cli", "serve", "--engine", self._engine_url]
        argv += ["--host", options.host, "--port", str(options.port)]
        if options.config_file is not None:
            argv += ["--config", str(options.config_file)]
        return Service(
            name="gateway",
            argv=argv,
            log=self._new_log(f"gateway-{options.port}.log"),
            ready_url=f"{self._gateway_url}/health/ready",
            grace_s=GATEWAY_GRACE_S,
        )

    def _new_log(self, name: str) -> Path:
        log = self._home.logs / name
        open_log(log, afresh=True).close()
        return log

    @property
    def _engine_url(self) -> str:
        return f"http://127.0.0.1:{self._options.engine_port}"

    @property
    def _gateway_url(self) -> str:
        """The gateway as reached from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._options.host, self._options.host)  # noqa: S104
        return (
            f"http://[{host}]:{self._options.port}" if ":" in host else f"http://{host}:{self._options.port}"
        )

    def _serve(self, engine: Service, gateway: Service, *, progress: Progress) -> None:
        with ExitStack() as stack:
            stack.callback(stop_all, [gateway, engine])
            try:
                with progress.stage("engine and gateway") as stage:
                    engine.start()
                    gateway.start()
                    wait_until_ready(engine, gateway, note=stage.note)
                progress.say(self._welcome())
                watch(engine, gateway, progress=progress)
            except KeyboardInterrupt:
                progress.say("\nStopping ...")

    def _dashboard_hint(self) -> str:
        """Beyond loopback the admin views, which the dashboard shows, want a token."""
        if self._options.host in {"127.0.0.1", "::1", "localhost"}:
            return ""
        token = os.environ.get("TOKENFLOW_ADMIN_TOKEN")
        return " (asks for the admin token)" if token else " (closed: set TOKENFLOW_ADMIN_TOKEN to open it)"

    def _welcome(self) -> str:
        base = self._gateway_url
        question = {
            "model": first_model(base) or EMBEDDED_MODEL,
            "stream": True,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
        key = "-H 'Authorization: Bearer YOUR_KEY' " if wants_key(base) else ""
        return (
            f"\nTokenFlow is ready.\n"
            f"  API        {base}/v1\n"
            f"  Dashboard  {base}/dashboard{self._dashboard_hint()}\n"
            f"  Logs       {self._home.logs}\n"
            f"Try it:\n"
            f"  curl -N {base}/v1/chat/completions -H 'Content-Type: application/json' "
            f"{key}-d '{json.dumps(question)}'\n"
            f"Ctrl-C ends everything.\n"
        )


def _obey_signals() -> None:
    """Ctrl-C and SIGTERM end the run, also where a shell started it in the background, deaf to Ctrl-C."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
