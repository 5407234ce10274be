"""What the policies are for: regressions of the results that were tuned for."""

from __future__ import annotations

import pytest

from tokenflow_bench.setups import SETUPS
from tokenflow_bench.simulated import Metrics, measure
from tokenflow_bench.simulator import simulate
from tokenflow_engine.policy.registry import policy_named


def _results(setup: str, policy: str, load: float, *, mixed: bool = True) -> Metrics:
    workload = SETUPS[setup].workload(load, 1)
    return measure(simulate(SETUPS[setup].machine, workload, policy_named(policy), mixed=mixed))


@pytest.mark.parametrize("setup", ["4090-a", "tiny-burst"])
def test_a_burst_below_capacity_is_served_at_once_and_without_stalls(setup: str) -> None:
    stock = _results(setup, "fcfs", 0.8, mixed=False)
    ours = _results(setup, "adaptive", 0.8)
    assert ours.summary.ttft_p99_s <= 0.2 * stock.summary.ttft_p99_s
    assert ours.summary.stall_free_share >= 0.95
    assert ours.summary.raw_tokens_per_s >= stock.summary.raw_tokens_per_s
    assert ours.summary.effective_tokens_per_s >= 1.3 * stock.summary.effective_tokens_per_s
    assert ours.preemptions <= 3.0
    assert ours.emergencies == 0


@pytest.mark.parametrize("setup", ["4090-a", "tiny-burst"])
def test_beyond_capacity_some_wait_and_nobody_stalls(setup: str) -> None:
    stock = _results(setup, "fcfs", 1.2, mixed=False)
    ours = _results(setup, "adaptive", 1.2)
    assert ours.summary.wait_mean_s <= 0.6 * stock.summary.wait_mean_s
    assert ours.summary.stall_free_share >= 0.95
    assert ours.summary.raw_tokens_per_s >= 0.98 * stock.summary.raw_tokens_per_s


def test_without_the_gate_readers_stall() -> None:
    """Negative control: promising five times the capacity makes most streams stall."""
    workload = SETUPS["tiny-burst"].workload(1.2, 1)
    outcome = simulate(SETUPS["tiny-burst"].machine, workload, policy_named("adaptive", efficiency=5.0))
    assert measure(outcome).summary.stall_free_share < 0.5


def test_with_no_queue_the_policy_costs_nothing() -> None:
    stock = _results("tiny-poisson", "fcfs", 0.4)
    ours = _results("tiny-poisson", "adaptive", 0.4)
    assert ours.summary.ttft_mean_s <= 1.1 * stock.summary.ttft_mean_s
    assert ours.summary.raw_tokens_per_s >= 0.999 * stock.summary.raw_tokens_per_s
