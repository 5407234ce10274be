"""What is wrong with a trace, and where."""

from __future__ import annotations

__all__ = ["RowError", "TraceError"]


class TraceError(ValueError):
    """A file that is no trace, or has a bad row; the message names file and line."""


class RowError(ValueError):
    """A row that means nothing. The reader of the file adds where it is."""
