"""What our policy is to reach against stock scheduling, and whether it did, in words."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median
from typing import Any

from tokenflow_bench.burst.deployment import STOCK
from tokenflow_bench.spread import Spread
from tokenflow_bench.tables import number

__all__ = ["MET", "OURS", "judged", "ratio", "worth"]

OURS = "adaptive"
MET = "**met**"
"""How the line of a target ends that was."""
_Run = Mapping[str, Any]
_Cases = Mapping[str, Sequence[_Run]]

_PAYS = 0.05
"""A part pays if without it waits are longer, or throughput lower, by more than this, or as many stall."""
_CHANCE = 0.1
"""How often so many rounds may agree if the part makes no difference (a two-sided sign test): all of five do
once in sixteen times, all of three once in four.
"""


@dataclass(frozen=True, slots=True)
class _Target:
    """`limit` of a ratio to stock, or of a share. `is_most`: it may be at most that, else at least."""

    words: str
    figure: Callable[[_Run], float | None]
    limit: float
    is_most: bool = False
    is_ratio: bool = True

    def judge(self, ours: Sequence[_Run], stock: Sequence[_Run]) -> str:
        """One line: met or missed, and by what."""
        values = [self.figure(run) for run in ours]
        if self.is_ratio:
            found = ratio(values, [self.figure(run) for run in stock])
        else:
            found = Spread.of(values).median
        if found is None:
            return f"{self.words}: no figure"
        is_met = (operator.le if self.is_most else operator.ge)(round(found, 4), self.limit)
        wanted = f"{'at most' if self.is_most else 'at least'} {self._shown(self.limit)}"
        return f"{self.words}: {self._shown(found)} ({wanted}): {MET if is_met else '**missed**'}"

    def _shown(self, value: float) -> str:
        return f"x{number(value, 2)}" if self.is_ratio else f"{number(100 * value)} %"


def _figure(name: str) -> Callable[[_Run], float | None]:
    return lambda run: run["figures"][name]


def _pause(name: str) -> Callable[[_Run], float | None]:
    return lambda run: (run["figures"]["after_pause"] or {}).get(name)


def _moved_share(run: _Run) -> float | None:
    pausing = run["pausing"]
    return pausing["moved_out"] / pausing["generating"] if pausing and pausing["generating"] else None


_STALL_FREE = _Target("stall-free streams", _figure("stall_free_share"), 0.95, is_ratio=False)
_BELOW_CAPACITY = (
    _Target("TTFT p99 against stock", _figure("ttft_p99_s"), 0.2, is_most=True),
    _Target("mean wait against stock", _figure("wait_mean_s"), 0.4, is_most=True),
    _STALL_FREE,
    _Target("raw throughput against stock", _figure("raw_tokens_per_s"), 1.0),
    _Target("effective throughput against stock", _figure("effective_tokens_per_s"), 1.3),
)
_ABOVE_CAPACITY = (
    _Target("mean wait against stock", _figure("wait_mean_s"), 0.6, is_most=True),
    _STALL_FREE,
    _Target("raw throughput against stock", _figure("raw_tokens_per_s"), 0.98),
)
_AFTER_PAUSES = (
    _Target("of the pausing streams, KV moved out", _moved_share, 0.95, is_ratio=False),
    _Target("read on within a second of the pause", _pause("reads_on_share"), 0.95, is_ratio=False),
    _Target("no stall over 0.3 s after it", _pause("smooth_share"), 0.95, is_ratio=False),
)


def judged(table: Mapping[str, Any]) -> list[str]:
    """A line for each target of this table; none without our policy and stock."""
    cases: _Cases = table["cases"]
    if OURS not in cases or STOCK not in cases:
        return []
    if table.get("pausing"):
        targets: tuple[_Target, ...] = _AFTER_PAUSES
    else:
        targets = _BELOW_CAPACITY if table["load"] < 1 else _ABOVE_CAPACITY
    return [target.judge(cases[OURS], cases[STOCK]) for target in targets]


def worth(table: Mapping[str, Any]) -> list[str]:
    """A line for each case that is our policy without a part: what doing without costs, whether it pays."""
    cases: _Cases = table["cases"]
    policies: Mapping[str, str] = table.get("policies", {})
    partial = [name for name in cases if policies.get(name, "").startswith(f"{OURS}:")]
    return [_verdict(name, cases[name], cases[OURS]) for name in partial] if OURS in cases else []


@dataclass(frozen=True, slots=True)
class _Loss:
    """What doing without a part changes: a ratio of the same round, or a difference of shares."""

    words: str
    figure: Callable[[_Run], float | None]
    is_ratio: bool = True
    more_is_worse: bool = False

    def rounds(self, without: Sequence[_Run], whole: Sequence[_Run]) -> list[float | None]:
        """The change in each round; None where there is none to speak of."""
        pairs = list(zip(map(self.figure, without), map(self.figure, whole), strict=True))
        if self.is_ratio:
            return [a / b if a is not None and b else None for a, b in pairs]
        return [a - b if a is not None and b is not None else None for a, b in pairs]

    def losses(self, without: Sequence[_Run], whole: Sequence[_Run]) -> list[float]:
        """The same as a loss: above zero where it is worse without the part."""
        sign = 1 if self.more_is_worse else -1
        level = 1.0 if self.is_ratio else 0.0
        return [sign * (value - level) for value in self.rounds(without, whole) if value is not None]

    def shown(self, without: Sequence[_Run], whole: Sequence[_Run]) -> str | None:
        """Median and range over the rounds."""
        found = Spread.of(self.rounds(without, whole))
        if found.median is None or found.low is None or found.high is None:
            return None
        show = _as_ratio if self.is_ratio else _as_points
        spread = f" ({show(found.low)} to {show(found.high)})" if found.low != found.high else ""
        return f"{self.words} {show(found.median)}{spread}{'' if self.is_ratio else ' points'}"

    def by_round(self, without: Sequence[_Run], whole: Sequence[_Run]) -> str:
        """All of them, in order."""
        values = self.rounds(without, whole)
        return f"{self.words} {', '.join('-' if value is None else _as_ratio(value) for value in values)}"


def _as_ratio(value: float) -> str:
    return f"x{number(value, 2)}"


def _as_points(value: float) -> str:
    return f"{100 * value:+.0f}"


_WAIT = _Loss("mean wait", _figure("wait_mean_s"), more_is_worse=True)
_RAW = _Loss("raw throughput", _figure("raw_tokens_per_s"))
_SHARES = (
    _Loss("stall-free", _figure("stall_free_share"), is_ratio=False),
    _Loss("read on within a second of a pause", _pause("reads_on_share"), is_ratio=False),
    _Loss("no stall over 0.3 s after it", _pause("smooth_share"), is_ratio=False),
)
_SHOWN = (_WAIT, _Loss("TTFT p99", _figure("ttft_p99_s"), more_is_worse=True), _RAW, *_SHARES)
_JUDGED = (_WAIT, _RAW, *_SHARES)


def _verdict(name: str, without: Sequence[_Run], whole: Sequence[_Run]) -> str:
    figures = [words for one in _SHOWN if (words := one.shown(without, whole)) is not None]
    losses = [one.losses(without, whole) for one in _JUDGED]
    pays = any(map(_is_clear, losses))
    costs = any(_is_clear([-loss for loss in each]) for each in losses)
    verdict = "cannot tell" if pays == costs else "pays" if pays else "costs"
    rounds = "; ".join(one.by_round(without, whole) for one in (_WAIT, _RAW))
    return f"{name}: {', '.join(figures)}; round by round: {rounds}: **{verdict}**"


def _is_clear(losses: Sequence[float]) -> bool:
    """More than `_PAYS` in the median, and no accident."""
    if not losses or median(losses) <= _PAYS:
        return False
    rounds, exceptions = len(losses), sum(loss <= 0 for loss in losses)
    as_many = sum(comb(rounds, few) for few in range(exceptions + 1))
    return bool(2 * as_many / 2**rounds <= _CHANCE)


def ratio(runs: Iterable[float | None], stock: Iterable[float | None]) -> float | None:
    """The median over the rounds of what one case has for each unit of stock; None where stock has none."""
    pairs = zip(runs, stock, strict=True)
    return Spread.of(one / other if one is not None and other else None for one, other in pairs).median
