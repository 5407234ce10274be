"""What our policy is to reach against stock scheduling, and whether it did, in words."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


def _verdict(name: str, without: Sequence[_Run], whole: Sequence[_Run]) -> str:
    ratios = {
        words: ratio(map(figure, without), map(figure, whole)) or 1.0 for words, figure in _RATIOS.items()
    }
    points = {words: _difference(figure, without, whole) for words, figure in _SHARES.items()}
    known = {words: difference for words, difference in points.items() if difference is not None}
    wait, raw = ratios["mean wait"], ratios["raw throughput"]
    if wait > 1 + _PAYS or raw < 1 - _PAYS or min(known.values()) < -_PAYS:
        verdict = "the part pays"
    elif wait < 1 - _PAYS or raw > 1 + _PAYS or max(known.values()) > _PAYS:
        verdict = "better without it"
    else:
        verdict = "no difference seen"
    figures = [f"{words} x{number(value, 2)}" for words, value in ratios.items()]
    figures += [f"{words} {100 * difference:+.0f} points" for words, difference in known.items()]
    return f"{name}: {', '.join(figures)}: **{verdict}**"


_RATIOS = {
    "mean wait": _figure("wait_mean_s"),
    "TTFT p99": _figure("ttft_p99_s"),
    "raw throughput": _figure("raw_tokens_per_s"),
}
_SHARES = {
    "stall-free": _figure("stall_free_share"),
    "read on within a second of a pause": _pause("reads_on_share"),
    "no stall over 0.3 s after it": _pause("smooth_share"),
}


def _difference(
    figure: Callable[[_Run], float | None], without: Sequence[_Run], whole: Sequence[_Run]
) -> float | None:
    """The median over the rounds; None where a case has no such figure."""
    pairs = zip(map(figure, without), map(figure, whole), strict=True)
    return Spread.of(a - b if a is not None and b is not None else None for a, b in pairs).median


def ratio(runs: Iterable[float | None], stock: Iterable[float | None]) -> float | None:
    """The median over the rounds of what one case has for each unit of stock; None where stock has none."""
    pairs = zip(runs, stock, strict=True)
    return Spread.of(one / other if one is not None and other else None for one, other in pairs).median
