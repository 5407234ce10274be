"""The policy an engine starts with, and those it may be told to use."""

from __future__ import annotations

import os
from typing import Any

from tokenflow_engine.control.parts import Parts
from tokenflow_engine.policy.base import Policy
from tokenflow_engine.policy.chaos import Chaos
from tokenflow_engine.policy.fcfs import FCFS
from tokenflow_engine.policy.registry import POLICIES, policy_named
from tokenflow_engine.policy.spelling import spelled
from tokenflow_engine.sglang.eligible import why_engine_is_fixed

__all__ = ["DEFAULT_POLICY", "available", "named", "policy_at_start"]

DEFAULT_POLICY = "adaptive"


def policy_at_start() -> str:
    """What ``TOKENFLOW_POLICY`` says, or the default."""
    return os.environ.get("TOKENFLOW_POLICY") or DEFAULT_POLICY


def available(scheduler: Any) -> list[str]:
    """Names of the policies that this engine can be told to use."""
    return [FCFS.name] if why_engine_is_fixed(scheduler) is not None else sorted(POLICIES)


def named(text: str) -> tuple[Policy, Parts]:
    """A new policy, called as it was spelled, and the parts of the plugin that it may use.

    ``NAME:option=value,...`` sets options of the policy, and switches `Parts` off with 0. Raises ValueError
    for what does not exist.
    """
    name, options = spelled(text)
    parts = Parts(**{part: bool(options.pop(part)) for part in Parts.__struct_fields__ if part in options})
    policy: Policy = Chaos() if name == Chaos.name and not options else policy_named(name, **options)
    policy.name = text
    return policy, parts
