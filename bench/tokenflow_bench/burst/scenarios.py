"""What is compared with what: policies in a burst, readers who pause, parts of our policy taken away."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tokenflow_bench.burst.capacity import Capacity, measure_capacity
from tokenflow_bench.burst.cores import Cores
from tokenflow_bench.burst.deployment import STOCK, Deployment, NoSuchPolicyError, deployed
from tokenflow_bench.burst.machine import costs_if_any, costs_now
from tokenflow_bench.burst.rounds import Rounds, run_async
from tokenflow_bench.burst.setups import Setup
from tokenflow_bench.burst.targets import OURS
from tokenflow_bench.burst.turns import Case
from tokenflow_bench.load.driver import Client
from tokenflow_bench.reading import pause_spans
from tokenflow_bench.workload import Workload

__all__ = ["Comparison", "Plan", "ablation", "burst", "measure", "pauses", "seconds"]

PAUSE_AFTER_S, PAUSE_S = 3.0, 10.0
"""A pause begins so long after a reader's first token, and lasts so long."""
PARTS = {
    "no offload": f"{OURS}:offload=0",
    "no write-through": f"{OURS}:write_through=0",
    "no overlap": f"{OURS}:overlap=0",
}
"""What is taken away, and the policy as it is spelled then."""
NO_PAUSES = f"{OURS}:pauses=0"
_SIZE_TOLERANCE = 0.4
_SIZINGS = 2
_START_S = 75.0
"""Engine and gateway, and how fast the engine is."""
_BETWEEN_RUNS_S = 3.0
_TWIN_START_S = 45.0
_CALIBRATION_S = 25.0
_CAPACITY_S = {"tiny": 12.0, "smollm2": 37.0}
"""Before each round."""
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
    max_others: float
    kv_tokens: int | None
    threads: int | None
    calibrates: bool = False
    """On a second engine, before each round and after the last: a machine is not as fast at all times."""
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A table to be: whom it compares, and on which readers."""

    title: str
    load: float
    cases: tuple[Case, ...]
    pausing: bool = False
    """Every second reader pauses."""
    runs: int | None = None
    """Rounds; None: as many as planned."""

    def least_s(self, setup: Setup) -> float:
        """Seconds in which all can be generated, and read."""
        return max(self.load, 1.0) * setup.output / setup.rate + PAUSE_S * self.pausing


def burst(plan: Plan, setup: Setup) -> list[Comparison]:
    """All policies on the same readers."""
    names = dict.fromkeys((STOCK, *(plan.policies or setup.policies)))
    cases = tuple(Case(name=name, policy=name) for name in names)
    return [Comparison(title=f"load {load:g}", load=load, cases=cases) for load in plan.loads]


def pauses(plan: Plan, setup: Setup) -> list[Comparison]:
    """Every second reader pauses.

    Their clients tell. For our policy also: they do not, and they do but the policy does not use it.
    """
    names = dict.fromkeys((STOCK, *(plan.policies or setup.policies)))
    cases = [_told(name, name) for name in names]
    if OURS in names:
        cases += [Case(name=f"{OURS}, not told", policy=OURS), _told("no pause knowledge", NO_PAUSES)]
    return [_pauses_at(load, tuple(cases)) for load in plan.loads]


def ablation(plan: Plan, setup: Setup) -> list[Comparison]:
    """Our policy with each part taken away, in one engine; what is known of pauses, on readers who pause."""
    whole = {STOCK: STOCK, OURS: OURS}
    cases = tuple(Case(name=name, policy=policy) for name, policy in (whole | PARTS).items())
    knowing = tuple(
        _told(name, policy) for name, policy in (whole | {"no pause knowledge": NO_PAUSES}).items()
    )
    return [
        comparison
        for load in plan.loads
        for comparison in (
            Comparison(title=f"load {load:g}, parts taken away", load=load, cases=cases),
            _pauses_at(load, knowing),
        )
    ]


def measure(plan: Plan, setup: Setup, comparisons: Sequence[Comparison]) -> Iterator[_Table]:
    """Each of them, one after the other, on one engine."""
    with _sized(plan, setup) as site:
        for comparison in comparisons:
            yield site.table(comparison)


def seconds(plan: Plan, setup: Setup, comparisons: Sequence[Comparison]) -> float:
    """About how long that takes, if the first guess of the KV memory's size is right."""
    runs = sum(
        (comparison.runs or plan.runs) * len(comparison.cases) * (comparison.least_s(setup) + _BETWEEN_RUNS_S)
        for comparison in comparisons
    )
    rounds = [comparison.runs or plan.runs for comparison in comparisons]
    twin_s = plan.calibrates * (_TWIN_START_S + _CALIBRATION_S * sum(count + 1 for count in rounds))
    return _START_S + runs + _CAPACITY_S[setup.name] * sum(rounds) + twin_s


def _told(name: str, policy: str) -> Case:
    """Clients report every second, and pauses when they begin and end."""
    return Case(name=name, policy=policy, pauses="report", report_every_s=1.0)


