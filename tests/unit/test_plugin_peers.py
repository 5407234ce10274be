"""Which processes of a gateway are there, which are gone, and which is the newest."""

from __future__ import annotations

import pytest

from tokenflow_engine.control.owners import Owner
from tokenflow_engine.control.peers import Peers
from tokenflow_engine.protocol import LINK_TIMEOUT_S, PROTOCOL_VERSION, Hello

SILENT_S = LINK_TIMEOUT_S + 0.1


@pytest.fixture
def peers() -> Peers:
    return Peers(secret="s")


def greet(peers: Peers, incarnation: str, *, now: float, connection: str = "") -> None:
    hello = Hello(version=PROTOCOL_VERSION, gateway_id="g", incarnation=incarnation, secret="s")
    assert peers.admit((connection or incarnation).encode(), hello, now=now) is None


def test_processes_of_one_gateway_are_there_side_by_side(peers: Peers):
    greet(peers, "1", now=0.0)
    greet(peers, "2", now=1.0)
    assert peers.newly_gone("g") == ()
    assert peers.hear(b"1", now=2.0) == Owner("g", "1")
    assert peers.hear(b"2", now=2.0) == Owner("g", "2")
    assert sorted(peers.identities()) == [b"1", b"2"]


def test_an_older_process_is_gone_when_it_goes_silent_and_that_is_told_once(peers: Peers):
    greet(peers, "1", now=0.0)
    greet(peers, "2", now=0.0)
    peers.hear(b"2", now=2.0)
    assert peers.drop_silent(SILENT_S) == [Owner("g", "1")]
    assert peers.newly_gone("g") == ("1",)
    assert peers.newly_gone("g") == ()


def test_a_silent_process_is_gone_once_a_newer_one_says_hello(peers: Peers):
    greet(peers, "1", now=0.0)
    assert peers.drop_silent(SILENT_S) == [Owner("g", "1")]
    assert peers.newly_gone("g") == ()
    greet(peers, "2", now=60.0)
    assert peers.newly_gone("g") == ("1",)


def test_the_newest_process_is_never_gone(peers: Peers):
    greet(peers, "1", now=0.0)
    greet(peers, "2", now=0.0)
    peers.hear(b"1", now=2.0)
    assert peers.drop_silent(SILENT_S) == [Owner("g", "2")]
    assert peers.newly_gone("g") == ()


def test_a_process_that_comes_back_does_not_become_the_newest(peers: Peers):
    for incarnation in ("1", "2"):
        greet(peers, incarnation, now=0.0)
    peers.drop_silent(SILENT_S)
    greet(peers, "1", now=4.0, connection="again")
    assert peers.newly_gone("g") == ()
    peers.drop_silent(4.0 + SILENT_S)
    assert peers.newly_gone("g") == ("1",)


def test_a_new_connection_of_a_process_takes_the_place_of_its_old_one(peers: Peers):
    greet(peers, "1", now=0.0, connection="old")
    greet(peers, "1", now=3.0, connection="new")
    assert peers.hear(b"old", now=3.0) is None
    assert peers.drop_silent(SILENT_S) == []


def test_a_connection_is_one_process_at_a_time(peers: Peers):
    greet(peers, "1", now=0.0, connection="shared")
    greet(peers, "2", now=0.0, connection="shared")
    assert peers.identity(Owner("g", "1")) is None
    assert peers.hear(b"shared", now=0.0) == Owner("g", "2")


def test_a_process_that_restarts_for_ever_leaves_no_trace_but_a_living_one_is_kept(peers: Peers):
    greet(peers, "first", now=0.0)
    for i in range(100):
        now = i * 2.0
        peers.hear(b"first", now=now)
        greet(peers, str(i), now=now)
        peers.drop_silent(now)
        peers.newly_gone("g")
    assert len(peers._incarnations["g"]) <= 9
    peers.drop_silent(1000.0)
    assert "first" in peers.newly_gone("g")
