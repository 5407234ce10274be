"""What a run was like for those who wait and those who pay: one set of figures for sockets and simulation.

Over **all** arrivals: what failed or was not over waits until the horizon, and is neither stall-free nor
good. No figure stands alone. Effective throughput and QoS pay for slowness, a low TTFT can hide long stalls,
smooth reading can hide a long wait for the first token: look at the whole set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench import formulas
from tokenflow_bench.reading import Person, read_times, waits
from tokenflow_bench.sla import ONE_CLASS
from tokenflow_bench.spread import percentile

__all__ = ["NOTICED_S", "ClassFigures", "Record", "StreamFigures", "Summary", "summarise"]

Floats = NDArray[np.float64]

NOTICED_S = 0.3
"""A wait for text longer than this is counted as a stall; stall seconds count all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What happened to one request. Times in seconds on the run's clock."""

    due_s: float
    """When it was scheduled, whatever held it up (coordinated omission)."""
    token_s: Floats
    """When each token came."""
    person: Person
    output_tokens: int
    """What it asked for."""
    is_whole: bool
    """The answer came to its end, without an error."""
    ttft_target_s: float = ONE_CLASS.ttft_target_s
    sla: str = ONE_CLASS.name
    """Name of its class."""

    @property
    def length(self) -> int:
        """Tokens of the whole answer: those that came, or for one that was cut off those asked for."""
        return len(self.token_s) if self.is_whole else max(self.output_tokens, len(self.token_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures:
    """One stream. Formulas beside each figure; B, n, read_s as in `formulas` and `reading`."""

    ttft_s: float
    """First token - scheduled arrival; horizon - arrival if no token came."""
    tbt_s: float | None
    """Mean time between tokens: `formulas.mean_time_between_tokens`."""
    stall_s: float
    """Seconds on an empty buffer after the first token, pauses apart: `reading.waits`."""
    stalls: int
    """Of these waits, those longer than `NOTICED_S`."""
    wait_s: float
    """*Wait* = TTFT + stall: how late the last token is read."""
    is_stall_free: bool
    """Whole, with at most `STALL_FREE_S` of stall."""
    is_good: bool
    """*Good*: stall-free, and the first token within its class's target."""
    meets_ttft: bool
    meets_tbt: bool
    """Whole, and the mean time between tokens at most 1 / rate (the reader's pace as TPOT target)."""
    tokens: int
    read_in_window: int
    """Tokens read by the window's end."""
    effective: float
    """`formulas.effective_tokens`."""
    capped_end_s: float | None
    """When the last token would come with the lead capped: `formulas.capped_token_s`."""
    qoe: float
    """`formulas.quality_of_experience`; what never came counts as read at the horizon."""
    lead_s: float
    """`formulas.mean_lead_s`."""

    @classmethod
    def of(cls, record: Record, *, horizon_s: float, window_s: float) -> Self:
        """All figures of one record."""
        came, person = record.token_s, record.person
        read_s = read_times(person, came)
        ttft_s = float(came[0] if len(came) else horizon_s) - record.due_s
        gaps = waits(person, came, read_s, until_s=None if record.is_whole else horizon_s)
        stall_s = sum(end - begin for begin, end in gaps)
        is_stall_free = record.is_whole and stall_s <= formulas.STALL_FREE_S
        meets_ttft = bool(len(came)) and ttft_s <= record.ttft_target_s
        tbt_s = formulas.mean_time_between_tokens(came)
        length = max(record.length, 1)
        capped = formulas.capped_token_s(came, read_s, output_tokens=length)
        missing = np.full(length - len(came), max(horizon_s, read_s[-1] if len(came) else 0.0))
        return cls(
            ttft_s=ttft_s,
            tbt_s=tbt_s,
            stall_s=stall_s,
            stalls=sum(end - begin > NOTICED_S for begin, end in gaps),
            wait_s=ttft_s + stall_s,
            is_stall_free=is_stall_free,
            is_good=is_stall_free and meets_ttft,
            meets_ttft=meets_ttft,
            meets_tbt=record.is_whole and (tbt_s is None or tbt_s <= 1 / person.rate or person.is_machine),
            tokens=len(came),
            read_in_window=int(np.searchsorted(read_s, window_s, side="right")),
            effective=formulas.effective_tokens(came, read_s, output_tokens=length),
            capped_end_s=float(capped[-1]) if len(came) else None,
            qoe=formulas.quality_of_experience(
                np.concatenate([read_s, missing]),
                expected_first_s=record.due_s + record.ttft_target_s,
                rate=person.rate,
            ),
            lead_s=formulas.mean_lead_s(came, read_s, rate=person.rate),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFigures:
    """Means and shares over the people of one class."""

    streams: int
    ttft_mean_s: float
    ttft_p99_s: float
    wait_mean_s: float
    wait_p99_s: float
    stall_free_share: float
    good_share: float
    slo_share: float
    qoe_mean: float

    @classmethod
    def of(cls, figures: Sequence[StreamFigures]) -> Self:
        """Of at least one stream."""
        ttft, wait = [one.ttft_s for one in figures], [one.wait_s for one in figures]
        return cls(
            streams=len(figures),
            ttft_mean_s=fmean(ttft),
            ttft_p99_s=percentile(ttft, 99),
            wait_mean_s=fmean(wait),
            wait_p99_s=percentile(wait, 99),
            stall_free_share=fmean(one.is_stall_free for one in figures),
            good_share=fmean(one.is_good for one in figures),
            slo_share=fmean(one.meets_ttft and one.meets_tbt for one in figures),
            qoe_mean=fmean(one.qoe for one in figures),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run, in seconds, tokens per second and shares of 1. Waits are people's, throughput all's.

    With machines only, they count as people, so that there is something to show.
    """

    streams: int
    whole: int
    """Answers that came to their end."""
    missing: int
    """Answers that did not."""
    output_tokens_mean: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tbt_mean_s: float | None
    """Over all gaps between tokens of one stream."""
    tbt_p50_s: float | None
    tbt_p99_s: float | None
    stall_mean_s: float
    stall_p99_s: float
    stalls_mean: float
    """Stalls of more than `NOTICED_S` a stream."""
    wait_mean_s: float
    wait_p99_s: float
    stall_free_share: float
    good_share: float
    slo_ttft_share: float
    """*SLO attainment* (DistServe): streams whose TTFT keeps their class's target,"""
    slo_tbt_share: float
    """whose mean time between tokens keeps their reader's pace,"""
    slo_share: float
    """and that do both."""
    raw_tokens_per_s: float
    """Tokens that came, over the time from the first scheduled arrival to the last token."""
    consumed_tokens_per_s: float
    """Tokens read within the window, over it."""
    effective_tokens_per_s: float
    """sum_ij w_ij over the time of `raw`: the paper's, uncapped."""
    effective_capped_tokens_per_s: float
    """Tokens over the time until the last of them, with every lead capped (`formulas.capped_token_s`)."""
    qos: float
    """`formulas.quality_of_service`, lambda = mu = 1 token a second, T the time of `raw`."""
    qoe_mean: float
    lead_mean_s: float
    lead_p99_s: float
    """Of the streams' means."""
    makespan_s: float
    fairness: float
    """Jain's index over the classes' mean QoE (`formulas.fairness`): 1, all alike."""
    worst_class: str
    """The one with the smallest share of good streams."""
    worst_class_good_share: float
    classes: dict[str, ClassFigures]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(records: Sequence[Record], *, horizon_s: float, window_s: float) -> Summary:
    """All figures of a run.

    `horizon_s`: until when what did not come is taken to be waited for. `window_s`: consumed throughput
    counts what was read by then; the same for all runs that are compared. Raises `ValueError` for no records.
    """
    if not records:
        raise ValueError("no requests: nothing to summarise")
    figures = [StreamFigures.of(record, horizon_s=horizon_s, window_s=window_s) for record in records]
    pairs = list(zip(records, figures, strict=True))
    people = [one for record, one in pairs if not record.person.is_machine] or figures
    by_class = _by_class([pair for pair in pairs if not pair[0].person.is_machine] or pairs)
    worst = min(by_class, key=lambda name: by_class[name].good_share)
    begin = min(record.due_s for record in records)
    last = max((record.token_s[-1] for record in records if len(record.token_s)), default=begin)
    capped_end = max((one.capped_end_s for one in figures if one.capped_end_s is not None), default=begin)
    makespan_s, capped_s = max(last - begin, 1e-9), max(capped_end - begin, 1e-9)
    ttft, wait = [one.ttft_s for one in people], [one.wait_s for one in people]
    stall, leads = [one.stall_s for one in people], [one.lead_s for one in people]
    tokens = sum(one.tokens for one in figures)
    tbt = _gaps(record.token_s for record in records)
    return Summary(
        streams=len(records),
        whole=sum(record.is_whole for record in records),
        missing=sum(not record.is_whole for record in records),
        output_tokens_mean=tokens / len(figures),
        ttft_mean_s=fmean(ttft),
        ttft_p50_s=percentile(ttft, 50),
        ttft_p99_s=percentile(ttft, 99),
        tbt_mean_s=float(tbt.mean()) if len(tbt) else None,
        tbt_p50_s=_nearest_rank(tbt, 50),
        tbt_p99_s=_nearest_rank(tbt, 99),
        stall_mean_s=fmean(stall),
        stall_p99_s=percentile(stall, 99),
        stalls_mean=fmean(one.stalls for one in people),
        wait_mean_s=fmean(wait),
        wait_p99_s=percentile(wait, 99),
        stall_free_share=fmean(one.is_stall_free for one in people),
        good_share=fmean(one.is_good for one in people),
        slo_ttft_share=fmean(one.meets_ttft for one in people),
        slo_tbt_share=fmean(one.meets_tbt for one in people),
        slo_share=fmean(one.meets_ttft and one.meets_tbt for one in people),
        raw_tokens_per_s=tokens / makespan_s,
        consumed_tokens_per_s=sum(one.read_in_window for one in figures) / window_s,
        effective_tokens_per_s=sum(one.effective for one in figures) / makespan_s,
        effective_capped_tokens_per_s=tokens / capped_s,
        qos=formulas.quality_of_service([one.effective for one in people], ttft, stall, seconds=makespan_s),
        qoe_mean=fmean(one.qoe for one in people),
        lead_mean_s=fmean(leads),
        lead_p99_s=percentile(leads, 99),
        makespan_s=makespan_s,
        fairness=formulas.fairness([one.qoe_mean for one in by_class.values()]),
        worst_class=worst,
        worst_class_good_share=by_class[worst].good_share,
        classes=by_class,
    )


def _by_class(pairs: Iterable[tuple[Record, StreamFigures]]) -> dict[str, ClassFigures]:
    found: dict[str, list[StreamFigures]] = {}
    for record, figures in pairs:
        found.setdefault(record.sla, []).append(figures)
    return {name: ClassFigures.of(found[name]) for name in sorted(found)}


def _gaps(streams: Iterable[Floats]) -> Floats:
    return np.concatenate([np.empty(0), *(np.diff(token_s) for token_s in streams)])


def _nearest_rank(values: Floats, percent: float) -> float | None:
    """`spread.percentile` of an array; None for an empty one."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if len(values) else None
