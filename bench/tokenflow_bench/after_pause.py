"""What readers met when they came back from a pause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tokenflow_bench.metrics import NOTICED_S, Record
from tokenflow_bench.reading import read_times, waits
from tokenflow_bench.spread import percentile

__all__ = ["AfterPause", "after_pauses", "summarise_pauses"]

READS_ON_S = 1.0
"""A reader who has read the next token by so long after the pause reads on in time."""
_LOOK_S = 10.0
"""How long after a pause stalls are still put down to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterPause:
    """One pause. Times in seconds, those of day on the clock of the record."""

    begin_s: float
    end_s: float
    was_generating: bool
    """Not the whole answer had come when it began."""
    is_generating: bool
    """Not the whole answer had come when it ended."""
    next_read_s: float
    """From its end until the next token had been read: the reading of that token included."""
    longest_stall_s: float
    """Within ten seconds of its end."""


def after_pauses(record: Record, *, horizon_s: float) -> list[AfterPause]:
    """What its reader met at the end of each pause; left out where the whole answer had been read by then."""
    came = record.token_s
    if not len(came):
        return []
    read_s = read_times(record.person, came)
    until_s = None if record.is_whole else horizon_s
    gaps = waits(record.person, came, read_s, until_s=until_s)
    all_came_s = float(came[-1]) if record.is_whole else horizon_s
    found = []
    for begin_s, end_s in record.person.pauses():
        begin, end = float(came[0]) + begin_s, float(came[0]) + end_s
        later = read_s[read_s > end]
        if not len(later) and record.is_whole:
            continue
        stalls = [min(stop, end + _LOOK_S) - max(start, end) for start, stop in gaps if stop > end]
        found.append(
            AfterPause(
                begin_s=begin,
                end_s=end,
                was_generating=all_came_s > begin,
                is_generating=all_came_s > end,
                next_read_s=(float(later[0]) if len(later) else horizon_s) - end,
                longest_stall_s=max([0.0, *stalls]),
            )
        )
    return found


def summarise_pauses(records: Sequence[Record], *, horizon_s: float) -> dict[str, float | None] | None:
    """Over all pauses of a run; None if nobody paused."""
    pauses = [pause for record in records for pause in after_pauses(record, horizon_s=horizon_s)]
    if not pauses:
        return None
    next_read = [pause.next_read_s for pause in pauses]
    stalls = [pause.longest_stall_s for pause in pauses]
    return {
        "pauses": len(pauses),
        "was_generating": sum(pause.was_generating for pause in pauses),
        "is_generating": sum(pause.is_generating for pause in pauses),
        "next_read_p50_s": percentile(next_read, 50),
        "next_read_p99_s": percentile(next_read, 99),
        "reads_on_share": fmean(seconds <= READS_ON_S for seconds in next_read),
        "longest_stall_p50_s": percentile(stalls, 50),
        "longest_stall_p99_s": percentile(stalls, 99),
        "smooth_share": fmean(seconds <= NOTICED_S for seconds in stalls),
    }
