"""Host memory for KV: shared out over tensor-parallel ranks, and closed where copies are not exact."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import pytest

from support.equality import LIMIT_S, NewEngine, assert_equal, chaotic, run_twice
from support.real_engine import RealEngine

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]

thorough = pytest.mark.skipif(
    os.environ.get("TOKENFLOW_THOROUGH") != "1", reason="`make soak` runs every configuration"
)


def two_ranks(new_engine: NewEngine, *args: str, fault: str) -> AbstractContextManager[RealEngine]:
    """Each with half of the heads on a core of its own; host memory is opened as the engine starts."""
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "TOKENFLOW_POLICY": "chaos", "TOKENFLOW_FAULT": fault}
    return chaotic(new_engine, "--tp-size", "2", *args, env=env)


def test_two_ranks_move_their_halves_and_change_no_token(new_engine: NewEngine):
    """On one of them copies are slow, and every second load fails: it counts as failed on both."""
    with two_ranks(new_engine, fault="fail_kv@1,slow_kv@1") as engine:
        expected, found, after = run_twice(engine, seed=7)
    assert_equal(expected, found)
    assert {"resumed", "offloaded", "loaded", "failed_loads", "recomputed"} <= after.preemptions.keys()
    assert after.loaded_bytes > 0


def test_host_memory_stays_closed_where_copies_are_not_exact(new_engine: NewEngine):
    with chaotic(new_engine, env={"TOKENFLOW_FAULT": "inexact_kv"}) as engine:
        expected, found, after = run_twice(engine, seed=8)
        log = engine.log()
    assert_equal(expected, found)
    assert (after.host_refused, after.host_tokens, after.loaded_bytes) == (1, 0, 0)
    assert "dropped" in after.preemptions
    assert "copies to host memory and back are not exact" in log


@thorough
@pytest.mark.parametrize("args", [["--disable-overlap-schedule"], ["--page-size", "1"]], ids=" ".join)
def test_two_ranks_in_other_configurations(new_engine: NewEngine, args: list[str]):
    with two_ranks(new_engine, *args, fault="") as engine:
        expected, found, after = run_twice(engine, seed=9)
    assert_equal(expected, found)
    assert {"resumed", "offloaded", "loaded"} <= after.preemptions.keys()


@thorough
def test_one_rank_whose_copies_are_not_exact_closes_host_memory_on_both(new_engine: NewEngine):
    with two_ranks(new_engine, fault="inexact_kv@1") as engine:
        expected, found, after = run_twice(engine, seed=9)
    assert_equal(expected, found)
    assert (after.host_refused, after.host_tokens, after.loaded_bytes) == (1, 0, 0)
