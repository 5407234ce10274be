"""Rounds of cases on one deployment: order, the same readers for all, counters, late drivers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from support.real_engine import wait_until
from tokenflow_bench.burst import rounds as module
from tokenflow_bench.burst.others import Others, group_cpu_s, objection, process_cpu_s
from tokenflow_bench.burst.rounds import Rounds
from tokenflow_bench.burst.setups import SETUPS
from tokenflow_bench.burst.turns import Case
from tokenflow_bench.load.driver import Ask, Client, Drive
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.load.overhead import Overhead

CALM = Overhead(lag_p50_ms=0.1, lag_p99_ms=1, lag_max_ms=2, cpu_share=0.1, late_p99_ms=1)
LATE = Overhead(lag_p50_ms=0.1, lag_p99_ms=99, lag_max_ms=99, cpu_share=0.9, late_p99_ms=1)


class FakeDeployment:
    """Notes what is done to it; its one counter grows by five a run."""

    url, model = "http://127.0.0.1:1", "m"

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._count = 100.0

    def settle(self) -> None:
        self.notes.append("settle")

    def use(self, policy: str) -> None:
        self.notes.append(policy)

    def cpu_s(self) -> float:
        return 0.0

    def counters(self) -> dict[str, float]:
        self._count += 2.5
        return {"moves": self._count}


class FakeDrive:
    """In place of the real one: every answer comes at once, with these overheads one after the other."""

    def __init__(self, overheads: Iterator[Overhead]) -> None:
        self.overheads = overheads
        self.calls: list[tuple[Client, Sequence[Ask]]] = []

    async def __call__(self, client: Client, asks: Sequence[Ask], **_rest: Any) -> Drive:
        self.calls.append((client, asks))
        logs = [
            StreamLog(
                index=index,
                due_s=0.0,
                person=ask.person,
                output_tokens=1,
                token_s=[0.5],
                end_s=0.5,
            )
            for index, ask in enumerate(asks)
        ]
        return Drive(
            logs=logs,
            start_s=0.0,
            horizon_s=9,
            overhead=next(self.overheads),
            report_statuses={200: 3},
        )


def run(
    monkeypatch: pytest.MonkeyPatch, overheads: Sequence[Overhead], *, count: int, most_others: float = 99
) -> tuple[FakeDeployment, FakeDrive, dict[str, Any], list[str]]:
    deployment, drive, said = FakeDeployment(), FakeDrive(iter(overheads)), []
    monkeypatch.setattr(module, "drive", drive)
    cases = [Case(name="stock", policy="fcfs"), Case(name="ours", policy="adaptive", report_every_s=1.0)]
    how = Rounds(
        between_rounds=lambda number: deployment.notes.append(f"before {number}"),
        name="test",
        cases=cases,
        rounds=count,
        workload=lambda number: SETUPS["tiny"].burst(3, seed=number),
        window_s=1,
        horizon_s=9,
        target_s=1,
        max_lag_ms=20,
        max_others=most_others,
        say=said.append,
    )
    return deployment, drive, how.run(deployment), said  # type: ignore[arg-type]


def test_turns_and_their_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settled before each run; in one round both cases get the same requests, in the next one others."""
    deployment, drive, results, _ = run(monkeypatch, [CALM] * 4, count=2)
    first = ["before 0", "settle", "fcfs", "settle", "adaptive"]
    second = ["before 1", "settle", "adaptive", "settle", "fcfs"]
    order = [*first, *second, "before 2", "settle"]
    assert deployment.notes == order
    asks = [asks for _, asks in drive.calls]
    assert asks[0] == asks[1] != asks[2] == asks[3]
    assert [client.report_every_s for client, _ in drive.calls] == [None, 1.0, 1.0, None]
    assert {name: [one["round"] for one in runs] for name, runs in results.items()} == {
        "stock": [0, 1],
        "ours": [0, 1],
    }
    assert results["stock"][0]["engine"] == {"moves": 2.5}
    assert results["stock"][0]["figures"]["ttft_mean_s"] == 0.5
    assert results["stock"][0]["objection"] is None
    assert [["timeline" in one for one in runs] for runs in results.values()] == [[True, False]] * 2
    assert results["stock"][0]["timeline"]["ttft_s"] == [0.5] * 3


def test_a_late_driver_gets_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    _, drive, results, said = run(monkeypatch, [LATE, CALM, CALM], count=1)
    assert len(drive.calls) == 3
    assert results["stock"][0]["objection"] is None
    assert results["stock"][0]["attempt"] == 1
    assert any("NOT TO BE USED" in line for line in said)


def test_a_driver_that_stays_late_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, drive, results, _ = run(monkeypatch, [LATE] * 3 + [CALM], count=1)
    assert len(drive.calls) == 4
    assert "99 ms late" in results["stock"][0]["objection"]
    assert results["ours"][0]["objection"] is None


def test_a_run_beside_other_programs_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, drive, results, said = run(monkeypatch, [CALM] * 6, count=1, most_others=-1.0)
    assert len(drive.calls) == 6
    assert "other programs took" in results["stock"][0]["objection"]
    assert any("NOT TO BE USED: other programs" in line for line in said)


def test_what_others_compute_is_told_from_ones_own() -> None:
    """A program that does nothing but compute, for half a second: other people's, then ours."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) as busy:
        try:
            strangers = Others(lambda: 0.0)
            ours = Others(lambda: process_cpu_s(busy.pid))
            began_s = process_cpu_s(busy.pid)
            wait_until(lambda: process_cpu_s(busy.pid) - began_s > 0.5, timeout_s=60, what="it computed")
            its_cores = strangers.cores() - ours.cores()
            assert group_cpu_s(busy.pid) >= 0.5
        finally:
            busy.kill()
    assert 0.02 < its_cores <= 1.1
    assert objection(0.3, most=0.25) == "other programs took 0.30 of a core meanwhile (0.25 are allowed)"
    assert objection(0.2, most=0.25) is None
    assert process_cpu_s(busy.pid) == 0.0, "it has ended"
