"""The system under test: a real engine with the plugin, and `tokenflow serve` in front of it."""

from __future__ import annotations

import json
import os
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.gateway_process import GatewayProcess
from support.real_engine import RealEngine, wait_until
from tokenflow_bench.burst.cores import Cores, pin, pin_engine, this_process
from tokenflow_bench.burst.others import group_cpu_s, process_cpu_s

__all__ = ["STOCK", "Deployment", "NoSuchPolicyError", "deployed", "parse_counters"]

STOCK = "fcfs"
"""The policy under which the plugin leaves scheduling to SGLang."""
_IDLE_S = 30.0
_LAST_LINES = 4
_COUNTER = re.compile(r"^(tokenflow_engine_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_COUNTED = (
    *("_total", "errors", "preemptions", "departures", "bytes", "plan"),
    *("stall", "return_seconds", "evicted", "evictions", "came_back", "away_s", "copy_wait_s"),
)
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class NoSuchPolicyError(RuntimeError):
    """The gateway, or the engine, does not know this policy."""


class Deployment:
    """Both running."""

    def __init__(self, engine: RealEngine, gateway: GatewayProcess) -> None:
        self._engine = engine
        self._gateway = gateway
        self.url = gateway.base_url
        self.model = str(_json(f"{self.url}/v1/models")["data"][0]["id"])

    def use(self, policy: str) -> None:
        """Schedule by `policy` from now on, with nothing running. Raises `NoSuchPolicyError`."""
        try:
            _post(f"{self.url}/admin/engines/e/policy", {"policy": policy})
        except urllib.error.HTTPError as error:
            raise NoSuchPolicyError(f"{policy}: {error.read().decode()[:200]}") from error
        wait_until(
            lambda: self._gateway.engine()["policy"] == policy, timeout_s=10, what=f"the policy is {policy}"
        )

    def settle(self) -> None:
        """Wait until nothing runs, and forget cached prefixes, so that runs do not help each other."""
        wait_until(self._gateway.is_idle, timeout_s=_IDLE_S, what="nothing runs", every_s=0.1)
        wait_until(self._flush, timeout_s=_IDLE_S, what="the cache is empty", every_s=0.1)

    def counters(self) -> dict[str, float]:
        """What the gateway exports (see `parse_counters`), and how many SGLang itself has ``retracted``."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:  # noqa: S310 - our own
            counters = parse_counters(answer.read().decode())
        return counters | {"retracted": sum(map(float, _RETRACTED.findall(self._engine.log())))}

    def cpu_s(self) -> float:
        """CPU seconds so far of engine, gateway and this process."""
        pids = (self._gateway.pid, os.getpid())
        return group_cpu_s(self._engine.pid) + sum(map(process_cpu_s, pids))

    def _flush(self) -> bool:
        """False while the engine still holds something."""
        try:
            _post(f"{self._engine.base_url}/flush_cache", {})
        except urllib.error.HTTPError:
            return False
        return True


@contextmanager
def deployed(
    model: Path, flags: Sequence[str], *, cores: Cores, env: Mapping[str, str] | None = None
) -> Iterator[Deployment]:
    """Start both, and put them and this process on their cores. What fails then gets their last words."""
    this_process(cores.all)  # children start where their parent is, and starting takes all there is
    with (
        tempfile.TemporaryDirectory(prefix="tokenflow-bench-") as folder,
        RealEngine(model, args=flags, env={"OMP_NUM_THREADS": str(cores.threads), **(env or {})}) as engine,
        GatewayProcess(engine, Path(folder)) as gateway,
    ):
        pin_engine(engine.pid, cores)
        pin(gateway.pid, cores.others)
        this_process(cores.others)
        wait_until(lambda: bool(gateway.engine()["linked"]), timeout_s=10, what="gateway and plugin linked")
        try:
            yield Deployment(engine, gateway)
        except Exception as error:  # the logs go with their folders
            error.add_note(f"the gateway's last words:\n{_last_words(gateway.log_path.read_text())}")
            error.add_note(f"the engine's last words:\n{_last_words(engine.log())}")
            raise


def _last_words(log: str) -> str:
    return "\n".join(log.splitlines()[-_LAST_LINES:])


def parse_counters(text: str) -> dict[str, float]:
    """Counters of the engine in Prometheus' text format: ``name``, or ``name{values of other labels}``."""
    samples = {_name(found[1], found[2]): float(found[3]) for found in _COUNTER.finditer(text)}
    return {name: value for name, value in samples.items() if any(word in name for word in _COUNTED)}


def _name(name: str, labels: str | None) -> str:
    kinds = [value for key, value in _LABEL.findall(labels or "") if key != "engine"]
    return f"{name}{{{','.join(kinds)}}}" if kinds else name


def _json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own program
        return json.load(answer)


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(  # noqa: S310 - our own program
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - our own program
        answer.read()
