"""Streams that are out of the batch: aborted, drained, flushed around, paused, and never lost.

The policy `chaos:hold` parks streams whose id begins with ``soft``, takes those with ``hard`` off the device,
and leaves them there, so that a test knows where they are.
"""

from __future__ import annotations

import json
import shutil
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from support.generation import Answer, Ask, asks, flush, generate, generate_all, post, use_policy
from support.raw_link import RawLink
from support.real_engine import RealEngine
from tokenflow_engine.protocol import EngineStats, SetPolicy, StreamStates

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
WHERE = ("soft", "hard")
HELD_AT = 5
"""Tokens that a stream has generated before the policy takes it out."""
LONG = Ask("a long story begins with these words, and then it goes on: " * 3, 200)


@pytest.fixture(scope="module")
def engine(new_engine: Callable[..., RealEngine]) -> Iterator[RealEngine]:
    """Its prefix cache is off, so that what left the device can only come back from host memory."""
    with new_engine("--disable-radix-cache", env={"TOKENFLOW_CHAOS": "0:hold", **CHECKS}) as engine:
        yield engine


@pytest.fixture
def link(engine: RealEngine) -> Iterator[RawLink]:
    with RawLink(engine.link, secret=engine.secret) as link:
        link.hello()
        use_policy(link, "chaos")
        yield link
        use_policy(link, "fcfs")
        until_idle(link)
        flush(engine)  # which an engine with anything left refuses


def until_idle(link: RawLink) -> None:
    link.wait(
        lambda m: (
            isinstance(m, EngineStats) and (m.running, m.waiting, m.parked, m.offloaded) == (0, 0, 0, 0)
        ),
        what="nothing is left in the engine",
        timeout_s=60.0,
    )


class HeldStreams:
    """Requests that run in threads, held by the engine once `until_held` returns."""

    def __init__(self, engine: RealEngine, link: RawLink, rids: list[str], ask: Ask = LONG) -> None:
        self._link = link
        self._pool = ThreadPoolExecutor(len(rids))
        for rid in rids:
            link.open(rid)
        self._futures: dict[str, Future[Answer]] = {
            rid: self._pool.submit(generate, engine, rid, ask) for rid in rids
        }

    def until_held(self) -> None:
        for rid in self._futures:
            self._link.until_state(rid, "parked", timeout_s=60.0)
        hard = sum(rid.startswith("hard") for rid in self._futures)
        soft = len(self._futures) - hard
        self._link.wait(
            lambda m: isinstance(m, EngineStats) and (m.running, m.parked, m.offloaded) == (0, soft, hard),
            what=f"{soft} parked, {hard} offloaded",
            timeout_s=30.0,
        )

    def answers(self) -> dict[str, Answer]:
        futures = self._futures.values()
        self._link.listen_until(lambda: all(f.done() for f in futures), timeout_s=100.0, what="answers")
        self._pool.shutdown()
        return {rid: future.result() for rid, future in self._futures.items()}


def names(label: str) -> list[str]:
    return [f"{where}-{label}-{i}" for where in WHERE for i in range(2)]


def calm_answer(engine: RealEngine, link: RawLink, label: str) -> list[int]:
    [answer] = generate_all(engine, link, [LONG], tag=f"calm-{label}")
    assert len(answer.tokens) == LONG.tokens
    return answer.tokens


def test_another_policy_drains_and_nothing_was_lost(engine: RealEngine, link: RawLink):
    expected = calm_answer(engine, link, "drain")
    held = HeldStreams(engine, link, names("drain"))
    held.until_held()
    states = [
        s for m in link.received if isinstance(m, StreamStates) for s in m.states if s.state == "parked"
    ]
    assert {s.reason for s in states} == {"ahead"}
    use_policy(link, "fcfs")
    for rid, answer in held.answers().items():
        assert answer.tokens == expected, rid
        link.until_state(rid, "finished")
        assert link.history(rid)[-1] == ("finished", LONG.tokens)


def test_the_gateway_aborts_held_streams(engine: RealEngine, link: RawLink):
    held = HeldStreams(engine, link, names("closed"))
    held.until_held()
    for rid in names("closed"):
        link.close_stream(rid)
    confirmed = {rid: link.next_aborted(rid).generated for rid in names("closed")[:1]}
    answers = held.answers()
    until_idle(link)
    for rid, answer in answers.items():
        assert answer.finish["type"] == "abort"
        assert HELD_AT <= len(answer.tokens) < LONG.tokens
        assert link.history(rid)[-1] == ("aborted", len(answer.tokens))
        assert confirmed.get(rid, len(answer.tokens)) == len(answer.tokens)


def test_the_engine_aborts_held_streams_by_name_and_all_at_once(engine: RealEngine, link: RawLink):
    held = HeldStreams(engine, link, names("all"))
    held.until_held()
    post(engine, "/abort_request", {"rid": "hard-all-0"})
    link.until_state("hard-all-0", "aborted")
    assert [link.history(rid)[-1][0] for rid in names("all")] == ["parked", "parked", "aborted", "parked"]
    post(engine, "/abort_request", {"abort_all": True})
    assert {answer.finish["type"] for answer in held.answers().values()} == {"abort"}


