"""A set-up's engine as a machine of the simulator: started as for the experiment, and calibrated."""

from __future__ import annotations

from collections.abc import Callable

from tokenflow_bench.burst import others
from tokenflow_bench.burst.cores import Cores
from tokenflow_bench.burst.deployment import STOCK, Deployment, deployed
from tokenflow_bench.burst.others import MAX_OTHERS
from tokenflow_bench.burst.rounds import run_async
from tokenflow_bench.burst.setups import PAGE_TOKENS, SETUPS, Setup
from tokenflow_bench.calibrate.fit import Costs
from tokenflow_bench.calibrate.machine import calibrated
from tokenflow_bench.calibrate.runs import calibrate
from tokenflow_bench.costs import MACHINES, Machine
from tokenflow_bench.load.cli import MAX_LAG_MS
from tokenflow_bench.load.driver import Client

__all__ = ["calibrated_setup", "costs_if_any", "costs_now"]

_TRIES = 3


def costs_if_any(measure: Callable[[], Costs], *, say: Callable[[str], None]) -> Costs | None:
    """What `measure` (see `costs_now`) finds; None if it has failed three times, which is said."""
    for attempt in range(_TRIES):
        try:
            costs = measure()
        except (RuntimeError, ValueError) as error:
            say(f"  no calibration: {error}; try {attempt + 1} of {_TRIES}")
        else:
            say(f"  calibrated: {costs.words()}")
            return costs
    return None


def costs_now(
    deployment: Deployment,
    setup: Setup,
    *,
    kv_tokens: int,
    rounds: int,
    seed: int,
    say: Callable[[str], None],
    max_lag_ms: float,
    max_others: float,
) -> Costs:
    """What passes cost on this deployment as the machine is now, under the stock policy.

    Raises `RuntimeError` and `ValueError` as `calibrate` does, and if other programs took more than
    `max_others` cores.
    """
    deployment.settle()
    deployment.use(STOCK)
    beside = others.Others(deployment.cpu_s)
    costs: Costs = run_async(
        calibrate(
            Client(url=deployment.url, model=deployment.model),
            kv_tokens=kv_tokens,
            max_running=setup.max_running,
            seed=seed,
            rounds=rounds,
            say=say,
            max_lag_ms=max_lag_ms,
        )
    )
    if words := others.objection(beside.cores(), most=max_others):
        raise RuntimeError(f"not to be used: {words}")
    return costs


def calibrated_setup(
    name: str,
    *,
    kv_tokens: int | None,
    rounds: int,
    seed: int,
    say: Callable[[str], None],
    threads: int | None = None,
    max_lag_ms: float = MAX_LAG_MS,
    max_others: float = MAX_OTHERS,
) -> Machine:
    """`laptop-NAME` with costs measured here, under the stock policy. `kv_tokens` by default the set-up's.

    Raises as `costs_now`.
    """
    setup, like = SETUPS[name], MACHINES[f"laptop-{name}"]
    kv_tokens = kv_tokens or setup.kv_tokens
    cores = Cores(threads=threads or setup.threads)
    say(f"{name}: starting engine and gateway to calibrate, {kv_tokens} KV tokens")
    with deployed(setup.model(), setup.flags(kv_tokens), cores=cores) as deployment:
        costs = costs_now(
            deployment,
            setup,
            kv_tokens=kv_tokens,
            rounds=rounds,
            seed=seed,
            say=say,
            max_lag_ms=max_lag_ms,
            max_others=max_others,
        )
    facts = {"kv_tokens": kv_tokens, "page_tokens": PAGE_TOKENS, "max_running": setup.max_running}
    machine = calibrated(
        like,
        costs,
        name=like.name,
        source=f"tokenflow calibrate --setup {name}; {cores.words()}",
        facts=facts,
    )
    say(f"{name}: {machine.quality}")
    return machine
