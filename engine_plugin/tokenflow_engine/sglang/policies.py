"""The policy an engine starts with, and those it may be told to use."""

from __future__ import annotations

import os
from typing import Any

from tokenflow_engine.policy.base import Policy
from tokenflow_engine.policy.chaos import Chaos
from tokenflow_engine.policy.fcfs import FCFS
from tokenflow_engine.policy.registry import POLICIES, policy_named
from tokenflow_engine.sglang.eligible import why_engine_is_fixed

__all__ = ["DEFAULT_POLICY", "available", "named", "policy_at_start"]

DEFAULT_POLICY = "fcfs"


def policy_at_start() -> str:
    """The name in ``TOKENFLOW_POLICY``, or the default's."""
    return os.environ.get("TOKENFLOW_POLICY") or DEFAULT_POLICY


def available(scheduler: Any) -> list[str]:
    """Names of the policies that this engine can be told to use."""
    return [FCFS.name] if why_engine_is_fixed(scheduler) is not None else sorted(POLICIES)


def named(name: str) -> Policy:
    """A new policy. Raises ValueError for an unknown name."""
    return Chaos() if name == Chaos.name else policy_named(name)
