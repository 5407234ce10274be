"""The beginning of a burst on a slow engine whose prefills and decode steps take turns, in simulation.

Costs are those of the real engine with SmolLM2 on one core, lengths and memory those of `make bench-burst`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tokenflow_bench.costs import MACHINES
from tokenflow_bench.people import lognormal_rates
from tokenflow_bench.simulated import Metrics, measure
from tokenflow_bench.simulator import simulate
from tokenflow_bench.workload import Workload, normal_lengths
from tokenflow_engine.policy.registry import policy_named

ONE_CORE = replace(
    MACHINES["laptop-smollm2"],
    step_base_s=0.062,
    step_per_stream_s=4.2e-3,
    step_per_context_token_s=3.6e-5,
    prefill_base_s=0.055,
    prefill_per_token_s=1.6e-3,
    kv_tokens=1056,
)
GAP_S = 0.005
"""Between requests sent at once: the first is prefilled alone."""


def _burst(readers: int, seed: int, policy: str = "adaptive", **options: float) -> Metrics:
    rng = np.random.default_rng(seed)
    workload = Workload.of(
        np.arange(readers) * GAP_S,
        normal_lengths(rng, readers, mean=40) + 32,
        normal_lengths(rng, readers, mean=120),
        np.minimum(lognormal_rates(rng, readers, median=5.0), 7.0),
    )
    return measure(simulate(ONE_CORE, workload, policy_named(policy, **options), mixed=False))


def _stall_free(readers: int, **options: float) -> float:
    return float(np.mean([_burst(readers, s, **options).summary.stall_free_share for s in range(1, 9)]))


def test_who_is_first_does_not_run_dry_while_others_are_prefilled() -> None:
    assert _stall_free(7) >= 0.95
    assert _stall_free(7, lead_s=0.0) < 0.9, "negative control"


@pytest.mark.parametrize("seed", range(1, 7))
def test_newcomers_still_wait_far_less_than_with_the_stock_engine(seed: int) -> None:
    """In passes of two prompts, each after its own lead, the last would come too late with half of these."""
    stock, ours = _burst(7, seed, "fcfs").summary, _burst(7, seed).summary
    assert ours.ttft_p99_s <= 0.2 * stock.ttft_p99_s
    assert ours.raw_tokens_per_s >= 0.98 * stock.raw_tokens_per_s


def test_turns_beyond_capacity_leave_nobody_dry() -> None:
    """Contexts double while streams run, so that those who all fitted take turns in the end."""
    assert _stall_free(11) >= 0.95
    assert _stall_free(11, efficiency=1.2) < 0.9, "negative control"
