"""The plugin fails open: with every one of its hooks broken the engine serves as the stock engine would."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.completions import StreamedRequest, complete, new_rid
from support.engine_processes import cpu_s, the_process
from support.raw_link import RawLink
from support.real_engine import RealEngine, wait_until
from tokenflow_engine.protocol import EngineStats, Hello, Welcome

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHAT = "/v1/chat/completions"
ALL_HOOKS = {"init", "pull", "state", "count", "end", "idle", "rid"}  # "control" needs a link


def serves_everybody(engine: RealEngine) -> dict[str, int]:
    """Ten requests at once, two samples each for the odd ones; their usage by rid."""
    bodies: dict[str, dict[str, Any]] = {
        new_rid(): {
            "messages": [{"role": "user", "content": f"request {i}"}],
            "max_tokens": 20,
            "ignore_eos": True,
            "n": 1 + i % 2,
        }
        for i in range(10)
    }
    with ThreadPoolExecutor(10) as pool:
        futures = {
            rid: pool.submit(complete, engine.base_url, CHAT, body | {"rid": rid})
            for rid, body in bodies.items()
        }
        usage = {rid: future.result() for rid, future in futures.items()}
    assert usage == {rid: 20 * body["n"] for rid, body in bodies.items()}
    return usage


def caught_in(engine: RealEngine) -> set[str]:
    return set(re.findall(r"TokenFlow: an error in hook '(\w+)' was caught", engine.log()))


def test_with_every_hook_failing_requests_complete_and_the_log_says_why(
    new_engine: Callable[..., RealEngine],
):
    with new_engine(env={"TOKENFLOW_FAULT": "all"}) as engine:
        serves_everybody(engine)
        leaver = {"messages": [{"role": "user", "content": "x " * 2000}], "max_tokens": 2000}
        with StreamedRequest(engine.base_url, CHAT, leaver | {"rid": new_rid()}) as request:
            next(request.events())
        wait_until(lambda: caught_in(engine) >= ALL_HOOKS - {"end"}, timeout_s=20.0, what="errors are logged")
        serves_everybody(engine)
        assert engine.is_alive()


def test_a_hook_that_fails_now_and_then_costs_accuracy_and_not_the_link(
    new_engine: Callable[..., RealEngine],
):
    """The negative control of the exact counts: they come from the hook that is broken here."""
    with new_engine(env={"TOKENFLOW_FAULT": "count/2"}) as engine:
        asks = {new_rid(): {"prompt": "x", "max_tokens": 5 + i, "ignore_eos": True} for i in range(8)}
        usage = {
            rid: complete(engine.base_url, "/v1/completions", ask | {"rid": rid}) for rid, ask in asks.items()
        }
        with RawLink(engine.link, secret=engine.secret) as link:
            assert isinstance(link.hello(), Welcome)
            for rid in usage:
                link.open(rid)
            for _ in range(5):
                stats = link.next(EngineStats)
            assert stats.hook_errors > 0
            told = {rid: link.history(rid)[-1][1] for rid in usage if link.history(rid)}
            assert told
            assert any(told[rid] != usage[rid] for rid in told)
        assert "count" in caught_in(engine)


@pytest.mark.parametrize("hook", ["pull", "count"])
def test_a_hook_that_always_fails_takes_the_plugin_out_and_leaves_a_stock_engine(
    new_engine: Callable[..., RealEngine], hook: str
):
    detached = f"TokenFlow: hook '{hook}' has failed 20 times in a row: the link is closed"
    with new_engine(env={"TOKENFLOW_FAULT": hook}) as engine:
        serves_everybody(engine)
        wait_until(lambda: detached in engine.log(), timeout_s=30.0, what="the plugin is out")
        assert engine.log().count(detached) == 1
        with RawLink(engine.link, secret=engine.secret) as link:
            link.send(Hello(version=1, gateway_id="late", incarnation="1", secret=engine.secret))
            with pytest.raises(AssertionError):
                link.next(Welcome, timeout_s=1.0)
        serves_everybody(engine)
        assert idle_share(engine) < 0.3


def idle_share(engine: RealEngine, *, for_s: float = 2.0) -> float:
    """The share of one core that the scheduler takes while nobody asks anything."""
    scheduler = the_process(engine, "scheduler")
    before = cpu_s(scheduler)
    time.sleep(for_s)  # the span that is measured
    return (cpu_s(scheduler) - before) / for_s
