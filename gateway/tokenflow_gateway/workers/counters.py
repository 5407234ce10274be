"""Metrics of several workers as one: what they add up to, across the death of any of them.

A counter that falls looks like a restart to Prometheus, which then counts all of it anew. So a worker writes
down what it tells of its counters, each time that it does; its successor begins there, and until that answers
the file speaks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

__all__ = ["Family", "KeptCounters", "as_text", "families", "merged"]

Labels: TypeAlias = tuple[tuple[str, str], ...]


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric of one worker: its samples by name and labels."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, Labels, float]]


_decode = msgspec.msgpack.Decoder(list[Family]).decode


def _first(one: float, _other: float) -> float:
    return one


def _sum(one: float, other: float) -> float:
    return one + other


_ENGINE = "tokenflow_engine_"
"""What begins so is an engine's own word, the same to all workers, but for these:"""
_OF_WORKERS: dict[str, Callable[[float, float], float]] = {
    "tokenflow_engine_healthy": min,
    "tokenflow_engine_linked": min,
    "tokenflow_engine_link_dropped": _sum,
    "tokenflow_engine_streams": _sum,
}


def families(registry: Collector) -> list[Family]:
    """What a worker's registry holds now."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, tuple(sample.labels.items()), sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def merged(workers: Iterable[list[Family]]) -> list[Family]:
    """One of each family; an engine's own word is taken from the first worker that has it."""
    found: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, Labels], float]] = {}
    for family in (family for worker in workers for family in worker):
        found.setdefault(family.name, family)
        together = _OF_WORKERS.get(family.name, _first if family.name.startswith(_ENGINE) else _sum)
        samples = values.setdefault(family.name, {})
        for name, labels, value in family.samples:
            key = name, labels
            samples[key] = together(samples[key], value) if key in samples else value
    return [
        Family(name, family.text, family.kind, [(*key, value) for key, value in values[name].items()])
        for name, family in found.items()
    ]


def as_text(metrics: list[Family]) -> bytes:
    """In Prometheus' text format."""
    return generate_latest(_Collected(metrics))


class _Collected(Collector):
    def __init__(self, metrics: list[Family]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for family in self._metrics:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric


class KeptCounters:
    """One worker's counters, those of its predecessors in its place included."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = read(path)

    def add_to(self, own: list[Family]) -> list[Family]:
        """`own` with what was told before this process began; that is told from now on."""
        told = merged([own, self._before])
        counters = [family for family in told if _adds_up(family)]
        draft = self._path.with_suffix(".draft")
        draft.write_bytes(msgspec.msgpack.encode(counters))
        os.replace(draft, self._path)
        return told


def read(path: Path) -> list[Family]:
    """What a worker told last; nothing before its first time."""
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        return []


def _adds_up(family: Family) -> bool:
    return family.kind in {"counter", "histogram"} and not family.name.startswith(_ENGINE)
