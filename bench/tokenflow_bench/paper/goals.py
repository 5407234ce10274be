"""The goals against stock SGLang, and whether they were met: honest ones, and ambitious ones.

Each is a median over seeds of what the policy gets, or of its ratio to stock with the same seed. A row is met
where all of its cells are, on each of its set-ups. Where the fluid limit (`bound`) says what no policy can
better, it stands beside the figure, and a goal beyond it is out of reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tokenflow_bench.cases import BOUND, Case

__all__ = ["GOALS", "Cell", "Goal", "Verdict", "goal_cases", "verdicts"]

Figures = Mapping[str, Any]
_Value = Callable[[Figures, Figures], float]
_PAPER = ((20.0, 1.0),)
_NO_RATES: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure: `value(ours, stock)` at most (or at least) `honest`; `ambitious` likewise."""

    title: str
    value: _Value
    figure: str
    """Its name in `Summary`; also in `Limit`, if that knows the best of it."""
    honest: float
    ambitious: float
    at_least: bool = False
    form: str = "{:.2f}"

    def met(self, value: float, bound: float) -> bool:
        """Whether the figure is on the right side."""
        return value >= bound if self.at_least else value <= bound

    def limit(self, best: Figures, stock: Figures) -> float | None:
        """What the fluid limit makes of it."""
        return None if best.get(self.figure) is None else self.value(best, stock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One row, on set-ups at a load, or at the paper's rates (None)."""

    title: str
    places: tuple[tuple[str, float | None], ...]
    cells: tuple[Cell, ...]
    readers: str = "steady"
    policy: str = "adaptive"
    """Held to it."""
    why: str = ""
    """What keeps it from being met, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One goal on one set-up. `values` as long as the goal's cells."""

    goal: str
    policy: str
    setup: str
    load: float | None
    values: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    shown: tuple[str, ...]
    """Each with its range over the seeds."""
    honest: tuple[bool, ...]
    ambitious: tuple[bool, ...]
    limits: tuple[str, ...]
    """Shown; empty where none is known."""
    in_reach: tuple[bool, ...]
    """The honest figure is not beyond the limit."""
    honest_seeds: int
    """In how many seeds all cells are met, each for itself."""
    ambitious_seeds: int
    why: str


def _ratio(name: str) -> _Value:
    return lambda ours, stock: float(ours[name]) / max(float(stock[name]), 1e-9)


def _own(name: str) -> _Value:
    return lambda ours, _: float(ours[name])


def _more(name: str) -> _Value:
    return lambda ours, stock: float(ours[name]) - float(stock[name])


def _of_class(name: str, figure: str) -> _Value:
    return lambda ours, _: float(ours["classes"][name][figure])


def _cell(
    title: str,
    make: Callable[[str], _Value],
    figure: str,
    *,
    at_least: bool = False,
    form: str = "{:.2f}",
) -> Callable[[float, float], Cell]:
    """One figure of several rows, each with bounds of its own: honest, ambitious."""

    def bounded(honest: float, ambitious: float) -> Cell:
        return Cell(
            title=title,
            value=make(figure),
            figure=figure,
            honest=honest,
            ambitious=ambitious,
            at_least=at_least,
            form=form,
        )

    return bounded


_ttft_p99 = _cell("TTFT P99, of stock's", _ratio, "ttft_p99_s")
_ttft_mean = _cell("TTFT mean, of stock's", _ratio, "ttft_mean_s")
_ttft_p99_own = _cell("TTFT P99, s", _own, "ttft_p99_s")
_ttft_p99_more = _cell("TTFT P99, s more than stock", _more, "ttft_p99_s")
_stall_free = _cell("stall-free", _own, "stall_free_share", at_least=True, form="{:.1%}")
_raw = _cell("raw, of stock's", _ratio, "raw_tokens_per_s", at_least=True, form="{:.3f}")
_effective = _cell("effective, of stock's", _ratio, "effective_tokens_per_s", at_least=True)
_preemptions = _cell("preemptions a request", _own, "preemptions")
_premium_ttft = _cell("premium TTFT P99, s", lambda figure: _of_class("premium", figure), "ttft_p99_s")


def _at(load: float, *setups: str) -> tuple[tuple[str, float | None], ...]:
    return tuple((setup, load) for setup in setups)


_BURSTS = ("4090-a", "4090-b", "h200-a", "h200-b")

GOALS = (
    Goal(
        title="burst, load 0.8",
        places=_at(0.8, *_BURSTS),
        cells=(_ttft_p99(0.2, 0.1), _stall_free(0.95, 1.0), _raw(1.0, 1.1), _effective(1.3, 1.5)),
    ),
    Goal(
        title="burst, load 1.0 and 1.2",
        places=_at(1.0, *_BURSTS) + _at(1.2, *_BURSTS),
        cells=(
            _ttft_p99(1.0, 1.0),
            _ttft_mean(0.45, 0.25),
            _stall_free(0.95, 1.0),
            _raw(1.0, 1.08),
            _effective(2.0, 2.5),
        ),
    ),
    Goal(
        title="Poisson that fits in its window",
        places=(("h200-c", None), ("4090-qwen-c", None)),
        cells=(
            _ttft_p99_own(1.0, 0.2),
            _stall_free(0.99, 1.0),
            _raw(1.0, 1.05),
            _effective(1.05, 1.1),
        ),
        why="Hardly anybody waits here. What is left to gain in uncapped effective throughput is holding "
        "text back, which no policy does; effective throughput with leads capped is among all figures.",
    ),
    Goal(
        title="Poisson overload",
        places=(("4090-d", None), ("4090-poisson", 1.2)),
        cells=(
            _ttft_p99(0.9, 0.8),
            _ttft_mean(0.7, 0.55),
            _stall_free(0.95, 0.99),
            _raw(1.0, 1.05),
            _effective(1.8, 2.1),
        ),
        why="Stock's TTFT does not show what its readers then wait in the middle of their answers; their "
        "whole wait is among the paper's set-ups below. For who never stalls TTFT is the whole wait, and the "
        "fluid limit of that is x0.70 of stock's mean TTFT on 4090-d.",
    ),
    Goal(
        title="Gamma, load 1.0 and 1.2",
        places=(("4090-gamma", 1.0), ("4090-gamma", 1.2), ("h200-gamma", 1.0)),
        cells=(_ttft_p99(0.5, 0.3), _stall_free(0.95, 0.99), _raw(1.0, 1.07)),
    ),
    Goal(
        title="Gamma, load 1.2, H200",
        places=_at(1.2, "h200-gamma"),
        cells=(_ttft_p99(0.2, 0.1), _stall_free(0.95, 0.99), _raw(1.0, 1.07)),
    ),
    Goal(
        title="Azure, load 0.5 and 0.8",
        places=(("4090-azure", 0.5), ("4090-azure", 0.8)),
        cells=(
            _ttft_p99_more(0.5, 0.5),
            _stall_free(0.95, 0.95),
            _raw(0.99, 0.99),
        ),
    ),
    Goal(
        title="Azure, load 1.0 and 1.2",
        places=(("4090-azure", 1.0), ("4090-azure", 1.2)),
        cells=(_ttft_p99(0.65, 0.45), _stall_free(0.95, 0.99), _raw(1.05, 1.1), _effective(1.1, 1.15)),
        why="Most of the work is prefill, and stock is about as busy as an engine can be (see the limit of "
        "raw): a policy can only choose who waits.",
    ),
    Goal(
        title="human rates, burst, load 0.8",
        places=_at(0.8, "4090-human", "h200-human"),
        cells=(_ttft_p99(0.1, 0.06), _stall_free(0.95, 0.99), _raw(1.05, 1.15)),
        why="All prompts come at once and are prefilled one after the other, beside those who read already: "
        "that is the limit.",
    ),
    Goal(
        title="no queue",
        places=_at(0.3, "4090-poisson"),
        cells=(_ttft_mean(1.1, 1.1),),
        policy="adaptive-mixed",
    ),
    Goal(
        title="preemptions below load 1",
        places=_at(0.8, "4090-a", "4090-gamma", "4090-azure"),
        cells=(_preemptions(3.0, 3.0),),
    ),
    Goal(
        title="premium class, Azure 1.2",
        places=_at(1.2, "4090-azure"),
        cells=(_premium_ttft(2.0, 1.0),),
        readers="classes",
    ),
)


def _cases_at(goal: Goal, policy: str, seed: int) -> Iterator[Case]:
    for setup, load in goal.places:
        yield Case(
            setup=setup,
            load=load,
            rates=_PAPER if load is None else _NO_RATES,
            readers=goal.readers,
            policy=policy,
            seed=seed,
        )


def goal_cases(seed: int) -> Iterator[Case]:
    """What has to be run; `tokenflow` is for comparison."""
    for goal in GOALS:
        for policy in ("stock", "tokenflow", goal.policy, BOUND):
            yield from _cases_at(goal, policy, seed)


def verdicts(figures_of: Callable[[Case], Figures], seeds: Sequence[int]) -> list[Verdict]:
    """All goals on all their set-ups."""
    return [
        _verdict(
            goal,
            place,
            [
                tuple(
                    figures_of(list(_cases_at(goal, policy, seed))[place])
                    for policy in (goal.policy, "stock", BOUND)
                )
                for seed in seeds
            ],
        )
        for goal in GOALS
        for place in range(len(goal.places))
    ]


def _verdict(goal: Goal, place: int, runs: Sequence[tuple[Figures, ...]]) -> Verdict:
    setup, load = goal.places[place]
    by_cell = [[cell.value(ours, stock) for ours, stock, _ in runs] for cell in goal.cells]
    values = [median(figures) for figures in by_cell]
    limits = [_median([cell.limit(best, stock) for _, stock, best in runs]) for cell in goal.cells]
    judged = list(zip(goal.cells, values, limits, strict=True))
    return Verdict(
        goal=goal.title,
        policy=goal.policy,
        setup=setup,
        load=load,
        values=tuple(values),
        lows=tuple(min(figures) for figures in by_cell),
        highs=tuple(max(figures) for figures in by_cell),
        shown=tuple(_shown(cell, figures) for cell, figures in zip(goal.cells, by_cell, strict=True)),
        honest=tuple(cell.met(value, cell.honest) for cell, value, _ in judged),
        ambitious=tuple(cell.met(value, cell.ambitious) for cell, value, _ in judged),
        limits=tuple("" if limit is None else cell.form.format(limit) for cell, _, limit in judged),
        in_reach=tuple(limit is None or cell.met(limit, cell.honest) for cell, _, limit in judged),
        honest_seeds=_seeds(goal.cells, by_cell, [cell.honest for cell in goal.cells]),
        ambitious_seeds=_seeds(goal.cells, by_cell, [cell.ambitious for cell in goal.cells]),
        why=goal.why,
    )


def _shown(cell: Cell, figures: Sequence[float]) -> str:
    middle, low, high = map(cell.form.format, (median(figures), min(figures), max(figures)))
    return f"{cell.title} {middle}" + (f" ({low} to {high})" if low != high else "")


def _seeds(cells: Sequence[Cell], by_cell: Sequence[Sequence[float]], bounds: Sequence[float]) -> int:
    """In how many all cells are met."""
    return sum(
        all(cell.met(value, bound) for cell, value, bound in zip(cells, of_one_seed, bounds, strict=True))
        for of_one_seed in zip(*by_cell, strict=True)
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None
