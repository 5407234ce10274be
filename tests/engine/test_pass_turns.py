"""Who reads goes on reading while a burst of newcomers is prefilled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.generation import Ask, flush, generate, use_policy
from support.raw_link import RawLink
from support.real_engine import RealEngine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NEWCOMERS = 6


def tokens_meanwhile(engine: RealEngine, link: RawLink, policy: str) -> int:
    """That a running stream gets from when newcomers with long prompts come until all are prefilled."""
    use_policy(link, policy)
    flush(engine)
    reader = f"{policy}-reader"
    rids = [f"{policy}-{i}" for i in range(NEWCOMERS)]
    for rid in [reader, *rids]:
        link.open(rid)
    with ThreadPoolExecutor(1 + NEWCOMERS) as pool:
        running = pool.submit(generate, engine, reader, Ask("once upon a time", 300))
        link.listen_until(lambda: _generated(link, reader) >= 5, timeout_s=30.0, what="the reader has text")
        before = _generated(link, reader)
        asks = [Ask(f"newcomer {i} asks " + f"why {i} and how " * 60, 1) for i in range(NEWCOMERS)]
        futures = [pool.submit(generate, engine, rid, ask) for rid, ask in zip(rids, asks, strict=True)]
        link.listen_until(
            lambda: all(future.done() for future in futures), timeout_s=60.0, what="newcomers are prefilled"
        )
        meanwhile = _generated(link, reader) - before
        link.listen_until(running.done, timeout_s=60.0, what="the reader's stream is over")
    return meanwhile


def _generated(link: RawLink, rid: str) -> int:
    return max((generated for _, generated in link.history(rid)), default=0)


def test_decode_steps_go_between_the_prefills_of_a_burst(tiny_engine: RealEngine, link: RawLink):
    """Stock SGLang prefills all of them first: that is the control."""
    stock = tokens_meanwhile(tiny_engine, link, "fcfs")
    ours = tokens_meanwhile(tiny_engine, link, "adaptive")
    use_policy(link, "fcfs")
    assert ours >= max(10, 2 * stock)
