"""Facts about this machine, each a question that tests can answer instead."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenflow_gateway.local.errors import SetupError

__all__ = ["Device", "Machine"]

Device = Literal["cpu", "cuda"]


def _free_bytes(path: Path) -> int:
    """Free space where `path` is, or will be once it is made."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _port_is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _gpu_names() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split("\n")[:-1]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is asked about a machine. The defaults ask the real one."""

    platform: str = sys.platform
    python: tuple[int, int] = sys.version_info[:2]
    free_bytes: Callable[[Path], int] = _free_bytes
    available_memory_bytes: Callable[[], int] = _available_memory_bytes
    port_is_free: Callable[[str, int], bool] = _port_is_free
    has_module: Callable[[str], bool] = _has_module
    gpu_names: Callable[[], list[str]] = _gpu_names

    def device(self, environ: Mapping[str, str]) -> Device:
        """What the engine runs on: ``TOKENFLOW_DEVICE``, or a GPU if nvidia-smi finds one."""
        match environ.get("TOKENFLOW_DEVICE"):
            case "cpu":
                return "cpu"
            case "cuda":
                return "cuda"
            case None | "":
                return "cuda" if self.gpu_names() else "cpu"
            case other:
                raise SetupError(f"TOKENFLOW_DEVICE is {other!r}: it must be cpu or cuda, or not set at all")
