"""Restarts are limited and pause longer each time; a dead gateway or a hopeless engine ends the run."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from tokenflow_gateway.local import supervise
from tokenflow_gateway.local.errors import SetupError
from tokenflow_gateway.local.progress import Progress
from tokenflow_gateway.local.restarts import RestartBudget


class FakeService:
    """A service whose life is a list: an exit code for each look at it, None while it lives."""

    def __init__(self, name: str, codes: list[int | None], *, ready: bool = True) -> None:
        self.name = name
        self.codes = codes
        self.ready = ready
        self.starts = 0
        self.log = Path(f"{name}.log")

    def start(self) -> None:
        self.starts += 1

    def exit_code(self) -> int | None:
        if not self.codes:
            raise KeyboardInterrupt  # the person has seen enough
        return self.codes.pop(0)

    def is_ready(self) -> bool:
        return self.ready

    def require_running(self) -> None:
        if self.codes and self.codes[0] is not None and self.name == "gateway":
            raise SetupError(self.obituary(self.codes[0]))

    def obituary(self, code: int) -> str:
        return f"The {self.name} ended with code {code}."


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    taken: list[float] = []
    monkeypatch.setattr(supervise.time, "sleep", taken.append)
    return taken


def watch(engine: FakeService, gateway: FakeService) -> str:
    stream = io.StringIO()
    with contextlib.suppress(KeyboardInterrupt):
        supervise.watch(engine, gateway, progress=Progress(1, stream=stream))
    return stream.getvalue()


def test_a_dead_engine_is_started_again_and_its_return_is_told(pauses: list[float]):
    engine = FakeService("engine", [None, 137, None, None])
    said = watch(engine, FakeService("gateway", [None]))
    assert engine.starts == 1
    assert said.splitlines() == [
        "The engine ended with code 137 (see engine.log): starting it again in 1 s",
        "The engine is back.",
    ]


def test_the_fourth_death_within_the_window_ends_the_run(pauses: list[float]):
    engine = FakeService("engine", [1, 1, 1, 1])
    with pytest.raises(SetupError, match="no further restart"):
        watch(engine, FakeService("gateway", [None]))
    assert engine.starts == 3
    assert [pause for pause in pauses if pause >= 1] == [1, 4, 16]


def test_a_dead_gateway_ends_the_run(pauses: list[float]):
    with pytest.raises(SetupError, match="The gateway ended with code 2"):
        watch(FakeService("engine", [None]), FakeService("gateway", [2]))


def test_restarts_come_back_once_the_window_has_passed():
    budget = RestartBudget(limit=2, window_s=100.0)
    assert [budget.spend(now_s) for now_s in (0.0, 10.0, 20.0)] == [1.0, 4.0, None]
    assert budget.spend(100.5) == 4.0  # the first is forgotten, the second is not
    assert budget.spend(300.0) == 1.0


def test_a_gateway_that_never_sees_its_engine_is_reported(pauses: list[float], monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(supervise.time, "monotonic", lambda: float(next(clock)))
    engine, gateway = FakeService("engine", []), FakeService("gateway", [], ready=False)
    engine.require_running = gateway.require_running = lambda: None
    with pytest.raises(SetupError, match=r"The gateway is not ready after 60 s: see gateway\.log"):
        supervise.wait_until_ready(engine, gateway, note=lambda _: None)
