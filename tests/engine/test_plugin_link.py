"""The plugin in the real engine: exact counts, prompt and confirmed aborts, who may talk to it."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from support.completions import StreamedRequest, complete, new_rid
from support.raw_link import RawLink
from support.real_engine import RealEngine, wait_until
from tokenflow_engine.protocol import PROTOCOL_VERSION, EngineMessage, EngineStats, Refused, Welcome

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPTS = ["import os", "def main():", "class A"]


def chat(words: str = "hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}], "max_tokens": 24, **more}


def endless(**more: Any) -> dict[str, Any]:
    return chat(max_tokens=2000, ignore_eos=True, **more)


def mixed_requests() -> list[tuple[str, dict[str, Any]]]:
    """Twenty: plain, two samples, a list of prompts, both at once, cut by a stop string."""
    plain = [(CHAT, chat(f"request {i}", max_tokens=5 + 3 * i)) for i in range(12)]
    samples = [(CHAT, chat(f"sample {i}", n=2, temperature=1.0)) for i in range(3)]
    batches = [(TEXT, {"prompt": PROMPTS, "max_tokens": 9 + i}) for i in range(2)]
    both = [(TEXT, {"prompt": PROMPTS[:2], "n": 2, "max_tokens": 11, "temperature": 1.0})]
    stopped = [(CHAT, chat(stop=["e"])), (CHAT, chat(max_tokens=1))]
    return plain + samples + batches + both + stopped


def result(future: Future[int], link: RawLink) -> int:
    """The result of a request that runs in another thread, with the link kept alive meanwhile."""
    link.listen_until(future.done, timeout_s=90.0, what="the request is done")
    return future.result()


def test_the_welcome_says_what_this_engine_is(tiny_engine: RealEngine):
    with RawLink(tiny_engine.link, secret=tiny_engine.secret, gateway_id="welcome") as link:
        welcome = link.hello()
    assert isinstance(welcome, Welcome)
    assert (welcome.engine, welcome.kv_tokens, welcome.max_running) == ("sglang 0.5.23", 16384, 12)


def test_counts_equal_usage_for_twenty_concurrent_requests_of_every_kind(
    tiny_engine: RealEngine, link: RawLink
):
    requests = [(new_rid(), path, body) for path, body in mixed_requests()]
    assert len(requests) == 20
    for rid, _, _ in requests:
        link.open(rid)
    with ThreadPoolExecutor(20) as pool:
        futures = {
            rid: pool.submit(complete, tiny_engine.base_url, path, body | {"rid": rid})
            for rid, path, body in requests
        }
        usage = {rid: result(future, link) for rid, future in futures.items()}
    for rid in usage:
        link.until_state(rid, "finished")
    counted = {rid: link.history(rid)[-1] for rid in usage}
    assert counted == {rid: ("finished", tokens) for rid, tokens in usage.items()}
    assert link.next(EngineStats).hook_errors == 0
    for rid in usage:  # nothing said "finished" and went on
        assert [state for state, _ in link.history(rid)].count("finished") == 1


def test_a_stream_opened_late_is_told_the_whole_count(tiny_engine: RealEngine, link: RawLink):
    rid = new_rid()
    usage = complete(tiny_engine.base_url, CHAT, chat(rid=rid))
    link.open(rid)
    link.until_state(rid, "finished")
    assert link.history(rid) == [("finished", usage)]


def test_counts_of_other_gateways_are_not_told(tiny_engine: RealEngine, link: RawLink):
    rid = new_rid()
    with RawLink(tiny_engine.link, secret=tiny_engine.secret, gateway_id="other") as other:
        assert isinstance(other.hello(), Welcome)
        other.open(rid)
        complete(tiny_engine.base_url, CHAT, chat(rid=rid))
        other.until_state(rid, "finished")
    link.next(EngineStats)
    assert link.history(rid) == []


def is_idle(link: RawLink) -> bool:
    stats = link.next(EngineStats)
    return (stats.running, stats.waiting) == (0, 0)


def abort_in(link: RawLink, rid: str, *states: str) -> float:
    """Close the stream once it is in one of these states; seconds until the engine has confirmed."""
    link.until_state(rid, *states)
    start = time.monotonic()
    link.close_stream(rid)
    confirmed = link.next_aborted(rid)
    assert confirmed.was_live
    return time.monotonic() - start


@pytest.mark.parametrize("more", [{}, {"n": 3, "temperature": 1.0}], ids=["one", "three samples"])
def test_abort_in_decode(tiny_engine: RealEngine, link: RawLink, more: dict[str, Any]):
    rid = new_rid()
    link.open(rid)
    with StreamedRequest(tiny_engine.base_url, CHAT, endless(rid=rid, **more)) as request:
        for _, _ in zip(range(10), request.events(), strict=False):
            pass
        assert abort_in(link, rid, "running") < 1.0
    link.until_state(rid, "aborted")
    confirmed = [m for m in link.received if getattr(m, "rid", None) == rid][-1]
    assert confirmed.generated == link.history(rid)[-1][1] >= 5  # type: ignore[union-attr]
    wait_until(lambda: is_idle(link), timeout_s=10.0, what="the engine is idle")


def test_abort_while_waiting_leaves_the_others_alone(tiny_engine: RealEngine, link: RawLink):
    """The engine aborts by prefix; a stream whose id continues another's must live."""
    base = new_rid()
    running = [f"{base}{i:02}" for i in range(12)]
    waiting = base
    with ThreadPoolExecutor(13) as pool:
        for rid in [*running, waiting]:
            link.open(rid)
        others = [
            pool.submit(complete, tiny_engine.base_url, CHAT, chat(rid=rid, max_tokens=80, ignore_eos=True))
            for rid in running
        ]
        for rid in running:
            link.until_state(rid, "running")
        with StreamedRequest(tiny_engine.base_url, CHAT, endless(rid=waiting)):
            assert abort_in(link, waiting, "waiting") < 2.0  # the others' steps take their time
        assert [result(future, link) for future in others] == [80] * 12
    assert {state for state, _ in link.history(waiting)} == {"waiting", "aborted"}


