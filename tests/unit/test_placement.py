"""Which engine a stream goes to, and when none may be asked."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import msgspec
import pytest

from tokenflow_engine.protocol import PROTOCOL_VERSION, EngineStats, Welcome
from tokenflow_gateway.config import EngineConfig
from tokenflow_gateway.engines.affinity import affinity_key, favourite, session_key
from tokenflow_gateway.engines.breaker import Breaker
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.engines.load import EngineLoad
from tokenflow_gateway.engines.placement import Placement, Wish
from tokenflow_gateway.engines.registry import EngineRegistry
from tokenflow_gateway.relay.errors import NoEngine

WELCOME = Welcome(
    version=PROTOCOL_VERSION,
    engine_id="e",
    model="m",
    engine="sglang",
    capabilities=[],
    kv_tokens=1000,
    max_running=8,
)


def stats(**figures: object) -> EngineStats:
    plain = {
        "at": 0.0,
        "running": 0,
        "waiting": 0,
        "parked": 0,
        "kv_used_tokens": 0,
        "kv_tokens": 1000,
        "tokens_per_s": 0.0,
        "generated_total": 0,
    }
    return EngineStats(**(plain | figures))


def engine(port: int, *, streams: int = 0, linked: bool = False, **figures: object) -> Engine:
    made = Engine(EngineConfig(url=f"http://127.0.0.1:{port}"), healthy=True)
    made.models = ({"id": "m"},)
    made.streams = {str(number) for number in range(streams)}
    if linked:
        made.welcome = WELCOME
        made.stats = stats(**figures)
        made.load.note_stats(made.stats, 0.0)
    return made


def busy(port: int, *, waiting: int, per_s: float) -> Engine:
    """An engine in which so many wait, and so many begin in a second."""
    made = engine(port, linked=True, waiting=waiting)
    for step in range(1, 20 * 5):
        made.stats = stats(waiting=waiting, started_total=int(per_s * step / 5))
        made.load.note_stats(made.stats, step / 5)
    return made


def test_slack_comes_before_affinity_and_load() -> None:
    late, in_time = busy(1, waiting=10, per_s=5), engine(2, linked=True, running=20)
    wish = Wish(ttft_s=1.0, key=b"k")
    for key in (b"a", b"b", b"c"):  # whichever of them is the favourite
        wish = Wish(ttft_s=1.0, key=key)
        assert Placement().choose([late, in_time], wish, 19.0) is in_time


def test_all_too_late_is_none_and_a_longer_target_is_not() -> None:
    late = busy(1, waiting=10, per_s=14)  # 0.7 s
    assert Placement().choose([late], Wish(ttft_s=1.0), 19.0) is None
    assert Placement().choose([late], Wish(ttft_s=2.0), 19.0) is late


def test_however_patient_a_stream_is_it_waits_here_and_not_in_an_engine_with_enough_to_do() -> None:
    made = busy(1, waiting=10, per_s=5)
    assert Placement().choose([made], Wish(ttft_s=600.0), 19.0) is None
    assert Placement().choose([busy(1, waiting=10, per_s=20)], Wish(ttft_s=600.0), 19.0) is not None


def test_a_few_may_always_wait_in_an_engine() -> None:
    assert Placement(engine_queue=4).choose([busy(1, waiting=3, per_s=0)], Wish(ttft_s=0.1), 19.0)
    assert Placement(engine_queue=4).choose([busy(1, waiting=4, per_s=0)], Wish(ttft_s=0.1), 19.0) is None


def test_what_was_just_sent_counts_until_the_engine_tells_of_it() -> None:
    made = engine(1, linked=True, running=8)
    registry = EngineRegistry([made], clock=lambda: 1.0)
    for _ in range(4):
        registry.pick("m")
    assert Placement(engine_queue=4).choose([made], Wish(ttft_s=0.1), 1.0) is None
    made.load.note_stats(stats(running=8), 1.05)  # these may be older than what was sent
    assert Placement(engine_queue=4).choose([made], Wish(ttft_s=0.1), 1.1) is None
    made.load.note_stats(stats(running=8), 1.2)
    assert Placement(engine_queue=4).choose([made], Wish(ttft_s=0.1), 1.2) is made


def test_what_is_no_stream_takes_the_place_of_none() -> None:
    for made in (engine(1), engine(2, linked=True, running=8)):
        registry = EngineRegistry([made], clock=lambda: 1.0)
        for _ in range(20):
            registry.pick("m", streams=False)
        assert made.load.unseen(1.0) == 0
        registry.pick("m")
        assert made.load.unseen(1.0) == 1, "the negative control"


def test_what_is_no_stream_may_be_the_trial_of_an_engine_that_failed() -> None:
    made = engine(1)
    for _ in range(3):
        made.breaker.failed(0.0)
    EngineRegistry([made], clock=lambda: 1.0).pick("m", streams=False)
    assert not made.breaker.allows(1.0)


def test_an_engine_with_places_takes_a_whole_burst_at_once() -> None:
    made = engine(1, linked=True)  # eight places, 1000 tokens of KV
    registry = EngineRegistry([made], clock=lambda: 1.0)
    placement, sent = Placement(engine_queue=1), 0
    while placement.choose([made], Wish(ttft_s=0.1, tokens=10), 1.0) is not None:
        registry.sent_to(made)
        sent += 1
        assert sent < 50
    assert sent == 8
    small = engine(2, linked=True, kv_used_tokens=700)
    registry, sent = EngineRegistry([small], clock=lambda: 1.0), 0
    while placement.choose([small], Wish(ttft_s=0.1, tokens=100), 1.0) is not None:
        registry.sent_to(small)
        sent += 1
    assert sent == 3


def test_classes_that_come_later_do_not_hold_up_one_that_comes_first() -> None:
    crowd = {"linked": True, "waiting": 50, "waiting_by": {"bronze": 48, "gold": 2}}
    made = engine(1, policy="adaptive:least_s=1", **crowd)
    gold = Wish(ttft_s=0.5, behind=frozenset({"bronze"}))
    assert Placement().choose([made], gold, 1.0) is made
    assert Placement().choose([made], Wish(ttft_s=0.5), 1.0) is None
    for policy in ("fcfs", "tokenflow"):  # in which all would come before it
        assert Placement().choose([engine(1, policy=policy, **crowd)], gold, 1.0) is None


def test_an_engine_without_plugin_has_room_for_everybody() -> None:
    plain, late = engine(1, streams=500), busy(2, waiting=10, per_s=5)
    assert Placement().choose([plain, late], Wish(ttft_s=0.1), 19.0) is plain


def test_where_it_is_known_how_many_an_engine_without_plugin_runs_it_gets_few_more() -> None:
    plain, late = engine(1), busy(2, waiting=10, per_s=5)
    plain.config = EngineConfig(url=plain.config.url, max_running=8)
    placement = Placement(engine_queue=2)
    registry = EngineRegistry([plain, late], placement=placement, clock=lambda: 19.0)

    def send_all() -> int:
        before = plain.at_work
        while placement.choose([plain, late], Wish(ttft_s=0.1), 19.0) is plain:
            registry.sent_to(plain)
            assert plain.load.unseen(19.0) < 50
        for number in range(plain.load.unseen(19.0)):
            plain.streams.add(f"{len(plain.streams)} {number}")
            plain.load.opened()
        return plain.at_work - before

    assert send_all() == 10
    assert send_all() == 0
    plain.answered |= set(sorted(plain.streams)[:3])
    assert send_all() == 3, "whose clients still read keeps nobody out"


def test_a_burst_spreads_over_engines_with_and_without_plugin() -> None:
    registry = EngineRegistry([engine(1), engine(2, linked=True)], clock=lambda: 1.0)
    assert set(Counter(registry.pick("m").name for _ in range(8)).values()) == {4}


def test_a_conversation_stays_on_its_engine_while_loads_are_even() -> None:
    engines = [engine(port, streams=8) for port in range(1, 5)]
    placement = Placement()
    homes = {key: placement.choose(engines, Wish(key=key), 0.0) for key in (b"a", b"b", b"c", b"d")}
    for key, home in homes.items():
        assert all(placement.choose(engines, Wish(key=key), 0.0) is home for _ in range(5))
    home = homes[b"a"]
    assert home is not None
    home.streams |= {str(number) for number in range(20)}
    assert placement.choose(engines, Wish(key=b"a"), 0.0) is not home


def test_conversations_spread_and_only_those_of_a_lost_engine_move() -> None:
    names = ["e1", "e2", "e3", "e4"]
    keys = [str(number).encode() for number in range(400)]
    before = {key: favourite(key, names) for key in keys}
    assert min(Counter(before.values()).values()) > 60
    after = {key: favourite(key, names[:3]) for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "e4")


def body(**fields: object) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_turns_of_a_conversation_have_one_key() -> None:
    first = [message("system", "s"), message("user", "hello")]
    later = [*first, message("assistant", "hi"), message("user", "more")]
    other = [message("system", "s"), message("user", "bye")]
    assert affinity_key(body(messages=first)) == affinity_key(body(messages=later))
    assert affinity_key(body(messages=first)) != affinity_key(body(messages=other))
    assert affinity_key(body(model="m")) is None
    assert affinity_key(body(prompt="a" * 5000 + "b")) == affinity_key(body(prompt="a" * 5000 + "c"))
    assert affinity_key(body(messages=first), "s") == affinity_key(body(messages=other), "s")
    assert affinity_key(body(prompt="a", prompt_cache_key="k")) == affinity_key(
        body(prompt="b", prompt_cache_key="k")
    )


@pytest.mark.parametrize("element", [b"1", b'""', b"[]", b"{}"])
@pytest.mark.parametrize("field", ["messages", "input", "prompt"])
def test_of_a_long_list_no_more_is_looked_at_than_its_beginning(field: str, element: bytes) -> None:
    value = b"[" + b",".join([element] * 500_000)
    long, longer = ({field: msgspec.Raw(value + end)} for end in (b"]", b",1]"))
    tracemalloc.start()
    try:
        assert affinity_key(long) == affinity_key(longer)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * len(value)
    finally:
        tracemalloc.stop()


def test_messages_that_are_nested_too_deeply_are_known_by_their_beginning() -> None:
    deep = msgspec.Raw(b'[{"content":' + b"[" * 5000 + b"]" * 5000 + b"}]")
    assert affinity_key({"messages": deep}) is not None


def test_prompts_of_ids_are_told_apart_by_more_than_the_first_two() -> None:
    assert affinity_key(body(prompt=[1, 2, 3])) != affinity_key(body(prompt=[1, 2, 4]))


def test_messages_are_told_apart_by_their_whole_text_however_many_commas_are_in_it() -> None:
    texts = ["a, b" * 20_000 + end for end in "cd"]
    one, other = ([message("system", "s"), message("user", text)] for text in texts)
    assert affinity_key(body(messages=one)) != affinity_key(body(messages=other))


def test_sessions_of_two_tenants_are_two() -> None:
    headers = [(b"x-tokenflow-session", b"1")]
    assert session_key(headers, "a") != session_key(headers, "b")
    assert session_key([], "a") is None


# ---- breaker and draining ------------------------------------------------------------------------------


def test_the_breaker_opens_after_three_failures_in_a_row_and_tries_again() -> None:
    breaker = Breaker()
    for _ in range(2):
        breaker.failed(10.0)
    breaker.succeeded()
    for _ in range(3):
        assert breaker.allows(10.0)
        breaker.failed(10.0)
    assert breaker.state(10.5) == "open"
    assert not breaker.allows(10.5)
    assert breaker.state(11.0) == "half_open"
    assert breaker.allows(11.0)
    breaker.sent(11.0)
    assert not breaker.allows(11.1)  # one at a time
    breaker.failed(11.2)
    assert not breaker.allows(13.1)  # twice as long
    assert breaker.allows(13.2)
    breaker.sent(13.2)
    breaker.succeeded()
    assert breaker.state(13.3) == "closed"
    assert breaker.opened == 2


def test_a_trial_whose_client_leaves_is_followed_by_another() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker.failed(10.0)
    breaker.sent(11.0)
    trial = breaker.asked()
    assert not breaker.allows(11.1)
    breaker.unheard(trial)
    assert breaker.allows(11.1)


def test_a_trial_goes_on_when_the_clients_of_other_requests_leave() -> None:
    breaker = Breaker()
    under_way = breaker.asked()
    for _ in range(3):
        breaker.failed(10.0)
    breaker.sent(11.0)
    trial = breaker.asked()
    breaker.sent(11.1)  # for want of another engine
    for other in (under_way, breaker.asked()):
        breaker.unheard(other)
        assert not breaker.allows(11.2)
    breaker.unheard(trial)
    assert breaker.allows(11.2)


def test_what_is_sent_to_an_open_one_for_want_of_another_is_no_trial() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker.failed(10.0)
    breaker.sent(10.5)
    breaker.failed(10.6)
    assert breaker.state(10.7) == "open"
    assert breaker.allows(11.0)


def test_an_engine_with_an_open_breaker_is_asked_only_where_there_is_no_other() -> None:
    failing, well = engine(1), engine(2, streams=9)
    for _ in range(3):
        failing.breaker.failed(0.0)
    assert EngineRegistry([failing, well], clock=lambda: 0.5).pick("m") is well
    assert EngineRegistry([failing], clock=lambda: 0.5).pick("m") is failing


def test_a_draining_engine_gets_nothing_new() -> None:
    leaving, staying = engine(1), engine(2, streams=9)
    leaving.draining = True
    assert EngineRegistry([leaving, staying]).pick("m") is staying
    with pytest.raises(NoEngine, match="draining"):
        EngineRegistry([leaving]).pick("m")


class Telling:
    """An engine that tells five times a second how many have begun."""

    def __init__(self) -> None:
        self.load, self._now, self._begun = EngineLoad(), 0.0, 0

    def begin(self, *, per_s: float, waiting: int, seconds: float = 20.0) -> None:
        begun, since = self._begun, self._now
        for step in range(1, int(5 * seconds) + 1):
            self._now, self._begun = since + step / 5, begun + int(per_s * step / 5)
            self.load.note_stats(stats(waiting=waiting, started_total=self._begun), self._now)


def test_the_rate_of_beginnings_is_of_the_time_in_which_somebody_waited() -> None:
    engine = Telling()
    engine.begin(per_s=5, waiting=5)
    assert engine.load.begins_in_s(10) == pytest.approx(2.0, rel=0.05)
    engine.begin(per_s=0, waiting=0, seconds=90)  # nobody comes
    assert engine.load.begins_in_s(10) == pytest.approx(2.0, rel=0.05)
    engine.begin(per_s=10, waiting=0)  # many come, and wait for nothing
    assert engine.load.begins_in_s(10) == pytest.approx(1.0, rel=0.05)
    engine.begin(per_s=2, waiting=5)
    assert engine.load.begins_in_s(10) == pytest.approx(5.0, rel=0.1)


def test_a_burst_into_an_empty_engine_says_little_of_how_fast_a_full_one_begins() -> None:
    load = EngineLoad()
    load.note_stats(stats(), 0.0)
    load.note_stats(stats(started_total=12, running=12), 0.2)
    assert load.begins_in_s(4) > 0.5
    load.note_stats(stats(started_total=13, running=12), 0.2001)  # two messages read at once
    assert load.begins_in_s(4) > 0.5
