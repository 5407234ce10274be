"""What a figure depends on beside the code: machine, versions, how it was run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["describe", "this_command"]

_PACKAGES = ("tokenflow-serving", "aiohttp", "uvicorn", "uvloop", "openai")
_ROOT = Path(__file__).parents[2]


def describe(*, seed: int, command: Sequence[str], browsers: bool = True) -> dict[str, Any]:
    """The head of a result's document; without `browsers`, Chromium and nginx are not asked for."""
    return {
        "format": 1,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(command),
        "seed": seed,
        "machine": _machine(),
        "versions": _versions() | (_browsers() if browsers else {}),
    }


def _machine() -> dict[str, Any]:
    cpus = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in cpus.splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "tcp_rmem": Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split(),
        "load_before": os.getloadavg()[0],
    }


def _versions() -> dict[str, str]:
    found = {"commit": _commit(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _browsers() -> dict[str, str]:
    from support.browser import find_chromium  # of the tests, which an installed package has not
    from tokenflow_bench.processes import find_nginx

    nginx = find_nginx()
    return {
        "chromium": _said([find_chromium(), "--version"]).removeprefix("Chromium ").partition(" ")[0],
        "nginx": _said([nginx, "-v"]).rpartition("/")[2] if nginx else "not installed",
    }


def _commit() -> str:
    if not (_ROOT / ".git").exists():
        return "not from a clone"
    commit = _said(["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"])
    changed = _said(["git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit} and changes" if changed else commit


def _said(command: Sequence[str]) -> str:
    """The last line of what a command prints, to whichever output."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip().rpartition("\n")[2]


def this_command() -> list[str]:
    """As it can be typed again."""
    return ["make", "bench-readers", *([f'ARGS="{" ".join(sys.argv[1:])}"'] if sys.argv[1:] else [])]
