"""From the times at which tokens came to an engine's passes: what each computed, and how long it took.

Tokens of one pass come together, those of the next one a pass later. An engine that prepares a pass while
the one before it computes (SGLang's overlap schedule, its default) sends a pass's tokens when the next one is
over: the time between two arrivals is then the duration of the pass after (`late=True`).

Tokens that come to a stream at once are of several passes: SGLang holds back what ends within a character
(one or two of a hundred tokens of a model with random weights). The last of them came when it was made, each
before it belongs to one step earlier.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tokenflow_bench.load.log import StreamLog

__all__ = ["Pass", "passes_of"]

_APART = 0.25
"""Of the median time between a stream's tokens: what comes further apart is not of one pass."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A decode step over `streams` with `context_tokens` in all, a prefill of `prefill_tokens`, or both."""

    seconds: float
    streams: int
    context_tokens: int
    prefill_tokens: int


@dataclass(slots=True)
class _Arrival:
    """Tokens that came together: stream and index of each."""

    at_s: float
    tokens: list[tuple[int, int]]


def passes_of(logs: Sequence[StreamLog], *, late: bool) -> list[Pass]:
    """Those during which the engine was certainly busy.

    Raises `ValueError` where the server does not count prompt tokens, or too few tokens came.
    """
    if any(log.prompt_tokens is None for log in logs):
        raise ValueError("the server does not say how long prompts are (usage.prompt_tokens)")
    arrivals = _arrivals(logs)
    shift = int(late)
    return [
        _pass(logs, arrivals[index], arrivals[index - shift].at_s - arrivals[index - shift - 1].at_s)
        for index in range(1 + shift, len(arrivals))
        if _is_busy(logs, arrivals[index - shift - 1].at_s, arrivals[index].at_s)
    ]


def _arrivals(logs: Sequence[StreamLog]) -> list[_Arrival]:
    gaps = [after - before for log in logs for before, after in pairwise(log.token_s)]
    if not gaps:
        raise ValueError("no answer has two tokens")
    on_time, held_back = _tokens(logs)
    arrivals = list(_together(on_time, apart_s=_APART * median(gaps)))
    steps = [arrival for arrival in arrivals if any(index for _, index in arrival.tokens)]
    begins = [step.at_s for step in steps]
    for at, row, index, earlier in held_back:
        place = bisect_right(begins, at) - 1 - earlier
        if place >= 0 and all(row != other for other, _ in steps[place].tokens):
            steps[place].tokens.append((row, index))
    return arrivals


def _tokens(
    logs: Sequence[StreamLog],
) -> tuple[list[tuple[float, int, int]], list[tuple[float, int, int, int]]]:
    """Time, stream and index of those that came when they were made, in order of time.

    Of those that were held back also how many more came with each.
    """
    on_time, held_back = [], []
    for row, log in enumerate(logs):
        earlier = 0
        for index in reversed(range(len(log.token_s))):
            at = log.token_s[index]
            earlier = earlier + 1 if log.token_s[index + 1 : index + 2] == [at] else 0
            if earlier:
                held_back.append((at, row, index, earlier))
            else:
                on_time.append((at, row, index))
    return sorted(on_time), held_back


def _together(tokens: Sequence[tuple[float, int, int]], *, apart_s: float) -> Iterator[_Arrival]:
    current: _Arrival | None = None
    last_s = 0.0
    for at, row, index in tokens:
        if current is None or at - last_s > apart_s or any(row == other for other, _ in current.tokens):
            if current is not None:
                yield current
            current = _Arrival(at, [])
        current.tokens.append((row, index))
        last_s = at
    if current is not None:
        yield current


def _pass(logs: Sequence[StreamLog], arrival: _Arrival, seconds: float) -> Pass:
    prompts = {row: logs[row].prompt_tokens or 0 for row, _ in arrival.tokens}
    decoded = [prompts[row] + index for row, index in arrival.tokens if index]
    prefilled = [prompts[row] for row, index in arrival.tokens if not index]
    return Pass(seconds, len(decoded), sum(decoded), sum(prefilled))


def _is_busy(logs: Sequence[StreamLog], begin: float, end: float) -> bool:
    """Some stream was there before, and is after."""
    return any(log.token_s and log.token_s[0] <= begin and log.token_s[-1] >= end for log in logs)
