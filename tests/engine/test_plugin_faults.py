"""The plugin fails open: with every one of its hooks broken the engine serves as the stock engine would."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from support.completions import StreamedRequest, complete, new_rid
from support.engine_processes import cpu_s, the_process
from support.generation import use_policy
from support.raw_link import RawLink
from support.real_engine import RealEngine, wait_until
from tokenflow_engine.protocol import Aborted, EngineStats, Hello, SetPolicy, Welcome

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

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


def test_bad_settings_and_bad_messages_cost_themselves_alone(new_engine: Callable[..., RealEngine]):
    """Host memory of no size; then every second message raises as it is carried out."""
    env = {"TOKENFLOW_POLICY": "adaptive", "TOKENFLOW_HOST_KV_TOKENS": "abc", "TOKENFLOW_FAULT": "message/2"}
    with new_engine(env=env) as engine, RawLink(engine.link, secret=engine.secret) as link:
        link.hello()
        stats = link.next(EngineStats)
        assert (stats.policy, stats.host_tokens, stats.hook_errors) == ("adaptive", 0, 0)
        wait_until(
            lambda: "no host memory for KV: TOKENFLOW_HOST_KV_TOKENS='abc' is no number" in engine.log(),
            timeout_s=10.0,
            what="the log says why",
        )
        rids = [new_rid() for _ in range(20)]
        for rid in rids:
            link.send(SetPolicy(policy="fcfs"))  # is lost
            link.close_stream(rid)
        link.listen_until(
            lambda: {m.rid for m in link.received if isinstance(m, Aborted)} == set(rids),
            timeout_s=10.0,
            what="every stream that was closed is confirmed",
        )
        stats = link.next(EngineStats)
        assert (stats.policy, stats.hook_errors) == ("adaptive", 20)
        assert caught_in(engine) == {"message"}


def test_numbers_that_cannot_be_do_not_stop_a_policy(tiny_engine: RealEngine):
    with RawLink(tiny_engine.link, secret=tiny_engine.secret) as link, ThreadPoolExecutor(3) as pool:
        link.hello()
        use_policy(link, "adaptive")
        before = link.next(EngineStats)
        rids = [new_rid() for _ in range(3)]
        for rid in rids:
            opened = {"type": "StreamOpened", "rid": rid, "at": 0, "weight": -1.0, "ttft_s": 0.0}
            link.send_bytes(msgspec.msgpack.encode(opened))
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
        futures = [
            pool.submit(complete, tiny_engine.base_url, "/v1/completions", body | {"rid": rid})
            for rid in rids
        ]
        for rid, number in zip(rids, (0.0, math.nan, -math.inf), strict=True):
            link.until_state(rid, "running", "finished")
            reading = dict.fromkeys(("at", "consumed", "rate", "rate_low", "rate_high"), number)
            message = {"type": "Consumption", "readings": [{"rid": rid, **reading}]}
            link.send_bytes(msgspec.msgpack.encode(message))
        link.listen_until(lambda: all(f.done() for f in futures), timeout_s=60.0, what="all are done")
        assert [future.result() for future in futures] == [100] * 3
        stats = link.next(EngineStats)
        use_policy(link, "fcfs")
    assert stats.policy == "adaptive"
    assert (stats.plan_errors, stats.hook_errors) == (before.plan_errors, before.hook_errors)
    assert stats.plans > before.plans


def idle_share(engine: RealEngine, *, for_s: float = 2.0) -> float:
    """The share of one core that the scheduler takes while nobody asks anything."""
    scheduler = the_process(engine, "scheduler")
    before = cpu_s(scheduler)
    time.sleep(for_s)  # the span that is measured
    return (cpu_s(scheduler) - before) / for_s
