"""Plain numbers that become Prometheus' counters and histograms when somebody looks."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tokenflow_gateway.sums import Histograms, Sums


def test_a_counter_has_what_was_added_whenever_it_is_looked_at() -> None:
    registry = CollectorRegistry()
    sums = Sums(registry)
    counter = Counter("x", "Text.", ["of"], registry=registry)
    added, other = sums.of(counter.labels("a")), sums.of(counter.labels("a"))
    assert registry.get_sample_value("x_total", {"of": "a"}) == 0.0
    added.amount += 2
    added.amount += 0.5
    other.amount += 1
    counter.labels("a").inc(10)
    for _ in range(2):
        assert registry.get_sample_value("x_total", {"of": "a"}) == 13.5
    added.amount += 1
    assert registry.get_sample_value("x_total", {"of": "a"}) == 14.5


def test_control_sums_that_are_registered_behind_their_counters_tell_too_late() -> None:
    registry = CollectorRegistry()
    counter = Counter("x", "Text.", registry=registry)
    added = Sums(registry).of(counter)
    added.amount += 1
    assert b"x_total 0.0" in generate_latest(registry)
    assert b"x_total 1.0" in generate_latest(registry)


def test_histograms_are_what_the_library_would_have_written() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bounds = (0.01, 0.5, 1, 30)
    text = ("x_seconds", "Text.", ["of"])
    own = Histograms(*text, buckets=bounds, registry=ours)
    reference = Histogram(*text, buckets=bounds, registry=theirs)
    edges = (0.0, 0.01, math.nextafter(0.01, 1), 1.0, 30.0, 31.0)
    for value in (*edges, *(0.003 * number**2 for number in range(99))):
        own.labels("a").add(value)
        reference.labels("a").observe(value)
    own.labels("b")
    reference.labels("b")
    assert _lines(ours) == _lines(theirs)


def test_without_labels_it_is_there_before_the_first_value() -> None:
    registry = CollectorRegistry()
    Histograms("x_seconds", "Text.", buckets=(1.0,), registry=registry).labels()
    assert registry.get_sample_value("x_seconds_count") == 0.0


def _lines(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]
