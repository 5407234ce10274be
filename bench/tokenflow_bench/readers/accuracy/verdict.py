"""One row over all repetitions, and whether it does what was promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tokenflow_bench.readers.accuracy.rows import Target
from tokenflow_bench.spread import Spread

__all__ = ["CONTROL_TOKENS", "RowSummary", "is_bounded", "verdict"]

CONTROL_TOKENS = 20.0
"""A reader that lies must make a mean error of at least this much."""
_ONE_TOKEN = 1.0
_SAME_SOURCE = 0.05


@dataclass(frozen=True, kw_only=True)
class RowSummary:
    """Spreads over the repetitions. `source` names the evidence used, the most used first."""

    words: str
    target: Target
    source: str
    mean_error: Spread
    p95_error: Spread
    share: Spread
    pauses: int
    pause_noticed_ms: Spread
    resume_noticed_ms: Spread
    false_pauses: Spread
    hidden_bytes: Spread
    bounded: bool

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Of a row of the result's document."""
        runs: Sequence[Mapping[str, Any]] = row["repetitions"]
        figures = {
            name: Spread.of(run[name] for run in runs)
            for name in (
                "mean_error",
                "p95_error",
                "share",
                "pause_noticed_ms",
                "resume_noticed_ms",
                "false_pauses",
                "hidden_bytes",
            )
        }
        return cls(
            words=row["words"],
            target=Target(**row["target"]),
            source=_main_sources(runs),
            pauses=max(run["pauses"] for run in runs),
            bounded=all(is_bounded(run) for run in runs),
            **figures,
        )


def verdict(row: RowSummary) -> str:
    """``met``, ``missed``, or a dash without a promise. Medians count, but every pause must be seen."""
    target = row.target
    checks: list[bool] = []
    if target.mean_tokens is not None:
        checks.append(_at_most(row.mean_error, target.mean_tokens))
    if target.mean_share is not None:
        checks.append(_at_most(row.share, target.mean_share))
    if target.pause_ms is not None and row.pauses:
        checks.append(_at_most(row.pause_noticed_ms, target.pause_ms) and not row.pause_noticed_ms.missing)
    if target.is_bounded:
        checks.append(row.bounded)
    if target.is_control:
        checks.append(not _at_most(row.mean_error, CONTROL_TOKENS))
    if not checks:
        return "-"
    return "met" if all(checks) else "missed"


def is_bounded(run: Mapping[str, Any]) -> bool:
    """No error was larger than what lay in the client's kernel, nor that than its receive buffer."""
    worst = max(run["most_read_too_far"], run["most_read_too_short"])
    hidden, limit = run["hidden_tokens"], run["receive_buffer_bytes"]
    return hidden is not None and worst <= hidden + _ONE_TOKEN and run["hidden_bytes"] <= limit


def _at_most(figure: Spread, limit: float) -> bool:
    return figure.median is not None and figure.median <= limit


def _main_sources(runs: Sequence[Mapping[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for run in runs:
        for source, count in run["sources"].items():
            counts[source] = counts.get(source, 0) + count
    total = sum(counts.values())
    main = sorted(
        (source for source in counts if counts[source] > _SAME_SOURCE * total), key=counts.__getitem__
    )
    return ", ".join(reversed(main))
