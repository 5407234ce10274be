"""Preempted at random, in every way there is, and nobody can tell: the same tokens as without.

The model's output hardly repeats itself (`support.tiny_model`), so that a wrong KV cache shows at the next
token; the negative control shows that it does. The engine's own memory checks are on at every step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from support.generation import Answer, asks, flush, generate_all, use_policy
from support.raw_link import RawLink
from support.real_engine import RealEngine
from tokenflow_engine.protocol import EngineStats, Welcome

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

thorough = pytest.mark.skipif(
    os.environ.get("TOKENFLOW_THOROUGH") != "1", reason="`make soak` runs every configuration"
)

REQUESTS = int(os.environ.get("TOKENFLOW_TEST_REQUESTS", "16"))
"""At once, in each run; 200 for a thorough one."""
CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_DEBUG_MEMORY_POOL": "1",
}
LOGPROB_NOISE = 1e-3
"""Two batches of different size do not add in the same order."""

NewEngine = Callable[..., RealEngine]


def chaotic(
    new_engine: NewEngine, *args: str, moves: str = "1", tokens: int = 2048, env: dict[str, str] | None = None
) -> AbstractContextManager[RealEngine]:
    return new_engine(
        "--max-total-tokens", str(tokens), *args, env={"TOKENFLOW_CHAOS": moves, **CHECKS, **(env or {})}
    )


@pytest.fixture(scope="module")
def pressed(new_engine: NewEngine) -> Iterator[RealEngine]:
    """Overlap loop, pages of 16, chunked prompts, and half the memory that all would need."""
    with chaotic(new_engine) as engine:
        yield engine


def run_twice(engine: RealEngine, *, seed: int) -> tuple[list[Answer], list[Answer], EngineStats]:
    """The same requests stock and preempted at random, and what was done to the latter."""
    wanted = asks(REQUESTS, seed=seed)
    with RawLink(engine.link, secret=engine.secret) as link:
        link.hello()
        use_policy(link, "fcfs")
        expected = generate_all(engine, link, wanted, tag=f"calm{seed}")
        flush(engine)
        use_policy(link, "chaos")
        found = generate_all(engine, link, wanted, tag=f"chaos{seed}")
        after = link.next(EngineStats)
        use_policy(link, "fcfs")
    assert after.hook_errors == 0
    assert after.plan_errors == 0
    print(after.preemptions)  # noqa: T201 - what a thorough run wants to know
    assert after.preemptions["parked"] > REQUESTS
    return expected, found, after


def differing(expected: list[Answer], found: list[Answer]) -> list[int]:
    return [
        i
        for i, (one, other) in enumerate(zip(expected, found, strict=True))
        if one.tokens != other.tokens or one.finish != other.finish
    ]


def assert_equal(expected: list[Answer], found: list[Answer]) -> None:
    assert all(len(answer.tokens) > 0 for answer in expected)
    assert differing(expected, found) == []


def test_every_way_out_and_back_under_memory_pressure(pressed: RealEngine):
    """Shared prefixes too, and the log-probabilities of every third request."""
    expected, found, after = run_twice(pressed, seed=1)
    assert_equal(expected, found)
    assert {"resumed", "offloaded", "loaded", "recomputed"} <= after.preemptions.keys()
    assert after.loaded_bytes > 0
    with_logprobs = [pair for pair in zip(expected, found, strict=True) if pair[0].logprobs]
    assert with_logprobs
    for one, other in with_logprobs:
        assert [token for _, token in one.logprobs] == [token for _, token in other.logprobs]
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        assert max(abs(a - b) for (a, _), (b, _) in pairs) < LOGPROB_NOISE


def test_the_normal_loop_with_pages_of_one_token_and_mixed_passes(new_engine: NewEngine):
    args = ["--disable-overlap-schedule", "--page-size", "1", "--enable-mixed-chunk"]
    with chaotic(new_engine, *args, moves="2") as engine:
        expected, found, after = run_twice(engine, seed=3)
        assert_equal(expected, found)
        assert {"resumed", "offloaded", "loaded", "recomputed"} <= after.preemptions.keys()


def test_the_policies_that_ship_change_who_waits_and_no_token(pressed: RealEngine):
    """With readers known to the engine, as if a gateway had opened the streams."""
    wanted = asks(REQUESTS, seed=6)
    with RawLink(pressed.link, secret=pressed.secret) as link:
        welcome = link.hello()
        assert isinstance(welcome, Welcome)
        use_policy(link, "fcfs")
        expected = generate_all(pressed, link, wanted, tag="fcfs", announce=True)
        before = link.next(EngineStats).preemptions
        for policy in set(welcome.policies) - {"fcfs"}:
            flush(pressed)
            use_policy(link, policy)
            found = generate_all(pressed, link, wanted, tag=policy, announce=True)
            assert_equal(expected, found)
            use_policy(link, "fcfs")
        stats = link.next(EngineStats)
    assert (stats.hook_errors, stats.plan_errors) == (0, 0)
    assert sum(stats.preemptions.values()) > sum(before.values())


def test_with_host_memory_corrupted_the_comparison_fails(new_engine: NewEngine):
    """The negative control: KV that was zeroed in host memory comes back, and the text is another."""
    env = {"TOKENFLOW_FAULT": "corrupt_kv"}
    args = ["--disable-radix-cache"]  # or some streams would come back from the prefix cache
    with chaotic(new_engine, *args, moves="3:evict,load", env=env) as engine:
        expected, found, _ = run_twice(engine, seed=4)
        assert len(differing(expected, found)) > REQUESTS // 2


@thorough
@pytest.mark.parametrize(
    ("args", "env", "ways_back"),
    [
        (["--page-size", "1"], {}, {"loaded"}),
        (["--enable-mixed-chunk"], {}, {"loaded"}),
        (["--disable-overlap-schedule"], {}, {"loaded"}),
        (["--disable-radix-cache"], {}, {"loaded"}),
        (["--page-size", "1", "--disable-radix-cache", "--disable-overlap-schedule"], {}, {"loaded"}),
        (["--schedule-policy", "lpm"], {}, {"loaded"}),
        ([], {"TOKENFLOW_HOST_KV_TOKENS": "0"}, {"dropped"}),
        ([], {"TOKENFLOW_HOST_KV_TOKENS": "512"}, {"dropped", "loaded"}),
        (["--disable-radix-cache"], {"TOKENFLOW_FAULT": "fail_kv"}, {"failed_loads"}),
        ([], {"SGLANG_TEST_RETRACT": "1"}, {"loaded"}),
        (["--tp-size", "2"], {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, {"dropped"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_other_configurations(
    new_engine: NewEngine, args: list[str], env: dict[str, str], ways_back: set[str]
):
    with chaotic(new_engine, *args, moves="5", env=env) as engine:
        expected, found, after = run_twice(engine, seed=5)
        assert_equal(expected, found)
        assert ways_back <= after.preemptions.keys()
