"""A machine's costs from passes: least squares, with outliers held back and no cost below zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.calibrate.passes import Pass, passes_of
from tokenflow_bench.load.log import StreamLog

__all__ = ["Costs", "fit", "fit_passes", "mean_costs"]

Floats = NDArray[np.float64]

_ROUNDS = 20
_FAR = 3.0
"""Deviations from the median error from which on a pass counts less (Huber)."""
_LEAST_PASSES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds, as `costs.Machine` has them, and how well they fit."""

    step_base_s: float
    step_per_stream_s: float
    step_per_context_token_s: float
    prefill_base_s: float
    prefill_per_token_s: float
    error: float
    """Mean absolute error of a pass, as a share of the mean pass."""
    passes: int
    prefills: int
    is_late: bool
    """Tokens come when the next pass is over: see `passes`."""

    def words(self) -> str:
        """How far they can be trusted."""
        return (
            f"fitted to {self.passes} passes ({self.prefills} prefills), {100 * self.error:.1f} % mean error "
            f"of a pass; tokens come {'a pass late' if self.is_late else 'at once'}"
        )

    def document(self) -> dict[str, float | int | bool]:
        """For JSON."""
        return asdict(self)


def fit(runs: Sequence[Sequence[StreamLog]]) -> Costs:
    """From the logs of runs on one engine; whether its tokens come late is what explains them better.

    Raises `ValueError` for too little to fit.
    """
    found = []
    for late in (False, True):
        passes = [one for logs in runs for one in passes_of(logs, late=late)]
        found.append(fit_passes(passes, is_late=late))
    return min(found, key=lambda costs: costs.error)


def mean_costs(fits: Sequence[Costs]) -> Costs:
    """Between several on one engine: of those that agree with the best one on whether tokens come late."""
    is_late = min(fits, key=lambda costs: costs.error).is_late
    alike = [costs for costs in fits if costs.is_late == is_late]
    return Costs(
        step_base_s=fmean(costs.step_base_s for costs in alike),
        step_per_stream_s=fmean(costs.step_per_stream_s for costs in alike),
        step_per_context_token_s=fmean(costs.step_per_context_token_s for costs in alike),
        prefill_base_s=fmean(costs.prefill_base_s for costs in alike),
        prefill_per_token_s=fmean(costs.prefill_per_token_s for costs in alike),
        error=fmean(costs.error for costs in alike),
        passes=sum(costs.passes for costs in alike),
        prefills=sum(costs.prefills for costs in alike),
        is_late=is_late,
    )


def fit_passes(passes: Sequence[Pass], *, is_late: bool = False) -> Costs:
    """Raises `ValueError` for fewer than forty passes, or none with a prefill."""
    prefills = sum(one.prefill_tokens > 0 for one in passes)
    if len(passes) < _LEAST_PASSES or not prefills:
        raise ValueError(f"{len(passes)} passes, {prefills} of them with a prefill, are too few to fit costs")
    columns = np.array([_row(one) for one in passes], dtype=float)
    seconds = np.array([one.seconds for one in passes])
    costs = _robust(columns, seconds)
    costs *= seconds.sum() / (columns @ costs).sum()  # outliers, too, are time that goes by
    error = float(np.abs(columns @ costs - seconds).mean() / seconds.mean())
    return Costs(
        step_base_s=float(costs[0]),
        step_per_stream_s=float(costs[1]),
        step_per_context_token_s=float(costs[2]),
        prefill_base_s=float(costs[3]),
        prefill_per_token_s=float(costs[4]),
        error=error,
        passes=len(passes),
        prefills=prefills,
        is_late=is_late,
    )


def _row(one: Pass) -> tuple[float, ...]:
    """A pass that does both has one base, the decode step's."""
    decodes = float(one.streams > 0)
    return (
        decodes,
        one.streams,
        one.context_tokens,
        (1 - decodes) * (one.prefill_tokens > 0),
        one.prefill_tokens,
    )


def _robust(columns: Floats, seconds: Floats) -> Floats:
    weights = np.ones(len(seconds))
    costs = _not_negative(columns, seconds, weights)
    for _ in range(_ROUNDS):
        errors = np.abs(seconds - columns @ costs)
        far = _FAR * max(1.4826 * float(np.median(errors)), 1e-9)
        weights = np.minimum(1.0, far / np.maximum(errors, 1e-12))
        costs = _not_negative(columns, seconds, weights)
    return costs


def _not_negative(columns: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Weighted least squares; what comes out negative, the most negative first, is taken to cost nothing."""
    used = list(range(columns.shape[1]))
    root = np.sqrt(weights)
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-12)
    costs = np.zeros(columns.shape[1])
    while used:
        some = columns[:, used] / scale[used]
        found = np.linalg.lstsq(some * root[:, None], seconds * root, rcond=None)[0]
        if found.min() >= 0:
            costs[used] = found / scale[used]
            return costs
        used.pop(int(found.argmin()))
    return costs