def _pauses_at(load: float, cases: tuple[Case, ...]) -> Comparison:
    title = f"load {load:g}, every second reader pauses for {PAUSE_S:.0f} s"
    return Comparison(title=title, load=load, cases=cases, pausing=True)


def _pausing(readers: Callable[[int], Workload]) -> Callable[[int], Workload]:
    """The same people; every second one pauses."""
    pause = pause_spans([(PAUSE_AFTER_S, PAUSE_AFTER_S + PAUSE_S)])

    def some_pause(number: int) -> Workload:
        work = readers(number)
        return replace(work, spans=tuple(pause if row % 2 else () for row in range(len(work))))

    return some_pause


@dataclass(frozen=True, kw_only=True)
class _Site:
    """A deployment, and what it can do."""

    plan: Plan
    setup: Setup
    deployment: Deployment
    cores: Cores
    kv_tokens: int
    twin: Deployment | None
    """The same once more, on which costs are measured: the policies of the other one learn from all that it
    answers, so how long answers get, too."""

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

    def table(self, comparison: Comparison) -> _Table:
        """All rounds of all cases, and what they were run with."""
        plan, setup, load, twin = self.plan, self.setup, comparison.load, self.twin
        cases = self.available(comparison.cases)
        least_s = comparison.least_s(setup)
        costs: list[dict[str, Any] | None] = []
        capacities: list[Capacity] = []
        counts: list[int] = []
        name = f"{setup.name}, {comparison.title}"
        runs = comparison.runs or plan.runs
        plan.say(f"{name}: {len(cases)} x {runs} runs of about {least_s:.0f} s")

        def before_round(number: int) -> None:
            if twin:
                costs.append(self.costs(twin, number))
            if number < runs:  # a machine is not as fast at all times
                capacities.append(_capacity(plan, setup, self.deployment, self.kv_tokens))
                counts.append(setup.readers(load, capacities[-1].tokens_per_s))
                plan.say(f"  {name}, round {number + 1}/{runs}: {counts[-1]} readers")

        def readers(number: int) -> Workload:
            return setup.burst(counts[number], seed=plan.seed + number)

        rounds = Rounds(
            name=name,
            cases=cases,
            rounds=runs,
            workload=_pausing(readers) if comparison.pausing else readers,
            window_s=least_s,
            horizon_s=4 * least_s + 30,
            target_s=plan.target_s,
            max_lag_ms=plan.max_lag_ms,
            max_others=plan.max_others,
            say=plan.say,
            between_rounds=before_round,
        )
        results = rounds.run(self.deployment)
        return {
            "setup": setup.name,
            "words": setup.words,
            "title": comparison.title,
            "load": load,
            "rounds": runs,
            "pausing": comparison.pausing,
            "readers": counts,
            "rate": setup.rate,
            "output": setup.output,
            "capacity": [found.tokens_per_s for found in capacities],
            "kv_tokens": self.kv_tokens,
            "fit": [
                self.kv_tokens / found.footprint_tokens / count
                for found, count in zip(capacities, counts, strict=True)
            ],
            "flags": setup.flags(self.kv_tokens),
            "cores": self.cores.words(),
            "window_s": least_s,
            "policies": {case.name: case.policy for case in cases},
            "told": [case.name for case in cases if case.pauses == "report"],
            "costs": costs,
            "cases": results,
        }

    def costs(self, twin: Deployment, number: int) -> dict[str, Any] | None:
        """What passes cost now, measured on `twin` with texts of that number; None if that fails."""
        plan = self.plan
        found = costs_if_any(
            lambda: costs_now(
                twin,
                self.setup,
                kv_tokens=self.kv_tokens,
                rounds=1,
                seed=plan.seed + number,
                say=lambda _line: None,
                max_lag_ms=plan.max_lag_ms,
                max_others=plan.max_others,
            ),
            say=plan.say,
        )
        return found.document() if found else None


@contextmanager
def _sized(plan: Plan, setup: Setup) -> Iterator[_Site]:
    """Started, with the KV memory that the set-up asks for: it depends on the capacity that it makes."""
    kv_tokens = plan.kv_tokens or setup.kv_tokens
    cores = Cores(threads=plan.threads or setup.threads)
    for attempt in range(_SIZINGS):
        plan.say(f"{setup.name}: starting engine and gateway, {kv_tokens} KV tokens")
        flags = setup.flags(kv_tokens)
        with deployed(setup.model(), flags, cores=cores) as deployment:
            found = _capacity(plan, setup, deployment, kv_tokens)
            wanted = setup.kv_for(found.tokens_per_s, found.footprint_tokens)
            fits = plan.kv_tokens is not None or abs(kv_tokens / wanted - 1) <= _SIZE_TOLERANCE
            if fits or attempt == _SIZINGS - 1:
                more = deployed(setup.model(), flags, cores=cores) if plan.calibrates else nullcontext()
                with more as twin:
                    yield _Site(
                        plan=plan,
                        setup=setup,
                        deployment=deployment,
                        cores=cores,
                        kv_tokens=kv_tokens,
                        twin=twin,
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
