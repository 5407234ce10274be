"""Runs in turns: every case once a round, each round beginning with another, so that drift hits all alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

__all__ = ["Case", "turns"]

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is compared: a policy, and what clients tell of their readers."""

    name: str
    policy: str
    pauses: Literal["report", "silent"] = "silent"
    report_every_s: float | None = None


def turns(cases: Sequence[Item], rounds: int) -> Iterator[tuple[int, Item]]:
    """Number of the round, and the case: ABC, BCA, CAB, ..."""
    for number in range(rounds):
        shift = number % len(cases)
        for case in [*cases[shift:], *cases[:shift]]:
            yield number, case
