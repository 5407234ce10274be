"""What the gateway showed and what was true, moment by moment, for whoever wants to know why."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from tokenflow_bench.readers.accuracy.measure import Sample
from tokenflow_bench.readers.accuracy.truth import Truth

__all__ = ["write_trace"]

_COLUMNS = ("at_s", "generated", "read", "shown_generated", "shown_read", "shown_rate", "state", "source")


def write_trace(path: Path, samples: Iterable[Sample], truth: Truth) -> None:
    """One CSV line a sample; seconds from the reader's begin."""
    begin, _ = truth.window
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for one in samples:
            true = (truth.generated.at(one.at_s), truth.consumed.at(one.at_s))
            shown = (one.generated, one.consumed, one.rate, one.state, one.source)
            writer.writerow((f"{one.at_s - begin:.3f}", *true, *shown))
