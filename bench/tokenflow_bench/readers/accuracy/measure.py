"""How far the gateway's view of a reader was from the truth. Pure: samples and truth in, figures out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenflow_bench.readers.accuracy.truth import Truth
from tokenflow_bench.spread import percentile

__all__ = ["PAUSED", "Accuracy", "Sample", "measure", "noticed_ms"]

PAUSED = "paused"
_AFTERMATH_S = 2.0
"""After a pause has ended the gateway may take it for going on so long before that is a pause made up."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One stream as ``/admin/streams`` showed it; `at_s` is the middle of a request that took `took_s`."""

    at_s: float
    took_s: float
    generated: float
    consumed: float
    buffered: float
    rate: float
    state: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """One answer's figures. Errors are of `buffered`, in tokens; None where there is nothing to measure.

    `share`: mean error as a share of the tokens read by then. `most_read_too_far` and `most_read_too_short`:
    the worst error in either direction. `false_pauses`: share of samples that show a pause while the reader
    read. `consumed_error`: mean error of `consumed`, which leaves out what the gateway has not received yet.
    """

    samples: int
    mean_error: float
    p95_error: float
    share: float | None
    consumed_error: float
    most_read_too_far: float
    most_read_too_short: float
    pauses: int
    pause_noticed_ms: float | None
    resume_noticed_ms: float | None
    false_pauses: float
    tokens_read: float
    hidden_bytes: int
    hidden_tokens: float | None
    receive_buffer_bytes: int | None
    sources: dict[str, int]


def measure(samples: Iterable[Sample], truth: Truth) -> Accuracy:
    """Compare every sample within the window. Raises `ValueError` if there is none."""
    begin, end = truth.window
    seen = [sample for sample in samples if begin <= sample.at_s <= end]
    if not seen:
        raise ValueError("the gateway showed nothing of this stream")
    errors = [sample.buffered - truth.buffered(sample.at_s) for sample in seen]
    sizes = [abs(error) for error in errors]
    read = [truth.consumed.at(sample.at_s) for sample in seen]
    pauses = [noticed_ms(seen, begin_s, end_s) for begin_s, end_s in truth.pauses]
    return Accuracy(
        samples=len(seen),
        mean_error=sum(sizes) / len(sizes),
        p95_error=percentile(sizes, 95),
        share=sum(sizes) / sum(read) if sum(read) else None,
        consumed_error=sum(abs(one.consumed - true) for one, true in zip(seen, read, strict=True))
        / len(seen),
        most_read_too_far=max(0.0, -min(errors)),
        most_read_too_short=max(0.0, *errors),
        pauses=len(pauses),
        pause_noticed_ms=_worst(noticed for noticed, _ in pauses),
        resume_noticed_ms=_worst(noticed for _, noticed in pauses),
        false_pauses=sum(_is_made_up(one, truth.pauses) for one in seen) / len(seen),
        tokens_read=read[-1],
        hidden_bytes=truth.hidden_bytes,
        hidden_tokens=truth.hidden_bytes / truth.bytes_per_token if truth.bytes_per_token else None,
        receive_buffer_bytes=truth.receive_buffer_bytes,
        sources=dict(Counter(sample.source for sample in seen)),
    )


def noticed_ms(samples: Sequence[Sample], begin_s: float, end_s: float) -> tuple[float | None, float | None]:
    """Milliseconds until a pause was shown, and after its end until it was not shown any more.

    To the first sample that shows it, so up to one interval of the samples too long. None for a pause that
    was not noticed while it lasted, and for the end of such a one. Samples that had shown a pause before it
    began, and went on doing so, have not noticed it.
    """
    during = [
        sample.at_s
        for before, sample in pairwise(samples)
        if begin_s <= sample.at_s < end_s and sample.state == PAUSED != before.state
    ]
    if not during:
        return None, None
    over = [sample.at_s for sample in samples if sample.at_s >= end_s and sample.state != PAUSED]
    return 1000 * (during[0] - begin_s), (1000 * (over[0] - end_s) if over else None)


def _worst(values: Iterable[float | None]) -> float | None:
    """The largest; None if there is none, or if one of them is missing."""
    given = list(values)
    known = [value for value in given if value is not None]
    return max(known) if known and len(known) == len(given) else None


def _is_made_up(sample: Sample, pauses: Sequence[tuple[float, float]]) -> bool:
    true = any(begin <= sample.at_s <= end + _AFTERMATH_S for begin, end in pauses)
    return sample.state == PAUSED and not true
