"""What is compared with what: policies in a burst, readers who pause, parts of our policy taken away."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tokenflow_bench.burst.capacity import Capacity, measure_capacity
from tokenflow_bench.burst.cores import Cores
from tokenflow_bench.burst.deployment import STOCK, Deployment, NoSuchPolicyError, deployed
from tokenflow_bench.burst.rounds import Rounds, run_async
from tokenflow_bench.burst.setups import Setup
from tokenflow_bench.burst.turns import Case
from tokenflow_bench.load.driver import Client
from tokenflow_bench.workload import Workload

__all__ = ["Plan", "ablation", "burst", "pauses"]

OURS = "adaptive"
PAUSE_AFTER_S, PAUSE_S = 3.0, 10.0
"""A pause begins so long after a reader's first token, and lasts so long."""
_SIZE_TOLERANCE = 0.4
_SIZINGS = 2
_ABLATIONS: dict[str, dict[str, str]] = {
    "full": {},
    "no offload": {"TOKENFLOW_HOST_KV_TOKENS": "0"},
}
"""What is taken away, as the engine's environment."""
_Table = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to run. `policies` and `threads` by default as in the set-up, `kv_tokens` so that half fit."""

    policies: tuple[str, ...]
    loads: tuple[float, ...]
    runs: int
    seed: int
    target_s: float
    max_lag_ms: float
    kv_tokens: int | None
    threads: int | None
    say: Callable[[str], None]


def burst(plan: Plan, setup: Setup) -> Iterator[_Table]:
    """All policies on the same readers."""
    names = dict.fromkeys((STOCK, *(plan.policies or setup.policies)))
    with _sized(plan, setup) as site:
        cases = site.available([Case(name=name, policy=name) for name in names])
        for load in plan.loads:
            yield site.table(load, cases, site.readers(load), title=f"load {load:g}")


def pauses(plan: Plan, setup: Setup) -> Iterator[_Table]:
    """Every second reader pauses: once their clients tell, once they do not."""
    names = dict.fromkeys((STOCK, *(plan.policies or (OURS,))))
    told = [Case(name=name, policy=name, pauses="report", report_every_s=1.0) for name in names]
    untold = [Case(name=f"{name}, not told", policy=name) for name in names if name != STOCK]
    with _sized(plan, setup) as site:
        cases = site.available([*told, *untold])
        for load in plan.loads:
            title = f"load {load:g}, every second reader pauses for {PAUSE_S:.0f} s"
            yield site.table(load, cases, _pausing(site.readers(load)), title=title)


def ablation(plan: Plan, setup: Setup) -> Iterator[_Table]:
    """An engine for each variant, one after the other; stock runs in turns with the whole."""
    tables: dict[float, _Table] = {}
    sized, capacity = plan, None
    for name, env in _ABLATIONS.items():
        with _sized(sized, setup, env=env, capacity=capacity) as site:
            sized, capacity = replace(plan, kv_tokens=site.kv_tokens), site.capacity
            cases = [Case(name=name, policy=OURS)]
            cases = site.available(cases if env else [Case(name=STOCK, policy=STOCK), *cases])
            for load in plan.loads:
                title = f"load {load:g}, {OURS} with parts taken away"
                table = site.table(load, cases, site.readers(load), title=title)
                tables.setdefault(load, table)["cases"] |= table["cases"]
    yield from tables.values()


def _pausing(readers: Callable[[int], Workload]) -> Callable[[int], Workload]:
    """The same people; every second one pauses."""
    pause = ((PAUSE_AFTER_S, PAUSE_AFTER_S + PAUSE_S),)

    def some_pause(number: int) -> Workload:
        work = readers(number)
        return replace(work, pauses=tuple(pause if row % 2 else () for row in range(len(work))))

    return some_pause


@dataclass(frozen=True, kw_only=True)
class _Site:
    """A deployment, and what it can do."""

    plan: Plan
    setup: Setup
    deployment: Deployment
    cores: Cores
    kv_tokens: int
    capacity: Capacity

    def readers(self, load: float) -> Callable[[int], Workload]:
        """Those of each round."""
        count = self.setup.readers(load, self.capacity.tokens_per_s)
        return lambda number: self.setup.burst(count, seed=self.plan.seed + number)

    def available(self, cases: Sequence[Case]) -> list[Case]:
        """Those whose policy the engine knows; the others are named and left out."""
        known: list[Case] = []
        for case in cases:
            try:
                self.deployment.use(case.policy)
                known.append(case)
            except NoSuchPolicyError as error:
                self.plan.say(f"LEFT OUT: {case.name}: {error}")
        return known

    def table(
        self, load: float, cases: Sequence[Case], readers: Callable[[int], Workload], *, title: str
    ) -> _Table:
        """All rounds of all cases, and what they were run with."""
        plan, setup = self.plan, self.setup
        count = setup.readers(load, self.capacity.tokens_per_s)
        least_s = max(load, 1.0) * setup.output / setup.rate  # in which all could be generated, and read
        name = f"{setup.name}, {title}"
        plan.say(f"{name}: {count} readers, {len(cases)} x {plan.runs} runs of about {least_s:.0f} s")
        rounds = Rounds(
            name=name,
            cases=cases,
            rounds=plan.runs,
            workload=readers,
            window_s=least_s,
            horizon_s=4 * least_s + 30,
            target_s=plan.target_s,
            max_lag_ms=plan.max_lag_ms,
            say=plan.say,
        )
        return {
            "setup": setup.name,
            "words": setup.words,
            "title": title,
            "load": load,
            "readers": count,
            "rate": setup.rate,
            "output": setup.output,
            "capacity": self.capacity.tokens_per_s,
            "kv_tokens": self.kv_tokens,
            "fit": self.kv_tokens / self.capacity.footprint_tokens / count,
            "flags": setup.flags(self.kv_tokens),
            "cores": self.cores.words(),
            "window_s": least_s,
            "cases": rounds.run(self.deployment),
        }


@contextmanager
def _sized(
    plan: Plan, setup: Setup, *, env: dict[str, str] | None = None, capacity: Capacity | None = None
) -> Iterator[_Site]:
    """Started, with the KV memory that the set-up asks for: it depends on the capacity that it makes."""
    kv_tokens = plan.kv_tokens or setup.kv_tokens
    cores = Cores(threads=plan.threads or setup.threads)
    for attempt in range(_SIZINGS):
        plan.say(f"{setup.name}: starting engine and gateway, {kv_tokens} KV tokens {env or ''}")
        flags = setup.flags(kv_tokens)
        with deployed(setup.model(), flags, cores=cores, env=env) as deployment:
            found = capacity or _capacity(plan, setup, deployment, kv_tokens)
            wanted = setup.kv_for(found.tokens_per_s, found.footprint_tokens)
            fits = plan.kv_tokens is not None or abs(kv_tokens / wanted - 1) <= _SIZE_TOLERANCE
            if fits or attempt == _SIZINGS - 1:
                yield _Site(
                    plan=plan,
                    setup=setup,
                    deployment=deployment,
                    cores=cores,
                    kv_tokens=kv_tokens,
                    capacity=found,
                )
                return
        kv_tokens = wanted


def _capacity(plan: Plan, setup: Setup, deployment: Deployment, kv_tokens: int) -> Capacity:
    """Under the stock policy, with twice as many streams as fit."""
    deployment.settle()
    deployment.use(STOCK)
    count = math.ceil(2 * kv_tokens / (setup.prompt_words + setup.output))
    client = Client(url=deployment.url, model=deployment.model)
    work = setup.burst(count, seed=plan.seed)
    capacity: Capacity = run_async(measure_capacity(client, work, seed=plan.seed))
    plan.say(
        f"{setup.name}: {capacity.tokens_per_s:.0f} tokens/s with memory full, "
        f"{capacity.footprint_tokens:.0f} KV tokens a stream"
    )
    return capacity
