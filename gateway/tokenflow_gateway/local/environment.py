"""The engine's environment: SGLang 0.5.23 in a virtual environment of its own."""

from __future__ import annotations

import importlib.util
import sys
from importlib.resources import files
from pathlib import Path

from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.home import Home
from tokenflow_gateway.local.machine import Device
from tokenflow_gateway.local.source import Source
from tokenflow_gateway.local.steps import Step

__all__ = ["disk_needed_bytes", "engine_steps", "find_engine_python", "has_own_sglang"]

SGLANG = "sglang==0.5.23"
TORCH_FOR_CPU = "torch==2.13.0"
GIB = 1024**3


def engine_steps(home: Home, *, device: Device, source: Source) -> list[Step]:
    """All steps from nothing to an environment that can serve; none where SGLang is here already."""
    if has_own_sglang():
        return []
    pip = (str(home.engine_python), "-m", "pip", "install", "--disable-pip-version-check")
    plugin = Step(
        name="plugin",
        title="TokenFlow's plugin",
        argv=(*pip, "--no-deps", *source.pip_arguments),
        content=source.content,
    )
    middle = _cpu_steps(pip) if device == "cpu" else [_cuda_step(pip)]
    return [_venv_step(home, device=device), *middle, plugin]


def _venv_step(home: Home, *, device: Device) -> Step:
    return Step(
        name="venv",
        title="engine environment",
        argv=(sys.executable, "-m", "venv", "--clear", str(home.engine)),
        content=f"{device} {sys.version}",
    )


def _cpu_steps(pip: tuple[str, ...]) -> list[Step]:
    requirements = Path(str(files("tokenflow_engine") / "requirements" / "cpu.txt"))
    return [
        Step(name="torch", title="PyTorch", argv=(*pip, TORCH_FOR_CPU)),
        Step(
            name="packages",
            title="engine packages",
            argv=(*pip, "--no-deps", "-r", str(requirements)),
            content=requirements.read_text(),
        ),
    ]


def _cuda_step(pip: tuple[str, ...]) -> Step:
    # accelerate: transformers needs it to read the embedded model's GGUF file
    return Step(name="packages", title="SGLang for CUDA", argv=(*pip, SGLANG, "accelerate==1.15.0"))


def disk_needed_bytes(*, device: Device, missing_steps: int) -> int:
    """Space that the installation takes, downloads included; nothing for a finished one."""
    if missing_steps == 0:
        return 0
    return 5 * GIB if device == "cpu" else 30 * GIB


def has_own_sglang() -> bool:
    """Whether this very interpreter has SGLang, as in an engine's image."""
    spec = importlib.util.find_spec("sglang")
    return spec is not None and spec.origin is not None  # a mere directory of that name has no origin


def find_engine_python(home: Home) -> Path:
    """The interpreter that has SGLang: this one (an engine's image), or the one `tokenflow up` made."""
    if has_own_sglang():
        return Path(sys.executable)
    if (home.stamps / "plugin").is_file():
        return home.engine_python
    raise SetupError(
        "There is no engine here yet: `tokenflow up --prepare` installs it (a few minutes, once)"
    )
