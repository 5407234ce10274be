"""How long preempted streams take to come back, and how soon they leave again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tokenflow_engine.control.durations import BOUNDS_S, DurationCounts
from tokenflow_engine.sglang.returns import Returns


def a_pass(*rids: str) -> Any:
    return SimpleNamespace(reqs=[SimpleNamespace(rid=rid) for rid in rids])


def test_a_return_counts_from_the_first_order_to_the_first_pass():
    returns = Returns()
    returns.ask(["a", "b"], 10.0)
    returns.ask(["a", "b"], 10.4)  # the next plan still wants them
    returns.begin("a", "loaded", returns.asked_at("a", 10.5))
    returns.ask([], 10.6)  # and the one after it does not name what is on its way
    returns.launched(a_pass("c"), None, 10.7)
    returns.launched(a_pass("c", "a"), None, 10.8)
    returns.launched(a_pass("c", "a"), None, 11.0)
    durations = returns.durations()
    assert durations.keys() == {"loaded"}
    assert durations["loaded"].sum_s == pytest.approx(0.8)
    assert sum(durations["loaded"].counts) == 1
    assert durations["loaded"].counts[BOUNDS_S.index(1.0)] == 1


def test_an_order_that_was_taken_back_does_not_count():
    returns = Returns()
    returns.ask(["a"], 10.0)
    returns.ask([], 11.0)
    returns.ask(["a"], 12.0)
    returns.begin("a", "resumed", returns.asked_at("a", 12.0))
    returns.launched(a_pass("a"), None, 12.1)
    assert returns.durations()["resumed"].sum_s == pytest.approx(0.1)


def test_a_failed_load_goes_on_counting_as_a_prefill():
    returns = Returns()
    returns.ask(["a"], 1.0)
    returns.begin("a", "loaded", returns.asked_at("a", 1.1))
    returns.begin("a", "recomputed", returns.asked_at("a", 1.5))
    returns.launched(a_pass("a"), None, 2.0)
    assert {kind: seen.sum_s for kind, seen in returns.durations().items()} == {"recomputed": 1.0}


def test_a_prompt_that_needs_another_pass_is_not_back_yet():
    returns = Returns()
    returns.begin("a", "recomputed", 1.0)
    batch = a_pass("a")
    returns.launched(batch, batch.reqs[0], 2.0)
    assert returns.durations() == {}
    returns.launched(batch, None, 3.0)
    assert returns.durations()["recomputed"].sum_s == 2.0


def test_thrash_is_leaving_within_a_second_of_the_return():
    returns = Returns()
    for rid in ("a", "b"):
        returns.begin(rid, "resumed", 1.0)
    returns.launched(a_pass("a", "b"), None, 1.0)
    assert returns.leaves("a", 1.9)
    assert not returns.leaves("a", 2.0)  # once a return
    assert not returns.leaves("b", 2.1)
    assert not returns.leaves("never away", 2.1)


def test_ended_streams_leave_nothing_behind():
    returns = Returns()
    returns.ask(["a", "b"], 1.0)
    returns.begin("b", "loaded", 1.0)
    returns.begin("c", "resumed", 1.0)
    returns.launched(a_pass("c"), None, 1.0)
    for rid in "abc":
        returns.forget(rid)
    returns.launched(a_pass("a", "b"), None, 2.0)
    assert returns.durations().keys() == {"resumed"}
    assert not returns.leaves("c", 1.1)


def test_durations_are_counted_by_class():
    counts = DurationCounts()
    for seconds in (0.0, BOUNDS_S[0], 0.25, 99.0):
        counts.add(seconds)
    message = counts.message()
    assert message.counts[0] == 2  # a bound belongs to what is below it
    assert message.counts[BOUNDS_S.index(0.3)] == 1
    assert message.counts[-1] == 1
    assert message.sum_s == pytest.approx(BOUNDS_S[0] + 99.25)
    other = DurationCounts([0.5])
    other.add(0.25)
    assert (other.message().bounds_s, other.message().counts) == ([0.5], [1, 0])