def test_held_streams_make_the_engine_refuse_a_flush(engine: RealEngine, link: RawLink):
    expected = calm_answer(engine, link, "flush")
    held = HeldStreams(engine, link, names("flush"))
    held.until_held()
    with pytest.raises(urllib.error.HTTPError):
        flush(engine)
    use_policy(link, "fcfs")
    assert [answer.tokens for answer in held.answers().values()] == [expected] * 4


def test_readers_who_run_dry_while_their_stream_is_held_are_counted(engine: RealEngine, link: RawLink):
    """Nobody brings these streams back, and what they had generated is read within seconds."""
    before = link.next(EngineStats)
    held = HeldStreams(engine, link, names("dry"))
    held.until_held()
    waited = link.wait(
        lambda m: (
            isinstance(m, EngineStats) and m.stalls.get("ahead", 0) >= before.stalls.get("ahead", 0) + 4
        ),
        what="four readers have run dry",
        timeout_s=30.0,
    )
    assert isinstance(waited, EngineStats)
    assert waited.departures["ahead"] - before.departures.get("ahead", 0) == 4
    more = link.next(EngineStats)
    assert more.stall_s["ahead"] > waited.stall_s["ahead"] >= before.stall_s.get("ahead", 0.0)
    last = {s.rid: s.offloaded for m in link.received if isinstance(m, StreamStates) for s in m.states}
    assert {rid: last[rid] for rid in names("dry")} == {rid: rid.startswith("hard") for rid in names("dry")}
    use_policy(link, "fcfs")
    held.answers()
    after = link.next(EngineStats)
    assert after.stalls["ahead"] == waited.stalls["ahead"]
    again = link.next(EngineStats)
    assert again.stall_s == after.stall_s  # nobody waits any more
    counts = {
        kind: sum(seen.counts) - sum(before.return_s[kind].counts if kind in before.return_s else [0])
        for kind, seen in after.return_s.items()
    }
    assert (counts["resumed"], counts["loaded"]) == (2, 2)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_held_streams_are_paused_with_the_engine(engine: RealEngine, link: RawLink, mode: str):
    expected = calm_answer(engine, link, mode)
    held = HeldStreams(engine, link, names(mode))
    held.until_held()
    post(engine, "/pause_generation", {"mode": mode})
    if mode == "retract":  # nobody holds KV any more, as for a weight update
        link.wait(
            lambda m: isinstance(m, EngineStats) and (m.parked, m.offloaded) == (0, 0),
            what="all are back in the engine's queue",
        )
        flush(engine)
    post(engine, "/continue_generation")
    use_policy(link, "fcfs")
    assert [answer.tokens for answer in held.answers().values()] == [expected] * 4


def update_weights(engine: RealEngine, model: Path, *, flush_cache: bool = True) -> None:
    """From these files; HTTP errors, a cache that could not be flushed among them, are raised."""
    post(engine, "/update_weights_from_disk", {"model_path": str(model), "flush_cache": flush_cache})


def with_other_weights(model: Path, folder: Path) -> Path:
    """The same model, but two of its layers have each other's weights."""
    other = Path(shutil.copytree(model, folder / "other"))
    file = other / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    one, two = (header[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2))
    one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]
    renamed = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    file.write_bytes(content[:8] + renamed + content[end:])
    return other


def test_weights_are_updated_while_nobody_holds_kv(engine: RealEngine, link: RawLink, tiny_model_path: Path):
    """The engine was paused by retracting all it had: its cache can be flushed, as an update wants."""
    expected = calm_answer(engine, link, "retracted")
    held = HeldStreams(engine, link, names("retracted"))
    held.until_held()
    post(engine, "/pause_generation", {"mode": "retract"})
    update_weights(engine, tiny_model_path)
    post(engine, "/continue_generation")
    use_policy(link, "fcfs")
    assert [answer.tokens for answer in held.answers().values()] == [expected] * 4


