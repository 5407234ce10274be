"""The figures of a run on sockets: the common set, what the server says of prompts, what pauses brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tokenflow_bench.after_pause import summarise_pauses
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.metrics import Summary
from tokenflow_bench.metrics import summarise as summarise_records

__all__ = ["LoadSummary", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """`prompt_tokens_mean` is None where the server does not count, `after_pause` where nobody pauses."""

    figures: Summary
    prompt_tokens_mean: float | None
    after_pause: dict[str, float | None] | None

    def document(self) -> dict[str, Any]:
        """For JSON: all in one mapping."""
        return self.figures.document() | {
            "prompt_tokens_mean": self.prompt_tokens_mean,
            "after_pause": self.after_pause,
        }


def summarise(
    logs: Sequence[StreamLog], *, horizon_s: float, window_s: float, target_s: float | None = None
) -> LoadSummary:
    """All figures. `target_s`: the TTFT that a good stream keeps, instead of its class's."""
    records = [log.record(ttft_target_s=target_s) for log in logs]
    prompts = [log.prompt_tokens for log in logs if log.prompt_tokens is not None]
    return LoadSummary(
        figures=summarise_records(records, horizon_s=horizon_s, window_s=window_s),
        prompt_tokens_mean=fmean(prompts) if prompts else None,
        after_pause=summarise_pauses(records, horizon_s=horizon_s),
    )
