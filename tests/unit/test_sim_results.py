"""Metrics by hand, and what the policies are for: regressions of the results that were tuned for."""

from __future__ import annotations

import numpy as np
import pytest

from tokenflow_bench.metrics import Metrics, measure
from tokenflow_bench.setups import SETUPS
from tokenflow_bench.simulator import Outcome, simulate
from tokenflow_bench.simulator.streams import Streams
from tokenflow_bench.workload import Workload
from tokenflow_engine.policy.registry import policy_named


def _results(setup: str, policy: str, load: float, *, mixed: bool = True) -> Metrics:
    workload = SETUPS[setup].workload(load, 1)
    return measure(simulate(SETUPS[setup].machine, workload, policy_named(policy), mixed=mixed))


def test_metrics_count_everybody_who_has_arrived() -> None:
    count = 4
    workload = Workload.of(
        np.array([0.0, 1.0, 2.0, 99.0]), np.full(count, 10), np.full(count, 10), np.full(count, 5.0)
    )
    streams = Streams(workload)
    streams.first_at[:2] = [0.5, 2.0]
    streams.stalled_s[:2] = [0.1, 0.3]
    streams.generated[:2] = 10
    streams.useful[:2] = [10.0, 5.0]
    outcome = Outcome(
        streams=streams,
        duration_s=10.0,
        bytes_moved=2_000_000_000,
        plans=20,
        passes=1,
        retractions=0,
        emergencies=0,
    )
    metrics = measure(outcome)
    assert metrics.ttft_mean == pytest.approx((0.5 + 1.0 + 8.0) / 3)
    assert metrics.wait_mean == pytest.approx((0.6 + 1.3 + 8.0) / 3)
    assert metrics.stall_free == pytest.approx(2 / 3)
    assert (metrics.raw, metrics.effective) == (2.0, 1.5)
    assert metrics.gigabytes == 2.0


def test_useful_tokens_are_those_read_soon() -> None:
    """At 5 % unread a token weighs 1, at 15 % a half, at 25 % nothing."""
    streams = Streams(Workload.of(np.zeros(3), np.full(3, 1), np.full(3, 100), np.full(3, 1.0)))
    streams.generated[:] = 50
    streams.consumed[:] = [46.0, 36.0, 26.0]
    streams.paused[:] = True
    streams.generate(np.arange(3), now=0.0)
    assert streams.useful.tolist() == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("setup", ["4090-a", "tiny-burst"])
def test_a_burst_below_capacity_is_served_at_once_and_without_stalls(setup: str) -> None:
    stock = _results(setup, "fcfs", 0.8, mixed=False)
    ours = _results(setup, "adaptive", 0.8)
    assert ours.ttft_p99 <= 0.2 * stock.ttft_p99
    assert ours.stall_free >= 0.95
    assert ours.raw >= stock.raw
    assert ours.effective >= 1.3 * stock.effective
    assert ours.preemptions <= 3.0
    assert ours.emergencies == 0


@pytest.mark.parametrize("setup", ["4090-a", "tiny-burst"])
def test_beyond_capacity_some_wait_and_nobody_stalls(setup: str) -> None:
    stock = _results(setup, "fcfs", 1.2, mixed=False)
    ours = _results(setup, "adaptive", 1.2)
    assert ours.wait_mean <= 0.6 * stock.wait_mean
    assert ours.stall_free >= 0.95
    assert ours.raw >= 0.98 * stock.raw


def test_without_the_gate_readers_stall() -> None:
    """Negative control: promising five times the capacity makes most streams stall."""
    workload = SETUPS["tiny-burst"].workload(1.2, 1)
    options = {"efficiency": 5.0, "efficiency_resident": 5.0}
    outcome = simulate(SETUPS["tiny-burst"].machine, workload, policy_named("adaptive", **options))
    assert measure(outcome).stall_free < 0.5


def test_with_no_queue_the_policy_costs_nothing() -> None:
    stock = _results("tiny-poisson", "fcfs", 0.4)
    ours = _results("tiny-poisson", "adaptive", 0.4)
    assert ours.ttft_mean <= 1.1 * stock.ttft_mean
    assert ours.raw >= 0.999 * stock.raw
