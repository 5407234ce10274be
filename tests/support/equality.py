"""The same requests twice, stock and preempted at random, and what to compare."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager

from support.generation import Answer, Ask, asks, flush, generate_all, use_policy
from support.raw_link import RawLink
from support.real_engine import RealEngine
from tokenflow_engine.protocol import EngineStats

__all__ = [
    "HICACHE",
    "LIMIT_S",
    "REQUESTS",
    "NewEngine",
    "assert_equal",
    "assert_preempted",
    "chaotic",
    "differing",
    "run_twice",
]

REQUESTS = int(os.environ.get("TOKENFLOW_TEST_REQUESTS", "16"))
"""At once, in each run; 200 for a thorough one."""
LIMIT_S = 300 + 6 * REQUESTS
"""For a test of so many."""
LOGPROB_NOISE = 1e-3
"""Two batches of different size do not add in the same order."""
CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_DEBUG_MEMORY_POOL": "1",
}
"""The engine's own."""
HICACHE = ("--enable-hierarchical-cache", "--enable-metrics")
"""SGLang's own host memory, and what counts what it does."""

NewEngine = Callable[..., RealEngine]


def chaotic(
    new_engine: NewEngine,
    *args: str,
    moves: str = "1",
    tokens: int = 2048,
    env: dict[str, str] | None = None,
    probed: bool = False,
) -> AbstractContextManager[RealEngine]:
    """An engine with the policy `chaos`, and less memory than the requests that it may run would need."""
    env = {"TOKENFLOW_CHAOS": moves, **CHECKS, **(env or {})}
    return new_engine("--max-total-tokens", str(tokens), *args, env=env, probed=probed)


def run_twice(
    engine: RealEngine, *, seed: int, wanted: Sequence[Ask] | None = None, fixed: Container[int] = ()
) -> tuple[list[Answer], list[Answer], EngineStats]:
    """The same requests stock and preempted at random, and what was done to the latter.

    Every one of them has been preempted, but for the `fixed`, which never are.
    """
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
    assert_preempted(engine, [f"chaos{seed}-{i}" for i in range(len(wanted)) if i not in fixed])
    assert_preempted(engine, [f"chaos{seed}-{i}" for i in range(len(wanted)) if i in fixed], never=True)
    print(after.preemptions)  # noqa: T201 - what a thorough run wants to know
    return expected, found, after


def assert_preempted(engine: RealEngine, rids: list[str], *, never: bool = False) -> None:
    """Each of these requests was preempted at least once, or `never`, by what `chaos` has logged."""
    logged: list[tuple[str, str]] = re.findall(r"chaos has preempted (\S+) (\d+) times", engine.log())
    last = dict(logged)
    times = {rid: int(last.get(rid, 0)) for rid in rids}
    print("requests by preemptions:", dict(sorted(Counter(times.values()).items())))  # noqa: T201
    assert [rid for rid in rids if (times[rid] > 0) is never] == []


def differing(expected: list[Answer], found: list[Answer]) -> list[int]:
    """Which answers are not the same, token for token."""
    return [
        i
        for i, (one, other) in enumerate(zip(expected, found, strict=True))
        if one.tokens != other.tokens or one.finish != other.finish
    ]


def assert_equal(expected: list[Answer], found: list[Answer]) -> None:
    """All answers are the same, and so are the log-probabilities of those that have them."""
    assert all(len(answer.tokens) > 0 for answer in expected)
    assert differing(expected, found) == []
    for one, other in zip(expected, found, strict=True):
        assert [token for _, token in one.logprobs] == [token for _, token in other.logprobs]
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        assert max((abs(a - b) for (a, _), (b, _) in pairs), default=0.0) < LOGPROB_NOISE
