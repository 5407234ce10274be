"""Overload where memory is large for its link: whoever takes turns in it too fast has half of it in loads."""

from __future__ import annotations

from dataclasses import replace

from tokenflow_bench.setups import SETUPS
from tokenflow_bench.simulated import Metrics, measure
from tokenflow_bench.simulator import simulate
from tokenflow_engine.policy.registry import policy_named

GAMMA = SETUPS["4090-gamma"]
SLOW = replace(GAMMA.machine, to_host_bytes_s=4e9, to_device_bytes_s=4e9, to_device_busy_bytes_s=2e9)
"""Its memory takes 1.4 s to load, 2.7 s while it is written too."""


def _overload(**options: float) -> Metrics:
    return measure(simulate(SLOW, GAMMA.workload(1.5, seed=1), policy_named("adaptive", **options)))


def test_turns_are_long_enough_for_the_link() -> None:
    ours, hasty = _overload().summary, _overload(loading_share=1e9).summary
    assert ours.stall_free_share >= 0.95
    assert hasty.stall_free_share < 0.5, "negative control"
    assert ours.wait_mean_s < hasty.wait_mean_s
    assert ours.raw_tokens_per_s > hasty.raw_tokens_per_s
