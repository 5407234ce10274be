"""Requests with a text each, from a workload and the people who read it."""

from __future__ import annotations

import random

from tokenflow_bench.load.driver import Ask
from tokenflow_bench.workload import Workload

__all__ = ["asks_of", "prompt_text"]

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
    return [
        Ask(
            due_s=float(work.arrived[row]),
            prompt=prompt_text(int(work.prompt[row]), rng, mark=f"{mark}{row}"),
            output_tokens=int(work.max_output[row]),
            person=work.person(row),
            sla=work.class_of(row),
        )
        for row in range(len(work))
    ]
