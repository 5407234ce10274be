"""The goals against stock SGLang, and whether they were met: honest ones, and ambitious ones.

Each is a median over seeds of what the policy gets, or of its ratio to stock with the same seed. A row is met
where all of its cells are, on each of its set-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tokenflow_bench.cases import Case

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
    honest: float
    ambitious: float
    at_least: bool = False
    form: str = "{:.2f}"

    def met(self, value: float, bound: float) -> bool:
        """Whether the figure is on the right side."""
        return value >= bound if self.at_least else value <= bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One row, on set-ups at a load, or at the paper's rates (None)."""

    title: str
    places: tuple[tuple[str, float | None], ...]
    cells: tuple[Cell, ...]
    readers: str = "steady"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One goal on one set-up. `values` as long as the goal's cells."""

    goal: str
    setup: str
    load: float | None
    values: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    shown: tuple[str, ...]
    honest: tuple[bool, ...]
    ambitious: tuple[bool, ...]


def _ratio(name: str) -> _Value:
    return lambda ours, stock: float(ours[name]) / max(float(stock[name]), 1e-9)


def _own(name: str) -> _Value:
    return lambda ours, _: float(ours[name])


def _more(name: str) -> _Value:
    return lambda ours, stock: float(ours[name]) - float(stock[name])


def _of_class(name: str, figure: str) -> _Value:
    return lambda ours, _: float(ours["classes"][name][figure])


def _cell(
    title: str, value: _Value, *, at_least: bool = False, form: str = "{:.2f}"
) -> Callable[[float, float], Cell]:
    """One figure of several rows, each with bounds of its own: honest, ambitious."""

    def bounded(honest: float, ambitious: float) -> Cell:
        return Cell(
            title=title, value=value, honest=honest, ambitious=ambitious, at_least=at_least, form=form
        )

    return bounded


_ttft_p99 = _cell("TTFT P99, of stock's", _ratio("ttft_p99_s"))
_ttft_mean = _cell("TTFT mean, of stock's", _ratio("ttft_mean_s"))
_stall_free = _cell("stall-free", _own("stall_free_share"), at_least=True, form="{:.1%}")
_raw = _cell("raw, of stock's", _ratio("raw_tokens_per_s"), at_least=True, form="{:.3f}")
_effective = _cell("effective, of stock's", _ratio("effective_tokens_per_s"), at_least=True)


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
            Cell(title="TTFT P99, s", value=_own("ttft_p99_s"), honest=1.0, ambitious=0.2),
            _stall_free(0.99, 1.0),
            _raw(1.0, 1.05),
            _effective(1.05, 1.1),
        ),
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
            Cell(title="TTFT P99, s more than stock", value=_more("ttft_p99_s"), honest=0.5, ambitious=0.5),
            _stall_free(0.95, 0.95),
            _raw(0.99, 0.99),
        ),
    ),
    Goal(
        title="Azure, load 1.0 and 1.2",
        places=(("4090-azure", 1.0), ("4090-azure", 1.2)),
        cells=(_ttft_p99(0.65, 0.45), _stall_free(0.95, 0.99), _raw(1.05, 1.1), _effective(1.1, 1.15)),
    ),
    Goal(
        title="human rates, burst, load 0.8",
        places=_at(0.8, "4090-human", "h200-human"),
        cells=(_ttft_p99(0.1, 0.06), _stall_free(0.95, 0.99), _raw(1.05, 1.15)),
    ),
    Goal(
        title="no queue",
        places=_at(0.3, "4090-poisson"),
        cells=(_ttft_mean(1.1, 1.1),),
    ),
    Goal(
        title="preemptions below load 1",
        places=_at(0.8, "4090-a", "4090-gamma", "4090-azure"),
        cells=(Cell(title="preemptions a request", value=_own("preemptions"), honest=3.0, ambitious=3.0),),
    ),
    Goal(
        title="premium class, Azure 1.2",
        places=_at(1.2, "4090-azure"),
        cells=(
            Cell(
                title="premium TTFT P99, s",
                value=_of_class("premium", "ttft_p99_s"),
                honest=2.0,
                ambitious=1.0,
            ),
        ),
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
    """What has to be run; `adaptive` is held to the goals, `tokenflow` is for comparison."""
    for goal in GOALS:
        for policy in ("stock", "tokenflow", "adaptive"):
            yield from _cases_at(goal, policy, seed)


def verdicts(
    figures_of: Callable[[Case], Figures], seeds: Sequence[int], *, policy: str = "adaptive"
) -> list[Verdict]:
    """All goals on all their set-ups."""
    found = []
    for goal in GOALS:
        ours = [list(_cases_at(goal, policy, seed)) for seed in seeds]
        stock = [list(_cases_at(goal, "stock", seed)) for seed in seeds]
        for place, (setup, load) in enumerate(goal.places):
            pairs = [
                (figures_of(one[place]), figures_of(other[place]))
                for one, other in zip(ours, stock, strict=True)
            ]
            by_cell = [[cell.value(*pair) for pair in pairs] for cell in goal.cells]
            values = tuple(median(figures) for figures in by_cell)
            found.append(
                Verdict(
                    goal=goal.title,
                    setup=setup,
                    load=load,
                    values=values,
                    lows=tuple(min(figures) for figures in by_cell),
                    highs=tuple(max(figures) for figures in by_cell),
                    shown=tuple(
                        f"{cell.title} {cell.form.format(value)}"
                        for cell, value in zip(goal.cells, values, strict=True)
                    ),
                    honest=tuple(
                        cell.met(value, cell.honest) for cell, value in zip(goal.cells, values, strict=True)
                    ),
                    ambitious=tuple(
                        cell.met(value, cell.ambitious)
                        for cell, value in zip(goal.cells, values, strict=True)
                    ),
                )
            )
    return found
