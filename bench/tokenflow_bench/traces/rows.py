"""One request of a trace, and the checks that all formats share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from tokenflow_bench.traces.errors import RowError

__all__ = ["Row", "Rows", "as_count", "as_seconds"]


class Row(NamedTuple):
    """`at_s` seconds on the trace's clock (None: it has none), tokens of prompt and answer."""

    line: int
    at_s: float | None
    prompt: int
    output: int


Rows = Iterator[Row]
"""In the file's order. Raises `RowError` with its line as second argument."""


def as_count(value: object, name: str, *, line: int) -> int:
    """A whole number that is not negative."""
    try:
        count = int(str(value))
    except ValueError:
        raise RowError(f"{name} is {value!r}, not a whole number", line) from None
    if count < 0:
        raise RowError(f"{name} is {count}, less than 0", line)
    return count


def as_seconds(value: object, name: str, *, line: int) -> float:
    """A number, or a date in ISO 8601, UTC unless it says otherwise."""
    text = str(value)
    try:
        seconds = float(text)
    except ValueError:
        seconds = _date_s(text)
    if not math.isfinite(seconds):
        raise RowError(f"{name} is {text!r}, neither a number nor a date", line)
    return seconds


def _date_s(text: str) -> float:
    """Since 1970; NaN for what is no date."""
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        return math.nan
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
