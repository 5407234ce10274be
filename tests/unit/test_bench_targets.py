"""Targets met or missed, and what a part is worth, from figures given by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tokenflow_bench.burst import scenarios
from tokenflow_bench.burst.capacity import Capacity
from tokenflow_bench.burst.cores import Cores
from tokenflow_bench.burst.scenarios import Comparison, Plan, ablation, burst, pauses, seconds
from tokenflow_bench.burst.setups import SETUPS
from tokenflow_bench.burst.targets import judged, worth
from tokenflow_bench.burst.turns import Case
from tokenflow_bench.workload import Workload

TINY = SETUPS["tiny"]


def run(
    *, pausing: dict[str, Any] | None = None, pauses: dict[str, Any] | None = None, **changed: float
) -> Any:
    figures = {
        "ttft_p99_s": 10.0,
        "wait_mean_s": 5.0,
        "stall_free_share": 0.5,
        "raw_tokens_per_s": 100.0,
        "effective_tokens_per_s": 50.0,
    }
    return {"figures": figures | changed | {"after_pause": pauses}, "pausing": pausing}


def table(load: float, ours: list[Any], **more: Any) -> dict[str, Any]:
    return {"load": load, "cases": {"fcfs": [run()] * len(ours), "adaptive": ours}, **more}


def test_all_targets_met_below_capacity():
    good = run(
        ttft_p99_s=2.0,
        wait_mean_s=2.0,
        stall_free_share=0.95,
        raw_tokens_per_s=100.0,
        effective_tokens_per_s=65.0,
    )
    lines = judged(table(0.8, [good]))
    assert len(lines) == 5
    assert all(line.endswith("**met**") for line in lines)
    assert "TTFT p99 against stock: x0.20 (at most x0.20): **met**" in lines


@pytest.mark.parametrize(
    ("figure", "value", "words"),
    [
        ("ttft_p99_s", 2.1, "TTFT p99"),
        ("wait_mean_s", 2.1, "mean wait"),
        ("stall_free_share", 0.94, "stall-free"),
        ("raw_tokens_per_s", 99.0, "raw"),
        ("effective_tokens_per_s", 64.0, "effective"),
    ],
)
def test_each_target_can_be_missed(figure: str, value: float, words: str):
    good = {
        "ttft_p99_s": 1.0,
        "wait_mean_s": 1.0,
        "stall_free_share": 1.0,
        "raw_tokens_per_s": 110.0,
        "effective_tokens_per_s": 80.0,
    }
    missed = [line for line in judged(table(0.8, [run(**good | {figure: value})])) if "missed" in line]
    assert len(missed) == 1
    assert missed[0].startswith(words)


def test_above_capacity_the_limits_are_others():
    lines = judged(table(1.2, [run(wait_mean_s=3.0, stall_free_share=0.95, raw_tokens_per_s=98.0)]))
    assert [line.endswith("**met**") for line in lines] == [True, True, True]
    assert judged({"load": 1.2, "cases": {"fcfs": [run()]}}) == []


def test_pauses_have_targets_of_their_own():
    def paused(moved: int, share: float) -> Any:
        return run(
            pausing={"moved_out": moved, "generating": 20},
            pauses={"reads_on_share": share, "smooth_share": 1.0},
        )

    lines = judged(table(1.2, [paused(20, 0.9), paused(19, 1.0), paused(0, 0.9)], pausing=True))
    assert [line.endswith("**met**") for line in lines] == [True, False, True]
    assert "95 % (at least 95 %)" in lines[0]


def parts(**waits: list[float]) -> list[str]:
    """Verdicts on parts without which waits, in each round, are that many times as long."""
    rounds = len(next(iter(waits.values())))
    cases = {"adaptive": [run(wait_mean_s=2.0)] * rounds} | {
        name: [run(wait_mean_s=2.0 * times) for times in each] for name, each in waits.items()
    }
    policies = {name: f"adaptive:{name}=0" for name in cases} | {"adaptive": "adaptive"}
    return worth({"cases": cases, "policies": policies})


def verdicts(lines: list[str]) -> list[str]:
    return [line.rpartition(": ")[2] for line in lines]


def test_a_part_pays_if_it_is_worse_without_in_all_five_rounds():
    lines = parts(
        offload=[1.5, 1.2, 1.07, 1.4, 1.01],
        noisy=[1.5, 1.5, 1.5, 1.5, 0.99],
        small=[1.04, 1.03, 1.02, 1.04, 1.04],
        harms=[0.8, 0.9, 0.7, 0.93, 0.99],
    )
    assert verdicts(lines) == ["**pays**", "**cannot tell**", "**cannot tell**", "**costs**"]
    assert lines[0] == (
        "offload: mean wait x1.20 (x1.01 to x1.50), TTFT p99 x1.00, raw throughput x1.00, "
        "stall-free +0 points; round by round: mean wait x1.50, x1.20, x1.07, x1.40, x1.01; "
        "raw throughput x1.00, x1.00, x1.00, x1.00, x1.00: **pays**"
    )


def test_few_rounds_tell_nothing_and_many_may_disagree_once():
    assert verdicts(parts(offload=[2.0])) == ["**cannot tell**"]
    assert verdicts(parts(offload=[2.0] * 3)) == ["**cannot tell**"]
    assert verdicts(parts(offload=[2.0] * 7 + [0.5])) == ["**pays**"]
    assert verdicts(parts(offload=[2.0] * 6 + [0.5] * 2)) == ["**cannot tell**"]


def test_a_part_can_pay_in_streams_that_stall_or_in_throughput():
    whole = [run()] * 5
    policies = {"adaptive": "adaptive", "a": "adaptive:a=0", "b": "adaptive:b=0", "c": "adaptive:c=0"}
    cases = {
        "adaptive": whole,
        "a": [run(stall_free_share=0.4)] * 5,
        "b": [run(raw_tokens_per_s=90.0)] * 5,
        "c": [run(raw_tokens_per_s=90.0, wait_mean_s=4.0)] * 5,
    }
    lines = worth({"cases": cases, "policies": policies})
    assert verdicts(lines) == ["**pays**", "**pays**", "**cannot tell**"]
    assert "stall-free -10 points" in lines[0]


def plan(runs: int = 5) -> Plan:
    return Plan(
        policies=(),
        loads=(0.8, 1.2),
        runs=runs,
        seed=1,
        target_s=1.0,
        max_lag_ms=20.0,
        max_others=0.25,
        kv_tokens=None,
        threads=None,
        say=lambda _line: None,
    )


def test_an_experiment_says_how_long_it_takes():
    """4 policies, 5 rounds, 250 tokens at 17.5 a second: 14.3 and 17.1 s a run, 3 s between; capacities."""
    comparisons = burst(plan(), TINY)
    assert [comparison.least_s(TINY) for comparison in comparisons] == pytest.approx(
        [14.286, 17.143], abs=1e-3
    )
    assert seconds(plan(), TINY, comparisons) == pytest.approx(75 + 20 * (17.286 + 20.143) + 10 * 12, abs=0.1)


def test_the_experiment_fits_into_its_time():
    whole = sum(seconds(plan(), setup, burst(plan(), setup)) for setup in SETUPS.values())
    assert whole < 45 * 60


@dataclass
class FakeRounds:
    """No runs; the rounds' readers are counted."""

    rounds: int
    workload: Callable[[int], Workload]
    between_rounds: Callable[[int], None]

    @classmethod
    def of(cls, **given: Any) -> FakeRounds:
        return cls(given["rounds"], given["workload"], given["between_rounds"])

    def run(self, _deployment: object) -> dict[str, list[int]]:
        counts = []
        for number in range(self.rounds):
            self.between_rounds(number)
            counts.append(len(self.workload(number)))
        self.between_rounds(self.rounds)
        return {"readers": counts}


