"""Arrivals and lengths of recorded traffic, for replay."""

from __future__ import annotations

import csv
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["read_trace"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_COLUMNS = {
    "TIMESTAMP": ("ContextTokens", "GeneratedTokens"),  # Azure's LLM inference traces
    "Timestamp": ("Request tokens", "Response tokens"),  # BurstGPT
}


def read_trace(path: Path, *, limit: int, faster: float = 1.0) -> tuple[Floats, Ints, Ints]:
    """Arrivals in seconds from the first one, prompt and output tokens of the first `limit` requests.

    `faster` divides the times. Requests without output (BurstGPT's failures) are left out. Raises
    `ValueError` for a file that is neither Azure's nor BurstGPT's.
    """
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        time_name = next((name for name in _COLUMNS if name in (rows.fieldnames or ())), None)
        if time_name is None:
            raise ValueError(f"{path}: no column {' or '.join(_COLUMNS)}")
        prompt_name, output_name = _COLUMNS[time_name]
        answered = (row for row in rows if int(row[output_name]) > 0)
        read = [
            (_seconds(row[time_name]), int(row[prompt_name]), int(row[output_name]))
            for row in islice(answered, limit)
        ]
    if not read:
        raise ValueError(f"{path}: nothing in it")
    read.sort()
    at, prompt, output = zip(*read, strict=True)
    return (
        (np.array(at) - at[0]) / faster,
        np.array(prompt, dtype=np.int64),
        np.array(output, dtype=np.int64),
    )


def _seconds(value: str) -> float:
    """A number, or a date with up to seven digits of a second."""
    try:
        return float(value)
    except ValueError:
        whole, _, fraction = value.partition(".")
        return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
