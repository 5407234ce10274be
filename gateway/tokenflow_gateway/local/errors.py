"""The one error of this package."""

from __future__ import annotations

__all__ = ["SetupError"]


class SetupError(Exception):
    """Something a person has to put right first. The message is one line that says what to do."""
