"""A straight line through measurements that never come from all regimes at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["Line"]

_REMEMBERED = 20.0
"""Points that the mean of one regime is taken over."""
_KEEP = 0.9995
"""Of a regime's weight, from one point to the next in any regime."""
_LEAST_WEIGHT = 0.01
_OUTLIER = 3.0
"""A point counts as no more than so many times its regime's mean, once that is known."""
_KNOWN = 4.0
_PRIOR_WEIGHT = 0.05
_DRIFT_SHARE = 0.02
"""Of one point in the drift."""
_LEAST_DRIFT, _MOST_DRIFT = 0.5, 4.0
_SETTLED_AFTER = 32
"""Points; from then on what the line does not explain is drift."""
_REFIT_EVERY = 32
"""Points; sooner, while an eighth more than there were says something new."""


@dataclass(slots=True)
class _Regime:
    x: list[float]
    y: float
    weight: float
    seen_at: int


class Line:
    """``y = c . x``, coefficients never negative, by relative error.

    An engine runs for minutes with many streams and then for minutes with few, and what it was with many must
    be known as the next burst begins. So points are kept as the means of regimes (each variable to within a
    factor of 1.4), and a regime that is not visited fades only slowly. If the machine as a whole becomes
    slower or faster, the last points differ from the line by one factor, the drift: it goes for all regimes.
    """

    def __init__(self, prior: tuple[float, ...], scale: tuple[float, ...]) -> None:
        """`prior`: coefficients before anything was seen. `scale`: how large the variables are."""
        self._prior = np.array(prior)
        self._scale = np.array(scale)
        self._regimes: dict[tuple[int, ...], _Regime] = {}
        self._points = 0
        self._fit_due = 0
        self._coefficients = prior
        self._drift = 1.0

    def see(self, x: tuple[float, ...], y: float) -> None:
        """One more point."""
        self._points += 1
        if self._points > _SETTLED_AFTER:
            if self._points >= self._fit_due:
                self._fit()
            ratio = y / max(self._fitted(x), 1e-9)
            ratio = min(max(ratio, _LEAST_DRIFT), _MOST_DRIFT)
            self._drift += _DRIFT_SHARE * (ratio - self._drift)
        key = tuple(int(2 * math.log2(value)) if value >= 1 else -1 for value in x)
        regime = self._regimes.get(key)
        if regime is None:
            self._regimes[key] = _Regime(list(x), y, 1.0, self._points)
            self._fit_due = self._points
            return
        weight = regime.weight * _KEEP ** (self._points - regime.seen_at)
        if weight >= _KNOWN:
            y = min(y, _OUTLIER * regime.y)
        weight = min(weight + 1.0, _REMEMBERED)
        share = 1.0 / weight
        regime.x = [old + share * (new - old) for old, new in zip(regime.x, x, strict=True)]
        regime.y += share * (y - regime.y)
        regime.weight, regime.seen_at = weight, self._points

    def at(self, x: tuple[float, ...]) -> float:
        if self._points >= self._fit_due and self._regimes:
            self._fit()
        return self._drift * self._fitted(x)

    def _fitted(self, x: tuple[float, ...]) -> float:
        return sum(c * v for c, v in zip(self._coefficients, x, strict=True))

    def _fit(self) -> None:
        self._fit_due = self._points + min(_REFIT_EVERY, max(self._points // 8, 1))
        weights = [
            regime.weight * _KEEP ** (self._points - regime.seen_at) for regime in self._regimes.values()
        ]
        if min(weights) < _LEAST_WEIGHT:
            kept = zip(list(self._regimes.items()), weights, strict=True)
            self._regimes = {key: regime for (key, regime), weight in kept if weight >= _LEAST_WEIGHT}
            weights = [weight for weight in weights if weight >= _LEAST_WEIGHT]
        y = np.array([regime.y for regime in self._regimes.values()])
        points = np.array([regime.x for regime in self._regimes.values()]) / self._scale / y[:, None]
        weighted = points.T * np.array(weights)
        prior = self._prior * self._scale
        level = 1.0 / max(float(y.mean()), 1e-9)
        squares = weighted @ points + np.eye(len(prior)) * _PRIOR_WEIGHT * level**2
        products = weighted.sum(axis=1) + prior * _PRIOR_WEIGHT * level**2
        free = np.ones(len(prior), dtype=bool)
        found = np.zeros(len(prior))
        while free.any():
            found[:] = 0.0
            found[free] = np.linalg.solve(squares[np.ix_(free, free)], products[free])
            if (found >= 0).all():
                break
            free[int(found.argmin())] = False
        self._coefficients = tuple((found / self._scale).tolist())
