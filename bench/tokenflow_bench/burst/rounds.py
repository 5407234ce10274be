"""One table's worth of runs: the same readers, case after case, round after round, on one deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import uvloop

from tokenflow_bench.burst import others
from tokenflow_bench.burst.deployment import Deployment
from tokenflow_bench.burst.pausing import pausing_figures
from tokenflow_bench.burst.places import Places
from tokenflow_bench.burst.turns import Case, turns
from tokenflow_bench.load.asks import asks_of
from tokenflow_bench.load.driver import Client, Drive, drive
from tokenflow_bench.load.log import StreamLog
from tokenflow_bench.load.summary import summarise
from tokenflow_bench.metrics import StreamFigures
from tokenflow_bench.timelines import readers_timeline
from tokenflow_bench.workload import Workload

__all__ = ["Rounds", "requests_of", "run_async", "waits_of"]

_TRIES = 3
"""For a run with an objection, before its figures are kept as not to be trusted."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """`workload(round)` makes that round's readers, the same for all cases. `window_s`: see `Summary`."""

    name: str
    cases: Sequence[Case]
    rounds: int
    workload: Callable[[int], Workload]
    window_s: float
    horizon_s: float
    target_s: float
    max_lag_ms: float
    max_others: float
    """Cores that other programs may take."""
    say: Callable[[str], None]
    between_rounds: Callable[[int], None]
    """Called with a round's number before `workload` is asked for it, and once after the last."""

    def run(self, deployment: Deployment) -> dict[str, list[dict[str, Any]]]:
        """The document of each run, in order of the rounds, by the name of its case."""
        results: dict[str, list[dict[str, Any]]] = {case.name: [] for case in self.cases}
        begun = -1
        for number, case in turns(self.cases, self.rounds):
            if number > begun:
                self.between_rounds(number)
                begun = number
            deployment.settle()
            deployment.use(case.policy)
            results[case.name].append(self._once(deployment, number, case))
        self.between_rounds(self.rounds)
        deployment.settle()
        return results

    def _once(self, deployment: Deployment, number: int, case: Case) -> dict[str, Any]:
        for attempt in range(_TRIES):
            document = self._run(deployment, number, case, attempt)
            figures, objection = document["figures"], document["objection"]
            self.say(
                f"  {self.name}, round {number + 1}/{self.rounds}, {case.name}: "
                f"TTFT p99 {figures['ttft_p99_s']:.1f} s, wait {figures['wait_mean_s']:.1f} s, "
                f"stall-free {100 * figures['stall_free_share']:.0f} %, "
                f"{figures['raw_tokens_per_s']:.0f} tokens/s"
            )
            if objection is None:
                return document
            self.say(f"  NOT TO BE USED: {objection}; try {attempt + 1} of {_TRIES}")
            deployment.settle()
        return document

    def _run(self, deployment: Deployment, number: int, case: Case, attempt: int) -> dict[str, Any]:
        client = Client(
            url=deployment.url,
            model=deployment.model,
            pauses=case.pauses,
            report_every_s=case.report_every_s,
        )
        mark = f"round {number} "  # the same text for all cases: greedy answers are then as long
        asks = asks_of(self.workload(number), seed=number, mark=mark)
        before, beside = deployment.counters(), others.Others(deployment.cpu_s)
        places = Places(deployment.url)
        with places if any(ask.person.pauses() for ask in asks) else nullcontext():
            run: Drive = run_async(drive(client, asks, horizon_s=self.horizon_s))
        others_cores, after = beside.cores(), deployment.counters()
        summary = summarise(
            run.logs, horizon_s=self.horizon_s, window_s=self.window_s, target_s=self.target_s
        )
        return {
            "round": number,
            "attempt": attempt,
            "figures": summary.document(),
            "pausing": pausing_figures(
                run.logs,
                lambda stream, begin, end: places.was_away(stream, run.start_s + begin, run.start_s + end),
                horizon_s=self.horizon_s,
                window_s=self.window_s,
                target_s=self.target_s,
            ),
            "engine": {name: value - before.get(name, 0.0) for name, value in after.items()},
            "driver": run.overhead.document() | {"others_cores": others_cores},
            "reports": {str(status): count for status, count in run.report_statuses.items()},
            "requests": requests_of(run.logs),
            "waits": waits_of(run.logs, horizon_s=self.horizon_s),
            **({} if number else {"timeline": readers_timeline(log.record() for log in run.logs)}),
            "errors": sorted({log.error for log in run.logs if log.error})[:5],
            "objection": run.overhead.objection(max_lag_ms=self.max_lag_ms)
            or others.objection(others_cores, most=self.max_others),
        }


def requests_of(logs: Sequence[StreamLog]) -> dict[str, list[Any]]:
    """What came, in columns: seconds, tokens as the engine counts them, tokens a second, pauses.

    An answer that did not come to its end counts as long as it was asked for.
    """
    return {
        "arrived": [log.due_s for log in logs],
        "prompt": [log.prompt_tokens or 0 for log in logs],
        "output": [max(len(log.token_s) if log.is_whole else log.output_tokens, 1) for log in logs],
        "max_output": [max(log.output_tokens, len(log.token_s)) for log in logs],
        "rate": [log.person.rate for log in logs],
        "pauses": [log.person.pauses() for log in logs],
    }


def waits_of(logs: Sequence[StreamLog], *, horizon_s: float) -> dict[str, list[float]]:
    """Of the same requests, in columns: seconds until the first token, and without text after it."""
    figures = [StreamFigures.of(log.record(), horizon_s=horizon_s, window_s=horizon_s) for log in logs]
    return {
        "ttft_s": [round(one.ttft_s, 4) for one in figures],
        "stall_s": [round(one.stall_s, 4) for one in figures],
    }


def run_async(work: Any) -> Any:
    """A coroutine's result, on uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
