"""Host memory for KV: shared out over tensor-parallel ranks, and closed where copies are not exact."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from support.equality import HICACHE, LIMIT_S, REQUESTS, NewEngine, assert_equal, chaotic, run_twice
from support.generation import Answer, Ask, asks, flush, generate, generate_all, use_policy
from support.raw_link import RawLink
from support.real_engine import RealEngine
from tokenflow_engine.protocol import (
    Consumption,
    EngineStats,
    Reading,
    StreamOpened,
    StreamState,
    StreamStates,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]

thorough = pytest.mark.skipif(
    os.environ.get("TOKENFLOW_THOROUGH") != "1", reason="`make soak` runs every configuration"
)


TWO_RANKS = ("--tp-size", "2")
ON_TWO_CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def two_ranks(new_engine: NewEngine, *args: str, fault: str) -> AbstractContextManager[RealEngine]:
    """Each with half of the heads on a core of its own; host memory is opened as the engine starts."""
    env = {**ON_TWO_CORES, "TOKENFLOW_POLICY": "chaos", "TOKENFLOW_FAULT": fault}
    return chaotic(new_engine, *TWO_RANKS, *args, env=env)


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


PAUSED = ["hard-paused-0", "hard-paused-1"]
READING = ["hard-reading-0", "hard-reading-1"]
STORY = Ask("a long story begins with these words, and then it goes on: " * 3, 60)
ROOM_FOR_TWO = 128


def test_in_a_full_pool_paused_readers_make_room_for_others(new_engine: NewEngine):
    """The readers of the two streams that fill it pause; then two others have to leave the device.

    Those who pause are computed again. Where nothing is known of pauses, those who leave are.
    """
    with (
        ThreadPoolExecutor(4) as pool,
        chaotic(
            new_engine,
            "--disable-radix-cache",
            moves="0:hold,stay",
            tokens=4096,
            env={"TOKENFLOW_HOST_KV_TOKENS": str(ROOM_FOR_TWO)},
        ) as engine,
        RawLink(engine.link, secret=engine.secret) as link,
    ):
        link.hello()
        use_policy(link, "fcfs")
        [expected] = generate_all(engine, link, [STORY], tag="calm")
        for policy, stay, go in (("chaos", READING, PAUSED), ("chaos:pauses=0", PAUSED, READING)):
            use_policy(link, policy)
            first = take_out(engine, link, pool, PAUSED, offloaded=2, waiting=0)
            second = take_out(engine, link, pool, READING, offloaded=2, waiting=2)
            assert [state.state for state in last_states(link, stay)] == ["parked", "parked"]
            assert [state.reason for state in last_states(link, go)] == ["host_full", "host_full"]
            assert link.next(EngineStats).host_used_tokens == ROOM_FOR_TWO
            use_policy(link, "fcfs")
            answers = first + second
            link.listen_until(lambda: all(a.done() for a in answers), timeout_s=60.0, what="answers")  # noqa: B023
            assert [answer.result().tokens for answer in answers] == [expected.tokens] * 4
        after = link.next(EngineStats)
    assert (after.plan_errors, after.hook_errors) == (0, 0)
    by_kind = after.preemptions
    assert (by_kind["made_room"], by_kind["dropped"], by_kind["loaded"]) == (2, 2, 4)
    assert sum(after.return_s["recomputed"].counts) == 4


def take_out(
    engine: RealEngine,
    link: RawLink,
    pool: ThreadPoolExecutor,
    rids: list[str],
    *,
    offloaded: int,
    waiting: int,
) -> list[Future[Answer]]:
    """Start these streams, and wait until the policy has taken them off the device."""
    for rid in rids:
        link.send(StreamOpened(rid=rid, at=time.time(), declared_rate=1.0))
    link.send(Consumption(readings=[reading(rid, paused=rids is PAUSED) for rid in rids]))
    answers = [pool.submit(generate, engine, rid, STORY) for rid in rids]
    link.wait(
        lambda m: (
            isinstance(m, EngineStats) and (m.running, m.offloaded, m.waiting) == (0, offloaded, waiting)
        ),
        what=f"{offloaded} in host memory, {waiting} computed again",
        timeout_s=30.0,
    )
    return answers


def reading(rid: str, *, paused: bool) -> Reading:
    return Reading(
        rid=rid, at=time.time(), consumed=0.0, rate=1.0, rate_low=1.0, rate_high=1.0, paused=paused, seq=1
    )


def last_states(link: RawLink, rids: list[str]) -> list[StreamState]:
    states = [s for m in link.received if isinstance(m, StreamStates) for s in m.states]
    return [[s for s in states if s.rid == rid][-1] for rid in rids]


@thorough
@pytest.mark.parametrize(
    "args",
    [(), ("--disable-overlap-schedule", "--page-size", "1"), TWO_RANKS, HICACHE],
    ids=" ".join,
)
def test_in_a_pool_that_is_always_full_no_token_changes(new_engine: NewEngine, args: tuple[str, ...]):
    """Streams give way to each other at random; readers are slow, so that some are due much later."""
    wanted = asks(REQUESTS, seed=10)
    env = {"TOKENFLOW_HOST_KV_TOKENS": "512", **(ON_TWO_CORES if args == TWO_RANKS else {})}
    with (
        chaotic(new_engine, *args, moves="3", env=env) as engine,
        RawLink(engine.link, secret=engine.secret) as link,
    ):
        link.hello()
        use_policy(link, "fcfs")
        expected = generate_all(engine, link, wanted, tag="calm")
        flush(engine)
        use_policy(link, "chaos")
        for number in range(REQUESTS):
            link.send(StreamOpened(rid=f"full-{number}", at=time.time(), declared_rate=0.5))
        found = generate_all(engine, link, wanted, tag="full")
        after = link.next(EngineStats)
    assert_equal(expected, found)
    assert {"made_room", "dropped", "loaded"} <= after.preemptions.keys()
    assert (after.plan_errors, after.hook_errors, after.host_used_tokens) == (0, 0, 0)


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