def test_each_round_has_the_readers_of_its_own_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """350 tokens/s for people who read 17.5: 20 of them at load 1; a machine twice as slow has 10."""
    speeds = iter([350.0, 175.0, 700.0])
    monkeypatch.setattr(scenarios, "_capacity", lambda *_given: Capacity(next(speeds), 300.0))
    monkeypatch.setattr(scenarios, "Rounds", FakeRounds.of)
    deployment = SimpleNamespace(use=lambda _policy: None)
    site = scenarios._Site(
        plan=plan(3), setup=TINY, deployment=deployment, cores=Cores(threads=1), kv_tokens=3000, twin=None
    )  # type: ignore[arg-type]
    table = site.table(Comparison(title="load 1", load=1.0, cases=(Case(name="fcfs", policy="fcfs"),)))
    assert table["readers"] == table["cases"]["readers"] == [20, 10, 40]
    assert table["capacity"] == [350.0, 175.0, 700.0]
    assert table["fit"] == [0.5, 1.0, 0.25]


def by_policy(comparison: Comparison) -> dict[str, str]:
    return {case.name: case.policy for case in comparison.cases}


def test_each_part_is_taken_away_in_one_engine():
    parts, pausing, *_ = ablation(plan(), TINY)
    assert by_policy(parts) == {
        "fcfs": "fcfs",
        "adaptive": "adaptive",
        "no offload": "adaptive:offload=0",
        "no write-through": "adaptive:write_through=0",
        "no overlap": "adaptive:overlap=0",
    }
    assert (parts.pausing, pausing.pausing) == (False, True)
    assert by_policy(pausing)["no pause knowledge"] == "adaptive:pauses=0"
    assert {case.pauses for case in pausing.cases} == {"report"}


def test_readers_who_pause_are_also_not_told_of():
    [comparison, _] = pauses(plan(), TINY)
    untold = [case for case in comparison.cases if case.pauses == "silent"]
    assert [case.name for case in untold] == ["adaptive, not told"]
    assert untold[0].report_every_s is None
    assert comparison.least_s(TINY) == pytest.approx(24.286, abs=1e-3)
