"""Random views of an engine, for tests of policies and for measuring what plans cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenflow_bench.costs import Machine
from tokenflow_engine.policy.base import EngineView, Phase

__all__ = ["IdleCopies", "random_view"]

_OUTSIDE = [Phase.WAITING, Phase.OFFLOADED, Phase.PARKED]


@dataclass(frozen=True, slots=True)
class IdleCopies:
    """The costs of a machine on whose link nothing is queued."""

    machine: Machine
    turn_s: float = 0.0

    def decode_s(self, batch: int, context_tokens: float) -> float:
        return self.machine.decode_s(batch, context_tokens)

    def prefill_s(self, tokens: float) -> float:
        return self.machine.prefill_s(tokens)

    def load_s(self, tokens: float) -> float:
        return 0.001 + tokens * self.machine.kv_token_bytes / self.machine.to_device_bytes_s

    def evict_s(self, tokens: float) -> float:
        return 0.001 + tokens * self.machine.kv_token_bytes / self.machine.to_host_bytes_s


def random_view(
    rng: np.random.Generator,
    *,
    machine: Machine,
    running: int,
    waiting: int,
    now: float = 100.0,
    fill: float = 0.99,
    people: float = 0.9,
    parkable: float = 0.95,
    context: tuple[int, int] = (100, 700),
) -> EngineView:
    """A consistent view: `running` streams in the batch, `waiting` outside, the pool full to about `fill`.

    `people`: share of streams that somebody reads; `parkable`: that may be preempted; `context`: least and
    most tokens.
    """
    count = running + waiting
    phase = np.concatenate(
        [
            rng.choice([Phase.RUNNING, Phase.PREFILLING, Phase.LOADING], running, p=[0.96, 0.02, 0.02]),
            rng.choice(_OUTSIDE, waiting, p=[0.85, 0.13, 0.02]),
        ]
    ).astype(np.int8)
    rng.shuffle(phase)
    new = rng.random(count) < np.where(phase == Phase.WAITING, 0.95, 0.2)
    generated = np.where(new, 0, rng.integers(1, context[1], count))
    generated[np.isin(phase, [Phase.RUNNING, Phase.PARKED, Phase.OFFLOADED, Phase.LOADING])] += 1
    contexts = np.maximum(generated + rng.integers(1, context[0] + 1, count), 2)
    here = np.isin(phase, [Phase.RUNNING, Phase.PARKED])
    owned = np.where(here, contexts, 0)
    prefill = np.where(phase == Phase.WAITING, contexts, 0)
    prefill[phase == Phase.PREFILLING] = rng.integers(1, 100, int((phase == Phase.PREFILLING).sum()))
    page = machine.page_tokens
    held = int((-(-contexts[here | (phase == Phase.LOADING)] // page) * page).sum())
    capacity = max(int(held / fill), held) // page * page + page
    rate = rng.lognormal(np.log(8.0), 0.4, count)
    arrived = np.sort(now - rng.random(count) * min(now, 60.0))
    return EngineView(
        now=now,
        kv_tokens=capacity,
        kv_free=capacity - held,
        kv_freeing=0,
        max_running=running + 8,
        max_resident=running + 8 + int((phase == Phase.PARKED).sum()),
        page_tokens=page,
        host_free=machine.host_tokens,
        costs=IdleCopies(machine),
        mean_output=400.0,
        phase=phase,
        arrived=arrived,
        prefill=prefill,
        context=contexts,
        owned=owned,
        synced=(owned * rng.random(count)).astype(np.int64),
        generated=generated,
        max_output=generated + rng.integers(1, 1000, count),
        buffered=np.minimum(rng.exponential(60.0, count), generated),
        rate=rate,
        rate_low=0.8 * rate,
        rate_high=1.25 * rate,
        paused=rng.random(count) < 0.1,
        machine=rng.random(count) >= people,
        weight=rng.choice([1.0, 2.0, 4.0], count),
        ttft_target=np.full(count, 1.0),
        may_park=rng.random(count) < parkable,
        lead_cap=np.full(count, np.inf),
        since=now - (now - arrived) * rng.random(count),
        preemptions=rng.integers(0, 3, count),
    )
