"""What a run says of readers who paused in a burst: whose KV left meanwhile, and how the others fared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenflow_bench.after_pause import after_pauses
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.metrics import summarise

__all__ = ["pausing_figures"]

_OF_OTHERS = ("ttft_mean_s", "ttft_p99_s", "wait_mean_s", "wait_p99_s", "stall_free_share")
WasAway = Callable[[str, float, float], bool]


def pausing_figures(
    logs: Sequence[StreamLog], was_away: WasAway, *, horizon_s: float, window_s: float, target_s: float
) -> dict[str, Any] | None:
    """None if nobody paused. `was_away(stream, begin, end)`: see `Places`; times are those of the logs."""
    pausing = [log for log in logs if log.person.pauses()]
    others = [log.record(ttft_target_s=target_s) for log in logs if not log.person.pauses()]
    if not pausing:
        return None
    live = [
        (log, pause)
        for log in pausing
        for pause in after_pauses(log.record(), horizon_s=horizon_s)
        if pause.was_generating
    ]
    moved = sum(was_away(log.stream or "", pause.begin_s, pause.end_s) for log, pause in live)
    figures = summarise(others, horizon_s=horizon_s, window_s=window_s).document() if others else {}
    return {
        "generating": len(live),
        "moved_out": moved,
        "others": {name: figures[name] for name in _OF_OTHERS} if figures else None,
    }
