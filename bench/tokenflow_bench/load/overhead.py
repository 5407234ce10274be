"""What the driver itself costs: a driver that falls behind measures itself."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import asdict, dataclass

from tokenflow_bench.spread import percentile

__all__ = ["Overhead", "OverheadMeter"]

_EVERY_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Lag: how late the event loop came back to a timer, and so how late it may have seen a token."""

    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    cpu_share: float
    """Of one core, over the run."""
    late_p99_ms: float
    """How long after its scheduled time the driver turned to a request."""

    def document(self) -> dict[str, float]:
        return asdict(self)

    def objection(self, *, max_lag_ms: float) -> str | None:
        """Why figures of this run mean nothing; None if they do."""
        if math.isnan(self.lag_p99_ms):
            return "the run was too short to tell how late the driver came"
        if self.lag_p99_ms > max_lag_ms:
            return f"the driver came {self.lag_p99_ms:.0f} ms late (p99; {max_lag_ms:.0f} ms are allowed)"
        return None


class OverheadMeter:
    """Runs beside the driver, as an asynchronous context manager."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._began = self._cpu_began = 0.0

    async def __aenter__(self) -> OverheadMeter:
        self._began, self._cpu_began = time.monotonic(), time.process_time()
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def overhead(self, late_s: list[float]) -> Overhead:
        """So far; `late_s`, by how much the driver was late for each request."""
        lags_ms = [1000 * lag for lag in self._lags_s]
        return Overhead(
            lag_p50_ms=percentile(lags_ms, 50),
            lag_p99_ms=percentile(lags_ms, 99),
            lag_max_ms=max(lags_ms, default=0.0),
            cpu_share=(time.process_time() - self._cpu_began) / (time.monotonic() - self._began),
            late_p99_ms=1000 * percentile(late_s, 99),
        )

    async def _sample(self) -> None:
        while True:
            due = time.monotonic() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self._lags_s.append(max(time.monotonic() - due, 0.0))
