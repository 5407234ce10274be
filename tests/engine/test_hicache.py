"""HiCache beside us: the tree and its host copies are its own, the KV of preempted streams is ours.

On a CPU HiCache runs with `tokenflow_engine.sglang.cpu_hicache`: its tree, its host pool and its rules are
the real ones, its copies are done when they are begun.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.equality import (
    HICACHE,
    LIMIT_S,
    REQUESTS,
    NewEngine,
    assert_equal,
    assert_preempted,
    chaotic,
    differing,
)
from support.generation import Answer, Ask, asks, flush, generate, generate_all, use_policy
from support.raw_link import RawLink
from support.real_engine import RealEngine
from tokenflow_engine.protocol import EngineStats

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]

thorough = pytest.mark.skipif(
    os.environ.get("TOKENFLOW_THOROUGH") != "1", reason="`make soak` runs every configuration"
)

LOADED_BACK = "sglang:load_back_tokens_total"
HOST_USED = "sglang:hicache_host_used_tokens"


def hicache_tokens(engine: RealEngine, name: str) -> float:
    """One of SGLang's own metrics."""
    with urllib.request.urlopen(engine.base_url + "/metrics", timeout=10.0) as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def run_on_what_was_evicted(
    engine: RealEngine, *, seed: int
) -> tuple[list[Answer], list[Answer], EngineStats]:
    """Stock, and again preempted at random; the second time HiCache has most prompts in host memory."""
    wanted = asks(REQUESTS, seed=seed)
    with RawLink(engine.link, secret=engine.secret) as link:
        link.hello()
        use_policy(link, "fcfs")
        expected = generate_all(engine, link, wanted, tag=f"calm{seed}")
        before = hicache_tokens(engine, LOADED_BACK)
        use_policy(link, "chaos")
        found = generate_all(engine, link, wanted, tag=f"chaos{seed}")
        after = link.next(EngineStats)
        use_policy(link, "fcfs")
    print(after.preemptions, hicache_tokens(engine, LOADED_BACK))  # noqa: T201
    assert (after.hook_errors, after.plan_errors) == (0, 0)
    assert_preempted(engine, [f"chaos{seed}-{i}" for i in range(REQUESTS)])
    assert hicache_tokens(engine, LOADED_BACK) > before
    return expected, found, after


@pytest.fixture(scope="module")
def engine(new_engine: NewEngine) -> Iterator[RealEngine]:
    with chaotic(new_engine, *HICACHE) as engine:
        yield engine


def test_both_move_kv_and_no_token_changes(engine: RealEngine):
    expected, found, after = run_on_what_was_evicted(engine, seed=21)
    assert_equal(expected, found)
    assert {"resumed", "offloaded", "loaded", "recomputed"} <= after.preemptions.keys()
    assert after.loaded_bytes > 0


def test_a_flush_empties_both_host_memories(engine: RealEngine):
    with RawLink(engine.link, secret=engine.secret) as link:
        link.hello()
        use_policy(link, "chaos")
        generate_all(engine, link, asks(4, seed=22), tag="before")
        assert hicache_tokens(engine, HOST_USED) > 0
        use_policy(link, "fcfs")
        flush(engine)
        [again] = generate_all(engine, link, [Ask("x", 1)], tag="after")
        stats = link.next(EngineStats)
    assert again.tokens
    assert hicache_tokens(engine, HOST_USED) == 0
    assert stats.host_used_tokens == 0


def test_prompts_of_streams_in_host_memory_may_be_evicted_from_the_tree(new_engine: NewEngine):
    """They come back whole when their prompt has left the device, and soft-held ones keep theirs there."""
    wanted = asks(6, seed=23)
    rids = [f"{'hard' if i % 3 else 'soft'}-{i}" for i in range(len(wanted))]
    with (
        chaotic(new_engine, *HICACHE, moves="0:hold") as engine,
        RawLink(engine.link, secret=engine.secret) as link,
        ThreadPoolExecutor(len(rids)) as pool,
    ):
        link.hello()
        use_policy(link, "fcfs")
        expected = generate_all(engine, link, wanted, tag="calm")
        flush(engine)
        use_policy(link, "chaos")
        held = [pool.submit(generate, engine, rid, ask) for rid, ask in zip(rids, wanted, strict=True)]
        link.wait(
            lambda m: isinstance(m, EngineStats) and (m.running, m.parked, m.offloaded) == (0, 2, 4),
            what="two are parked, four offloaded",
            timeout_s=60.0,
        )
        for turn in range(3):
            generate_all(engine, link, asks(6, seed=30 + turn), tag=f"flood{turn}")
        use_policy(link, "fcfs")
        link.listen_until(lambda: all(f.done() for f in held), timeout_s=60.0, what="all are back")
        assert_equal(expected, [future.result() for future in held])
        flush(engine)  # which an engine with anything left refuses


@thorough
def test_with_our_host_memory_corrupted_the_comparison_fails(new_engine: NewEngine):
    with chaotic(new_engine, *HICACHE, moves="3:evict,load", env={"TOKENFLOW_FAULT": "corrupt_kv"}) as engine:
        expected, found, _ = run_on_what_was_evicted(engine, seed=24)
        assert len(differing(expected, found)) > REQUESTS // 4


@thorough
@pytest.mark.parametrize(
    "args",
    [
        ["--page-size", "1"],
        ["--disable-overlap-schedule"],
        ["--hicache-write-policy", "write_back"],
        ["--hicache-ratio", "1.1"],  # HiCache's own host memory fills up, too
    ],
    ids=" ".join,
)
def test_other_configurations_of_hicache(new_engine: NewEngine, args: list[str]):
    with chaotic(new_engine, *HICACHE, *args, moves="5") as engine:
        expected, found, after = run_on_what_was_evicted(engine, seed=25)
        assert_equal(expected, found)
        assert "loaded" in after.preemptions
