"""A policy on an engine, as one word: `stock+mixed`, `adaptive-overlap`, `tokenflow:interval_s=1`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

from tokenflow_bench.simulator import Part
from tokenflow_engine.policy.base import Policy
from tokenflow_engine.policy.registry import POLICIES, policy_named
from tokenflow_engine.policy.spelling import spelled

__all__ = ["STOCK", "Variant"]

STOCK = "stock"
"""SGLang by itself."""
_MIXED = "mixed"
_WORD = re.compile(r"([a-z]+)((?:[+-][a-z]+)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is compared.

    All policies but `stock` run on an engine with `--enable-mixed-chunk`, unless they are called `-mixed`;
    `stock+mixed` is SGLang with that flag. `-offload`, `-writes`, `-overlap`, `-reports` take away a `Part`.
    So `andes-offload` is Andes as in its paper: who is preempted is computed again.
    """

    policy: str
    options: dict[str, Any]
    mixed: bool
    without: tuple[Part, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ValueError` for what does not exist."""
        word, options = spelled(text)
        match = _WORD.fullmatch(word)
        if match is None:
            raise ValueError(f"{text!r} is no policy; examples: stock+mixed, adaptive, andes-offload")
        name, signs = match[1], re.findall(r"[+-][a-z]+", match[2])
        mixed = f"+{_MIXED}" in signs or (name != STOCK and f"-{_MIXED}" not in signs)
        parts = {sign[1:] for sign in signs} - {_MIXED}
        if unknown := parts - set(Part):
            raise ValueError(f"{text!r}: {', '.join(sorted(unknown))} is none of mixed, {', '.join(Part)}")
        if wrong := [sign for sign in signs if sign[0] == "+" and sign[1:] != _MIXED]:
            raise ValueError(f"{text!r}: {wrong[0]} is there anyway")
        policy = "fcfs" if name == STOCK else name
        if policy not in POLICIES:
            raise ValueError(f"{text!r}: no policy {name!r}; there are stock, {', '.join(sorted(POLICIES))}")
        variant = cls(
            policy=policy, options=options, mixed=mixed, without=tuple(sorted(Part(part) for part in parts))
        )
        variant.new_policy()
        return variant

    def new_policy(self) -> Policy:
        """Without a history. Raises `ValueError` for an option that does not exist."""
        return policy_named(self.policy, **self.options)
