"""Policies by name."""

from __future__ import annotations

from typing import Any

from tokenflow_engine.policy.adaptive import Adaptive
from tokenflow_engine.policy.andes import Andes
from tokenflow_engine.policy.base import Policy
from tokenflow_engine.policy.fcfs import FCFS
from tokenflow_engine.policy.tokenflow import TokenFlow

__all__ = ["POLICIES", "policy_named"]

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (FCFS, Andes, TokenFlow, Adaptive)}


def policy_named(name: str, **options: Any) -> Policy:
    """A new policy. Raises `ValueError` for a name or an option that does not exist."""
    try:
        policy = POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; there are: {', '.join(sorted(POLICIES))}") from None
    try:
        return policy(**options)
    except TypeError as error:
        raise ValueError(f"policy {name}: {error}") from error
