"""Counters and histograms of our own look as prometheus_client's do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from tokenflow_gateway.counting import LabelledCounter, LabelledHistogram

disable_created_metrics()  # type: ignore[no-untyped-call]
BUCKETS = (0.5, 1, 30)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 100) | st.sampled_from([0.5, 1.0, 30.0]))))
def test_they_are_scraped_as_prometheus_clients(events: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counters = (
        LabelledCounter("n", "How many.", ["who", "what"], registry=ours),
        Counter("n", "How many.", ["who", "what"], registry=theirs),
    )
    histograms = (
        LabelledHistogram("s", "How long.", ["who"], buckets=BUCKETS, registry=ours),
        Histogram("s", "How long.", ["who"], buckets=BUCKETS, registry=theirs),
    )
    for who, amount in events:
        for counter, histogram in zip(counters, histograms, strict=True):
            counter.labels(who, "x").inc(amount)
            histogram.labels(who).observe(amount)
    assert generate_latest(ours) == generate_latest(theirs)


def test_a_counter_does_not_fall() -> None:
    count = LabelledCounter("n", "How many.", ["who"], registry=CollectorRegistry()).labels("a")
    count.inc()
    with pytest.raises(ValueError, match="does not fall"):
        count.inc(-1)
    assert count.value == 1
