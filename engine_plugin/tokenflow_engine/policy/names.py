"""What policies are called: for those who name one and have no use for its code."""

from __future__ import annotations

__all__ = ["POLICY_NAMES"]

POLICY_NAMES = ("adaptive", "andes", "fcfs", "tokenflow")