def test_abort_in_a_long_prefill(tiny_engine: RealEngine, link: RawLink):
    rid = new_rid()
    link.open(rid)
    long = " ".join(f"{i} {rid[i % 32]}" for i in range(1200))
    with StreamedRequest(tiny_engine.base_url, CHAT, endless(rid=rid) | chat(long, rid=rid)):
        assert abort_in(link, rid, "running") < 1.0
    assert link.history(rid)[-1] == ("aborted", 0)  # it was still in its prompt


def test_a_request_that_arrives_after_its_close_never_runs(tiny_engine: RealEngine, link: RawLink):
    rid = new_rid()
    link.open(rid)
    link.close_stream(rid)
    assert not link.next_aborted(rid).was_live
    with StreamedRequest(tiny_engine.base_url, CHAT, endless(rid=rid)):
        late = link.next_aborted(rid, timeout_s=5.0)
    assert (late.was_live, late.generated) == (True, 0)
    wait_until(lambda: is_idle(link), timeout_s=10.0, what="the engine is idle")


def test_closing_a_finished_stream_is_confirmed_as_not_live(tiny_engine: RealEngine, link: RawLink):
    rid = new_rid()
    link.open(rid)
    usage = complete(tiny_engine.base_url, CHAT, chat(rid=rid))
    link.close_stream(rid)
    confirmed = link.next_aborted(rid, timeout_s=1.0)
    assert (confirmed.was_live, confirmed.generated) == (False, usage)


def test_an_idle_engine_answers_at_once(tiny_engine: RealEngine, link: RawLink):
    """The scheduler sleeps when idle; the link rings it."""
    wait_until(lambda: is_idle(link), timeout_s=10.0, what="the engine is idle")
    for _ in range(5):
        rid = new_rid()
        start = time.monotonic()
        link.close_stream(rid)
        link.next_aborted(rid, timeout_s=5.0)
        assert time.monotonic() - start < 0.5


def test_streams_of_a_gateway_that_was_replaced_end_with_its_process_and_not_before(
    tiny_engine: RealEngine, link: RawLink
):
    """A restart while the old process drains: both are there until the old one is gone."""
    drained, left = new_rid(), new_rid()
    gateway_id = new_rid()
    engine, secret = tiny_engine.link, tiny_engine.secret
    body = chat(max_tokens=300, ignore_eos=True)
    with RawLink(engine, secret=secret, gateway_id=gateway_id, incarnation="2") as new:
        with RawLink(engine, secret=secret, gateway_id=gateway_id) as old, ThreadPoolExecutor(1) as pool:
            old.hello()
            for rid in (drained, left):
                old.open(rid)
            draining = pool.submit(complete, tiny_engine.base_url, CHAT, body | {"rid": drained})
            old.until_state(drained, "running")
            assert isinstance(new.hello(), Welcome)
            assert result(draining, old) == 300
            old.until_state(drained, "finished")
            request = StreamedRequest(tiny_engine.base_url, CHAT, endless(rid=left))
            old.until_state(left, "running")
        lost_at = time.time()
        with request:
            new.ping()
            new.wait(lambda m: _runs_one(m, since=lost_at), what="a lost link ends nothing at once")
            wait_until(lambda: is_idle(new), timeout_s=5.0, what="the old process's stream is gone")


def _runs_one(message: EngineMessage, *, since: float) -> bool:
    return isinstance(message, EngineStats) and message.at > since and message.running == 1


def test_a_gateway_that_comes_back_finds_its_streams(tiny_engine: RealEngine):
    rid = new_rid()
    gateway_id = new_rid()
    with RawLink(tiny_engine.link, secret=tiny_engine.secret, gateway_id=gateway_id) as first:
        first.hello()
        first.open(rid)
        request = StreamedRequest(tiny_engine.base_url, CHAT, chat(rid=rid, max_tokens=100, ignore_eos=True))
        first.until_state(rid, "running")
    with request, RawLink(tiny_engine.link, secret=tiny_engine.secret, gateway_id=gateway_id) as again:
        assert isinstance(again.hello(), Welcome)
        again.open(rid)
        with ThreadPoolExecutor(1) as pool:
            assert result(pool.submit(request.finish), again) == 100
        again.until_state(rid, "finished")
        assert again.history(rid)[-1] == ("finished", 100)


@pytest.mark.parametrize(
    ("secret", "version", "code"), [("wrong", PROTOCOL_VERSION, "bad_secret"), (None, 99, "bad_version")]
)
def test_strangers_are_refused_with_a_log_line(
    tiny_engine: RealEngine, secret: str | None, version: int, code: str
):
    name = f"stranger-{code}"
    with RawLink(tiny_engine.link, secret=secret or tiny_engine.secret, gateway_id=name) as stranger:
        answer = stranger.hello(version=version)
    assert isinstance(answer, Refused)
    assert answer.code == code
    lines = [line for line in tiny_engine.log().splitlines() if name in line]
    assert len(lines) == 1
    assert f"refused gateway {name!r} ({code})" in lines[0]
