"""The same requests twice, stock and preempted at random, and what to compare."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from support.generation import Answer, Ask, asks, flush, generate_all, use_policy
from support.raw_link import RawLink
from support.real_engine import RealEngine
from tokenflow_engine.protocol import EngineStats

__all__ = ["REQUESTS", "NewEngine", "assert_equal", "chaotic", "differing", "run_twice"]

REQUESTS = int(os.environ.get("TOKENFLOW_TEST_REQUESTS", "16"))
"""At once, in each run; 200 for a thorough one."""
CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_DEBUG_MEMORY_POOL": "1",
}
"""The engine's own."""

NewEngine = Callable[..., RealEngine]


def chaotic(
    new_engine: NewEngine,
    *args: str,
    moves: str = "1",
    tokens: int = 2048,
    env: dict[str, str] | None = None,
    probed: bool = False,
) -> AbstractContextManager[RealEngine]:
    """An engine with the policy `chaos`, and half the memory that all `REQUESTS` would need."""
    env = {"TOKENFLOW_CHAOS": moves, **CHECKS, **(env or {})}
    return new_engine("--max-total-tokens", str(tokens), *args, env=env, probed=probed)


def run_twice(
    engine: RealEngine, *, seed: int, wanted: Sequence[Ask] | None = None
) -> tuple[list[Answer], list[Answer], EngineStats]:
    """The same requests stock and preempted at random, and what was done to the latter."""
    wanted = wanted or asks(REQUESTS, seed=seed)
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
    """Which answers are not the same, token for token."""
    return [
        i
        for i, (one, other) in enumerate(zip(expected, found, strict=True))
        if one.tokens != other.tokens or one.finish != other.finish
    ]


def assert_equal(expected: list[Answer], found: list[Answer]) -> None:
    """All answers are the same."""
    assert all(len(answer.tokens) > 0 for answer in expected)
    assert differing(expected, found) == []
