"""What the simulator made before it was made faster it makes still: every token of some runs, at its time.

Independent of the policies that ship, which are to change: SGLang's own order, and one that turns the engine
round all the time. Where the simulator is to behave differently, these digests are to be written anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tokenflow_bench.crowds import crowd
from tokenflow_bench.setups import SETUPS
from tokenflow_bench.simulator import Outcome, Part, simulate
from tokenflow_engine.policy.base import EngineView, Phase, Place, Plan, Policy
from tokenflow_engine.policy.registry import policy_named
from tokenflow_engine.policy.rows import paged


class Roundabout:
    """Twice a second the third of the batch that has been in it longest goes, and who is outside comes in.

    Every second one of them keeps its memory, every fifth one that comes back is computed again. Memory runs
    out at times: then the engine retracts.
    """

    name = "roundabout"

    def plan(self, view: EngineView, ids: Sequence[str]) -> Plan:
        free, page = view.kv_free, view.page_tokens
        running = np.flatnonzero(view.phase == Phase.RUNNING)
        leaving = running[view.since[running].argsort(kind="stable")][: len(running) // 3].tolist()
        plan = Plan(next_at=view.now + 0.5, write=running.tolist(), prefill_tokens=1024)
        for row in leaving:
            if row % 2:
                plan.evict.append(row)
                free += view.synced.item(row) // page * page
            else:
                plan.park.append(row)
        for row in view.since.argsort(kind="stable").tolist():
            phase, needs = view.phase.item(row), paged(view.context.item(row) + 1, page)
            if phase == Phase.PARKED:
                plan.resume.append(row)
            elif phase in {Phase.OFFLOADED, Phase.WAITING} and needs < free:
                free -= needs
                if phase == Phase.WAITING:
                    plan.admit.append(row)
                else:
                    plan.load.append((row, Place.LOAD if row % 5 else Place.RECOMPUTE))
        return plan


def _outcome(
    setup: str, policy: Policy, *, readers: str = "steady", page_tokens: int = 1, without: Sequence[Part] = ()
) -> Outcome:
    place = SETUPS[setup]
    machine = replace(place.machine, page_tokens=page_tokens)
    workload = crowd(readers, ())(place.workload(1.2, 1), np.random.default_rng(2))
    return simulate(machine, workload, policy, without=without, mixed=page_tokens == 1)


def _digest(outcome: Outcome) -> str:
    """Of when every token came, in microseconds, and of what it took."""
    streams = outcome.streams
    times = np.concatenate([streams.token_s(row) for row in range(len(streams.work))])
    took = (outcome.plans, outcome.passes, outcome.retractions, outcome.emergencies, outcome.bytes_moved)
    all_of_it = np.round(1e6 * times).astype(np.int64).tobytes() + repr(took).encode()
    return hashlib.sha256(all_of_it).hexdigest()[:16]


@pytest.mark.parametrize(
    ("setup", "given", "digest"),
    [
        ("4090-a", {"policy": policy_named("fcfs")}, "9e7e21eed2a5f7f7"),
        ("4090-poisson", {"policy": policy_named("fcfs"), "page_tokens": 16}, "0b9165c122469064"),
        ("4090-a", {"policy": Roundabout()}, "caf08db7fc4fc50d"),
        ("4090-a", {"policy": Roundabout(), "page_tokens": 16, "readers": "scanning"}, "626bbf91580558de"),
        ("4090-gamma", {"policy": Roundabout(), "readers": "pauses+classes"}, "c2dd00f92ad56571"),
        ("4090-gamma", {"policy": Roundabout(), "without": [Part.WRITES, Part.OVERLAP]}, "51c804c7cac93a82"),
        ("4090-gamma", {"policy": Roundabout(), "without": [Part.OFFLOAD, Part.REPORTS]}, "51f4b7f7859cc431"),
    ],
)
def test_every_token_comes_when_it_did(setup: str, given: dict[str, Any], digest: str) -> None:
    assert _digest(_outcome(setup, **given)) == digest


def test_a_microsecond_is_noticed() -> None:
    """Negative control: one of the machine's costs off by a millionth."""
    place = SETUPS["4090-a"]
    machine = replace(place.machine, step_base_s=place.machine.step_base_s * (1 + 1e-6))
    outcome = simulate(machine, place.workload(1.2, 1), policy_named("fcfs"))
    assert _digest(outcome) != _digest(_outcome("4090-a", policy_named("fcfs")))