def test_weights_are_updated_under_streams_that_stay_held(
    engine: RealEngine, link: RawLink, tiny_model_path: Path
):
    """The engine was paused in place: held streams keep their KV, so the cache is not flushed."""
    expected = calm_answer(engine, link, "in-place")
    held = HeldStreams(engine, link, names("in-place"))
    held.until_held()
    post(engine, "/pause_generation", {"mode": "in_place"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        update_weights(engine, tiny_model_path)
    update_weights(engine, tiny_model_path, flush_cache=False)
    post(engine, "/continue_generation")
    assert [link.history(rid)[-1][0] for rid in names("in-place")] == ["parked"] * 4
    use_policy(link, "fcfs")
    assert [answer.tokens for answer in held.answers().values()] == [expected] * 4


def test_an_update_of_an_engine_that_is_not_paused_waits_for_held_streams(
    engine: RealEngine, link: RawLink, tiny_model_path: Path
):
    asked, begun = "Start update_weights", "Update engine weights online from disk begin"
    expected = calm_answer(engine, link, "awaited")
    held = HeldStreams(engine, link, names("awaited"))
    held.until_held()
    before = engine.log()
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(update_weights, engine, tiny_model_path)
        link.listen_until(
            lambda: engine.log().count(asked) > before.count(asked), timeout_s=30.0, what="it was asked for"
        )
        link.next(EngineStats)
        assert engine.log().count(begun) == before.count(begun)
        use_policy(link, "fcfs")
        assert [answer.tokens for answer in held.answers().values()] == [expected] * 4
        link.listen_until(update.done, timeout_s=60.0, what="the weights are updated")
        update.result()
    assert engine.log().count(begun) == before.count(begun) + 1
    assert calm_answer(engine, link, "updated") == expected


def test_with_other_weights_held_streams_go_on_differently(
    engine: RealEngine, link: RawLink, tiny_model_path: Path, tmp_path: Path
):
    """The negative control: an update does reach the streams that were held, from where they were."""
    expected = calm_answer(engine, link, "before")
    held = HeldStreams(engine, link, names("before"))
    held.until_held()
    post(engine, "/pause_generation", {"mode": "retract"})
    try:
        update_weights(engine, with_other_weights(tiny_model_path, tmp_path))
        post(engine, "/continue_generation")
        use_policy(link, "fcfs")
        answers = held.answers()
    finally:
        update_weights(engine, tiny_model_path)
    for rid, answer in answers.items():
        assert answer.tokens[:HELD_AT] == expected[:HELD_AT], rid
        assert answer.tokens != expected, rid
    assert calm_answer(engine, link, "after") == expected


def test_others_run_while_streams_are_held(engine: RealEngine, link: RawLink):
    held = HeldStreams(engine, link, names("aside"))
    held.until_held()
    answers = generate_all(engine, link, asks(6, seed=11), tag="others")
    assert all(len(answer.tokens) > 0 for answer in answers)
    assert [link.history(rid)[-1][0] for rid in names("aside")] == ["parked"] * 4
    use_policy(link, "fcfs")
    assert {len(answer.tokens) for answer in held.answers().values()} == {LONG.tokens}


def test_the_engines_time_limit_holds_for_held_streams(new_engine: Callable[..., RealEngine]):
    env = {"SGLANG_REQ_RUNNING_TIMEOUT": "8", "TOKENFLOW_CHAOS": "0:hold", **CHECKS}
    with new_engine(env=env) as limited, RawLink(limited.link, secret=limited.secret) as link:
        link.hello()
        use_policy(link, "chaos")
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(post, limited, "/generate", body) for body in map(_endless, WHERE)]
            link.listen_until(
                lambda: all(f.done() for f in futures), timeout_s=60.0, what="the limit is reached"
            )
            errors = [future.exception() for future in futures]
        until_idle(link)
    assert [getattr(error, "code", None) for error in errors] == [503, 503]


def _endless(rid: str) -> dict[str, object]:
    return {"rid": rid, "text": "x", "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}


def test_an_executor_that_fails_falls_back_to_the_engines_own_way(new_engine: Callable[..., RealEngine]):
    """A step raises now and then: held streams come back, and nobody notices."""
    env = {"TOKENFLOW_FAULT": "execute/40", "TOKENFLOW_CHAOS": "0:park,evict,load", **CHECKS}
    with new_engine(env=env) as broken, RawLink(broken.link, secret=broken.secret) as link:
        link.hello()
        wanted = asks(10, seed=12)
        expected = generate_all(broken, link, wanted, tag="calm")
        link.send(SetPolicy(policy="chaos"))
        found = generate_all(broken, link, wanted, tag="chaos")
        use_policy(link, "fcfs")
        until_idle(link)
        stats, log = link.next(EngineStats), broken.log()
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    assert stats.plan_errors > 0
    assert "policy 'chaos' failed: the engine goes on first come, first served" in log
    assert stats.preemptions["parked"] > 0
    assert (stats.parked, stats.offloaded) == (0, 0)


def test_a_plugin_that_detaches_leaves_nobody_behind(new_engine: Callable[..., RealEngine]):
    """The hook that is told of preemptions fails each time: after twenty the plugin is out, all come back."""
    env = {"TOKENFLOW_FAULT": "moved", "TOKENFLOW_CHAOS": "0:park,evict", **CHECKS}
    with new_engine(env=env) as broken, RawLink(broken.link, secret=broken.secret) as link:
        link.hello()
        wanted = asks(24, seed=13)
        expected = generate_all(broken, link, wanted, tag="calm")
        assert "the link is closed" not in broken.log()
        link.send(SetPolicy(policy="chaos"))
        found = generate_all(broken, link, wanted, tag="chaos")
        assert "TokenFlow: hook 'moved' has failed 20 times in a row: the link is closed" in broken.log()
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
