"""Which time-outs hold for which request."""

from __future__ import annotations

from tokenflow_gateway.config import ANONYMOUS, Timeouts, load_settings
from tokenflow_gateway.relay.timeouts import TimeoutTable

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"


def table(**settings: object) -> TimeoutTable:
    return TimeoutTable(load_settings(overrides={"engines": ["http://127.0.0.1:9"], **settings}))


def test_those_of_all_hold_for_everybody() -> None:
    times = table(timeouts={"idle_s": 7})
    assert times.of(CHAT, ANONYMOUS) == times.of(None, "nobody") == Timeouts(idle_s=7)


def test_each_phase_comes_from_the_narrowest_that_names_it() -> None:
    times = table(
        timeouts={"connect_s": 1, "first_byte_s": 2, "idle_s": 3},
        routes={CHAT: {"timeouts": {"first_byte_s": 20, "idle_s": 30}}},
        tenants={ANONYMOUS: {"timeouts": {"idle_s": 300}}},
    )
    assert times.of(CHAT, ANONYMOUS) == Timeouts(connect_s=1, first_byte_s=20, idle_s=300)
    assert times.of(CHAT, "other") == Timeouts(connect_s=1, first_byte_s=20, idle_s=30)
    assert times.of(EMBEDDINGS, ANONYMOUS) == Timeouts(connect_s=1, first_byte_s=2, idle_s=300)
    assert times.of(None, "other") == Timeouts(connect_s=1, first_byte_s=2, idle_s=3)
