"""Requests with a text each, from a workload and the people who read it."""

from __future__ import annotations

import math
import random

from tokenflow_bench.load.driver import Ask
from tokenflow_bench.load.reading import Person
from tokenflow_bench.workload import Workload

__all__ = ["asks_of", "prompt_text", "scanning"]

_WORDS = [
    *("river", "mountain", "garden", "window", "letter", "summer", "winter", "morning", "evening", "city"),
    *("teacher", "student", "doctor", "friend", "mother", "brother", "house", "street", "market", "forest"),
    *("island", "ocean", "music", "machine", "paper", "table", "light", "shadow", "golden", "quiet"),
]
_TASK = "Write a long and detailed story that has all of these words in it:"


def prompt_text(tokens: int, rng: random.Random, *, mark: str) -> str:
    """A task of about so many tokens, a token a word. `mark` comes first, so no two share a prefix."""
    head = f"{mark}. {_TASK} "
    return head + " ".join(rng.choices(_WORDS, k=max(tokens - len(head.split()), 1)))


def asks_of(work: Workload, *, seed: int, mark: str = "") -> list[Ask]:
    """One for each row. `mark` tells this run's texts from others', for the engine's prefix cache."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    asks = []
    for row in range(len(work)):
        pauses = work.pauses[row] if work.pauses else ()
        rate = math.inf if work.machine[row] else float(work.rate[row])
        asks.append(
            Ask(
                due_s=float(work.arrived[row]),
                prompt=prompt_text(int(work.prompt[row]), rng, mark=f"{mark}{row}"),
                output_tokens=int(work.max_output[row]),
                person=Person.with_pauses(rate, pauses),
            )
        )
    return asks


def scanning(
    rate: float,
    rng: random.Random,
    *,
    read_s: float = 12.0,
    scan_s: float = 2.0,
    pause_s: float = 4.0,
    factor: float = 3.0,
    lasts_s: float = 300.0,
) -> Person:
    """A person who reads, then scans or pauses with equal chance, and so on; times are exponential.

    An assumption: no public data on how people pause over streamed answers was found.
    """
    spans: list[tuple[float, float]] = []
    while sum(seconds for seconds, _ in spans) < lasts_s:
        spans.append((rng.expovariate(1 / read_s), 1.0))
        is_scan = rng.random() < 0.5
        spans.append((rng.expovariate(1 / (scan_s if is_scan else pause_s)), factor if is_scan else 0.0))
    return Person(rate, tuple(spans))
