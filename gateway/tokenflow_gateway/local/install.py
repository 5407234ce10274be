"""From an empty home directory to an engine's environment and a model: only what is missing is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenflow_gateway.local.environment import engine_steps, find_engine_python
from tokenflow_gateway.local.home import Home
from tokenflow_gateway.local.lock import exclusive
from tokenflow_gateway.local.machine import Device
from tokenflow_gateway.local.model import EMBEDDED_MODEL, MODEL_STAGES, pull
from tokenflow_gateway.local.process import Runner
from tokenflow_gateway.local.progress import Progress
from tokenflow_gateway.local.source import package_source
from tokenflow_gateway.local.steps import run_steps

__all__ = ["install", "pull_model"]


def install(
    home: Home, *, device: Device, model: str, run: Runner, further_stages: int
) -> tuple[Path, Progress]:
    """Make the environment and, if it is the one asked for, the embedded model. Blocks while others install.

    Returns the engine's interpreter, and the progress on which the caller shows `further_stages` more.
    Raises `SetupError`.
    """
    home.create()
    steps = engine_steps(home, device=device, source=package_source())
    model_stages = MODEL_STAGES if model == EMBEDDED_MODEL else 0
    progress = Progress(len(steps) + model_stages + further_stages)
    with exclusive(home.root / "install.lock", on_wait=_waiting(progress)):
        run_steps(steps, stamps=home.stamps, log=home.logs / "install.log", run=run, progress=progress)
        python = find_engine_python(home)
        if model_stages:
            pull(home, python=python, run=run, progress=progress)
    return python, progress


def pull_model(home: Home, *, run: Runner) -> Path:
    """Get the embedded model alone, with the engine that is here. Returns its directory."""
    python = find_engine_python(home)
    home.create()
    progress = Progress(MODEL_STAGES)
    with exclusive(home.root / "install.lock", on_wait=_waiting(progress)):
        return pull(home, python=python, run=run, progress=progress)


def _waiting(progress: Progress) -> Callable[[], None]:
    return lambda: progress.say("Another start is installing at the moment: waiting for it ...")
