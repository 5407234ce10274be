"""What the plugin does to streams, in numbers."""

from __future__ import annotations

import msgspec

from tokenflow_engine.protocol import EngineStats
from tokenflow_engine.sglang.executor import Executor
from tokenflow_engine.sglang.outside import Outside
from tokenflow_engine.sglang.planner import Planner

__all__ = ["engine_stats"]


def engine_stats(seen: EngineStats, *, executor: Executor, planner: Planner, outside: Outside) -> EngineStats:
    """The engine's statistics, and the plugin's own."""
    tally = executor.tally
    parked, offloaded = executor.counts
    by_kind = {
        "parked": tally.parked,
        "offloaded": tally.offloaded,
        "dropped": tally.dropped,
        "made_room": tally.made_room,
        "memory": tally.for_memory,
        "thrashed": tally.thrashed,
        "resumed": tally.resumed,
        "loaded": tally.loaded,
        "recomputed": tally.recomputed,
        "failed_loads": tally.failed_loads,
        **{f"fixed_{why}": count for why, count in tally.fixed.items()},
    }
    host = executor.host.statistics()
    return msgspec.structs.replace(
        seen,
        policy=planner.policy.name,
        suspended={} if planner.suspended is None else {planner.suspended: 1},
        parked=parked,
        offloaded=offloaded,
        preemptions={kind: count for kind, count in by_kind.items() if count},
        away_s=tally.away_s,
        came_back=tally.came_back,
        return_s=executor.returns.durations(),
        departures=dict(outside.departures),
        stalls=dict(outside.stalls),
        stall_s=dict(outside.stall_s),
        copy_wait_s=tally.copy_wait_s,
        evicted_tokens=tally.evicted_tokens,
        evicted_synced_tokens=tally.evicted_synced_tokens,
        synced_evictions=dict(tally.synced_evictions),
        plan_s=planner.seconds,
        plans=planner.plans,
        plan_times=planner.times.message(),
        plan_errors=planner.errors,
        written_bytes=0 if host is None else host.written_bytes,
        loaded_bytes=0 if host is None else host.loaded_bytes,
        write_bytes_per_s=0.0 if host is None else host.write_bytes_per_s,
        load_bytes_per_s=0.0 if host is None else host.load_bytes_per_s,
        host_refused=tally.host_refused,
        ranks_lost=0 if host is None else int(host.ranks_lost),
        host_tokens=0 if host is None else host.host_tokens,
        host_used_tokens=0 if host is None else host.host_used_tokens,
        synced_share=executor.host.synced_share(),
    )
