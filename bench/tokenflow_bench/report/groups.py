"""Cases of a result, put together: all seeds of one configuration, all policies of one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenflow_bench.spread import Spread

__all__ = ["Place", "command_of", "places_of", "sections_of"]

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """One set-up at one load (or the paper's rates) with one kind of readers."""

    setup: str
    condition: str
    load: float | None
    cases: Mapping[str, Sequence[Mapping[str, Any]]]
    """Of each policy, one case a seed."""

    @property
    def name(self) -> str:
        """Set-up and condition."""
        return f"{self.setup}, {self.condition}"

    def figure(self, policy: str, name: str) -> Spread:
        """Over the seeds."""
        return Spread.of(case["figures"].get(name) for case in self.cases[policy])


def sections_of(document: Document) -> list[Mapping[str, Any]]:
    """Its sections; all cases are one of those in a result of `tokenflow sim`."""
    if "sections" in document:
        return list(document["sections"])
    return [
        {"name": "simulation", "title": "Simulation", "words": "", "cases": range(len(document["cases"]))}
    ]


def places_of(document: Document, section: Mapping[str, Any]) -> list[Place]:
    """In the order of the cases."""
    places: dict[tuple[str, str], Place] = {}
    for number in section["cases"]:
        case = document["cases"][number]
        key = (case["setup"], _condition(case))
        place = places.setdefault(key, Place(*key, case.get("load"), {}))
        assert isinstance(place.cases, dict)
        place.cases.setdefault(case["policy"], []).append(case)
    return list(places.values())


def command_of(document: Document, section: Mapping[str, Any]) -> str:
    """What makes this section's figures again."""
    if document["kind"] != "paper":
        return str(document["command"])
    seeds = "".join(f" --seed {seed}" for seed in document["seeds"])
    return f'make paper ARGS="--section {section["name"]}{seeds}"'


def _condition(case: Mapping[str, Any]) -> str:
    if "load" in case:
        words = f"load {case['load']:g}"
    elif "recorded" in case:
        words = (
            "its own pace" if case["recorded"]["faster"] == 1 else f"{case['recorded']['faster']:g}x its pace"
        )
    elif len(case["rates"]) == 1:
        words = f"{case['rates'][0][0]:g} tok/s"
    else:
        words = "mixed " + " and ".join(f"{rate:g}" for rate, _ in case["rates"]) + " tok/s"
    return words if case["readers"] == "steady" else f"{words}, {case['readers']}"
