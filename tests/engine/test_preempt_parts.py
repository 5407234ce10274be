"""Parts of the plugin, switched off as the engine runs: seen in its numbers, and in no token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.equality import NewEngine, assert_equal, chaotic
from support.generation import Answer, Ask, asks, flush, generate, generate_all, use_policy
from support.raw_link import RawLink
from support.real_engine import RealEngine
from tokenflow_engine.protocol import Consumption, EngineStats, Reading, SetPolicy, StreamStates

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

WANTED = asks(16, seed=31)
PARTS = ("offload", "write_through", "overlap")


@pytest.fixture(scope="module")
def engine(new_engine: NewEngine) -> Iterator[RealEngine]:
    """Without a prefix cache, so that what left the device comes from host memory, or from a prefill."""
    with chaotic(new_engine, "--disable-radix-cache", moves="9:park,evict,load") as engine:
        yield engine


@pytest.fixture
def link(engine: RealEngine) -> Iterator[RawLink]:
    with RawLink(engine.link, secret=engine.secret) as link:
        link.hello()
        yield link
        use_policy(link, "fcfs")


class Did:
    """What the engine did in one run."""

    def __init__(self, before: EngineStats, after: EngineStats) -> None:
        kinds = after.preemptions
        self.by_kind = {kind: kinds[kind] - before.preemptions.get(kind, 0) for kind in kinds}
        self.written = after.written_bytes - before.written_bytes
        tokens = after.evicted_tokens - before.evicted_tokens
        self.synced_share = (after.evicted_synced_tokens - before.evicted_synced_tokens) / max(1, tokens)
        self.waited_s = after.copy_wait_s - before.copy_wait_s
        self.returns = {
            kind: sum(seen.counts) - (sum(before.return_s[kind].counts) if kind in before.return_s else 0)
            for kind, seen in after.return_s.items()
        }


def run(engine: RealEngine, link: RawLink, policy: str) -> tuple[list[Answer], Did]:
    flush(engine)
    use_policy(link, policy)
    before = link.next(EngineStats)
    answers = generate_all(engine, link, WANTED, tag=policy)
    after = link.next(EngineStats)
    use_policy(link, "fcfs")
    assert (after.hook_errors, after.plan_errors) == (0, 0)
    return answers, Did(before, after)


def test_each_part_can_be_taken_away_and_no_token_changes(engine: RealEngine, link: RawLink):
    expected, _ = run(engine, link, "fcfs")
    found, whole = run(engine, link, "chaos")
    assert_equal(expected, found)
    assert whole.by_kind["loaded"] > 0
    assert whole.synced_share > 0.5
    assert whole.waited_s == 0
    without: dict[str, Did] = {}
    for part in PARTS:
        found, without[part] = run(engine, link, f"chaos:{part}=0")
        assert_equal(expected, found)
    assert without["offload"].by_kind["dropped"] > 0
    assert without["offload"].by_kind["loaded"] == without["offload"].written == 0
    assert without["offload"].returns["recomputed"] > 0
    assert without["write_through"].by_kind["loaded"] > 0
    assert without["write_through"].synced_share < whole.synced_share - 0.05
    assert without["overlap"].by_kind["loaded"] > 0
    assert without["overlap"].waited_s > 0


def test_every_return_is_timed_by_its_way(engine: RealEngine, link: RawLink):
    """But for those that have to leave again before their first pass."""
    _, did = run(engine, link, "chaos")
    for kind in ("resumed", "loaded"):
        assert 0.8 * did.by_kind[kind] < did.returns[kind] <= did.by_kind[kind]


@pytest.mark.parametrize(("policy", "is_known"), [("fcfs", True), ("fcfs:pauses=0", False)])
def test_a_pause_is_known_unless_it_shall_not_be(
    engine: RealEngine, link: RawLink, policy: str, is_known: bool
):
    """A reader a hundred times as fast as the engine, who pauses before the first token."""
    use_policy(link, policy)
    rid = f"pausing-{is_known}"
    link.open(rid)
    fast = {"rate": 1e5, "rate_low": 1e5, "rate_high": 1e5}
    link.send(Consumption(readings=[Reading(rid=rid, at=time.time(), consumed=0.0, paused=True, **fast)]))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(generate, engine, rid, Ask("once upon a time", 100))
        link.listen_until(future.done, timeout_s=60.0, what="the answer")
    states = [s for m in link.received if isinstance(m, StreamStates) for s in m.states if s.rid == rid]
    unread = [(s.buffered, s.generated) for s in states if s.state == "running" and s.generated > 1]
    assert unread
    assert all((buffered == generated) is is_known for buffered, generated in unread)


def test_a_part_that_does_not_exist_changes_nothing(engine: RealEngine, link: RawLink):
    use_policy(link, "adaptive:write_s=0")
    for wrong in ("adaptive:magic=1", "adaptive:offload", "magic"):
        use_policy_is_refused(link, wrong)
    assert "unknown options of policy adaptive: magic" in engine.log()


def use_policy_is_refused(link: RawLink, spelling: str) -> None:
    """The next statistics but one still name the policy before it."""
    link.send(SetPolicy(policy=spelling))
    link.next(EngineStats)
    link.next(EngineStats)
    assert link.next(EngineStats).policy == "adaptive:write_s=0"
