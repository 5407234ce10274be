"""The figures of a run over all its arrivals: what failed or was not over waits until the horizon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from tokenflow_bench import formulas
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.load.reading import Reading
from tokenflow_bench.spread import percentile

__all__ = ["AfterPause", "StreamFigures", "Summary", "summarise"]

NOTICED_S = 0.3
"""A stall longer than this is counted after a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterPause:
    """One pause, from its end on. None where the answer was over by then."""

    new_token_s: float | None
    """Until a token came that had not come before."""
    text_s: float
    """Until there was something to read: 0 with unread text."""
    stalls: int
    """Of more than `NOTICED_S`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures:
    """One stream, by the formulas of `formulas`. Times in seconds."""

    ttft_s: float
    """From its scheduled arrival; to the horizon if no token came."""
    stall_s: float
    wait_s: float
    """TTFT + stall: how late the last token is read."""
    is_stall_free: bool
    """Whole, with at most `STALL_FREE_S` of stall."""
    is_good: bool
    """Stall-free, and the first token within its target."""
    tokens: int
    read_in_window: int
    effective: float
    qoe: float
    lead_s: float

    @classmethod
    def of(cls, log: StreamLog, *, horizon_s: float, window_s: float, target_s: float) -> StreamFigures:
        """Of one log; tokens count as read within the first `window_s` of the run."""
        reading = log.reading()
        rate = log.person.rate
        ttft_s = (log.token_s[0] if log.token_s else horizon_s) - log.due_s
        stall_s = sum(end - begin for begin, end in _stalls(log, reading, horizon_s))
        is_stall_free = log.is_whole and stall_s <= formulas.STALL_FREE_S
        length = len(log.token_s) if log.is_whole else max(log.output_tokens, len(log.token_s))
        return cls(
            ttft_s=ttft_s,
            stall_s=stall_s,
            wait_s=ttft_s + stall_s,
            is_stall_free=is_stall_free,
            is_good=is_stall_free and ttft_s <= target_s,
            tokens=len(log.token_s),
            read_in_window=reading.read_by(window_s),
            effective=formulas.effective_tokens(log.token_s, reading.read_s, output_tokens=max(length, 1)),
            qoe=formulas.quality_of_experience(
                reading.read_s, expected_first_s=log.due_s + target_s, rate=rate
            ),
            lead_s=formulas.mean_lead_s(log.token_s, reading.read_s, rate=rate),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run, in seconds, tokens per second and shares of 1. Waits are people's, throughput all's."""

    streams: int
    whole: int
    """Answers that came to their end."""
    missing: int
    """Answers that did not."""
    prompt_tokens_mean: float | None
    output_tokens_mean: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    stall_mean_s: float
    wait_mean_s: float
    wait_p99_s: float
    stall_free_share: float
    good_share: float
    raw_tokens_per_s: float
    """Tokens that came, from the first scheduled arrival to the last token."""
    consumed_tokens_per_s: float
    """Tokens read within the window, over it."""
    effective_tokens_per_s: float
    qos: float
    qoe_mean: float
    lead_mean_s: float
    lead_p99_s: float
    """Of the streams' means."""
    makespan_s: float
    after_pause: dict[str, float | None] | None

    def document(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    logs: Sequence[StreamLog], *, horizon_s: float, window_s: float, target_s: float = 1.0
) -> Summary:
    """All figures. `target_s`: the TTFT that a good stream keeps, and that Andes' expected reader waits."""
    figures = [
        StreamFigures.of(log, horizon_s=horizon_s, window_s=window_s, target_s=target_s) for log in logs
    ]
    people = [
        figure for log, figure in zip(logs, figures, strict=True) if not log.person.is_machine
    ] or figures
    begin = min(log.due_s for log in logs)
    makespan_s = max(max((log.token_s[-1] for log in logs if log.token_s), default=begin) - begin, 1e-9)
    ttft, wait = [one.ttft_s for one in people], [one.wait_s for one in people]
    leads = [one.lead_s for one in people]
    prompts = [log.prompt_tokens for log in logs if log.prompt_tokens is not None]
    return Summary(
        streams=len(logs),
        whole=sum(log.is_whole for log in logs),
        missing=sum(not log.is_whole for log in logs),
        prompt_tokens_mean=fmean(prompts) if prompts else None,
        output_tokens_mean=fmean(one.tokens for one in figures),
        ttft_mean_s=fmean(ttft),
        ttft_p50_s=percentile(ttft, 50),
        ttft_p99_s=percentile(ttft, 99),
        stall_mean_s=fmean(one.stall_s for one in people),
        wait_mean_s=fmean(wait),
        wait_p99_s=percentile(wait, 99),
        stall_free_share=fmean(one.is_stall_free for one in people),
        good_share=fmean(one.is_good for one in people),
        raw_tokens_per_s=sum(one.tokens for one in figures) / makespan_s,
        consumed_tokens_per_s=sum(one.read_in_window for one in figures) / window_s,
        effective_tokens_per_s=sum(one.effective for one in figures) / makespan_s,
        qos=formulas.quality_of_service(
            [one.effective for one in people], ttft, [one.stall_s for one in people], seconds=makespan_s
        ),
        qoe_mean=fmean(one.qoe for one in people),
        lead_mean_s=fmean(leads),
        lead_p99_s=percentile(leads, 99),
        makespan_s=makespan_s,
        after_pause=_after_pauses(logs, horizon_s),
    )


def after_pauses(log: StreamLog, *, horizon_s: float) -> list[AfterPause]:
    """What its reader met at the end of each pause; left out where the whole answer had been read by then."""
    if not log.token_s:
        return []
    reading = log.reading()
    found = []
    for _, end in log.person.pauses():
        back_s = log.token_s[0] + end
        if reading.read_s[-1] <= back_s and log.is_whole:
            continue
        new = next((at for at in log.token_s if at > back_s), None)
        if new is None and not log.is_whole:
            new = horizon_s
        unread = any(come <= back_s < read for come, read in zip(log.token_s, reading.read_s, strict=True))
        stalls = [stall for stall in _stalls(log, reading, horizon_s) if stall[1] > back_s]
        found.append(
            AfterPause(
                new_token_s=None if new is None else new - back_s,
                text_s=0.0 if unread or new is None else new - back_s,
                stalls=sum(end - max(begin, back_s) > NOTICED_S for begin, end in stalls),
            )
        )
    return found


def _after_pauses(logs: Sequence[StreamLog], horizon_s: float) -> dict[str, float | None] | None:
    pauses = [pause for log in logs for pause in after_pauses(log, horizon_s=horizon_s)]
    if not pauses:
        return None
    new = [pause.new_token_s for pause in pauses if pause.new_token_s is not None]
    return {
        "pauses": len(pauses),
        "over_by_then": len(pauses) - len(new),
        "new_token_mean_s": fmean(new) if new else None,
        "new_token_p99_s": percentile(new, 99) if new else None,
        "text_mean_s": fmean(pause.text_s for pause in pauses),
        "text_p99_s": percentile([pause.text_s for pause in pauses], 99),
        "stalls": sum(pause.stalls for pause in pauses),
    }


def _stalls(log: StreamLog, reading: Reading, horizon_s: float) -> list[tuple[float, float]]:
    """With the wait for text that never came."""
    if log.is_whole or not reading.read_s or reading.read_s[-1] >= horizon_s:
        return reading.stalls
    return reading.stalls + reading.waiting(reading.read_s[-1], horizon_s)
