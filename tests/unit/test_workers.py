"""What workers share, add up and forward; their processes are in tests/integration/test_workers.py."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tokenflow_gateway.readers.progress import Capabilities
from tokenflow_gateway.workers.counters import KeptCounters, as_text, families, merged, read
from tokenflow_gateway.workers.peers import Forwarded, Peers, PeerServer, Question, Unreachable, Wanted
from tokenflow_gateway.workers.worker import Worker


def registry(count: float) -> CollectorRegistry:
    """One of each kind of metric, with `count` in all of them."""
    made = CollectorRegistry()
    Counter("ended", "Ends.", ["reason"], registry=made).labels("finished").inc(count)
    Gauge("open", "Now.", registry=made).set(count)
    Histogram("ttft", "Seconds.", buckets=(1, 2), registry=made).observe(1.5)
    Gauge("tokenflow_engine_kv_tokens", "Its own word.", ["engine"], registry=made).labels("e").set(count)
    Gauge("tokenflow_engine_streams", "Of a gateway.", ["engine"], registry=made).labels("e").set(count)
    Gauge("tokenflow_engine_linked", "Of all.", ["engine"], registry=made).labels("e").set(count > 3)
    return made


def test_metrics_of_workers_add_up() -> None:
    together = merged([families(registry(3)), families(registry(4))])
    lines = as_text(together).decode().splitlines()
    assert 'ended_total{reason="finished"} 7.0' in lines
    assert "open 7.0" in lines
    assert 'ttft_bucket{le="1.0"} 0.0' in lines
    assert 'ttft_bucket{le="2.0"} 2.0' in lines
    assert "ttft_sum 3.0" in lines
    assert 'tokenflow_engine_kv_tokens{engine="e"} 3.0' in lines
    assert 'tokenflow_engine_streams{engine="e"} 7.0' in lines
    assert 'tokenflow_engine_linked{engine="e"} 0.0' in lines
    assert "# TYPE ttft histogram" in lines


def test_one_workers_metrics_are_as_prometheus_client_writes_them() -> None:
    made = registry(3)
    assert as_text(merged([families(made)])) == generate_latest(made)


def test_what_was_told_of_counters_outlives_a_worker(tmp_path: Path) -> None:
    path = tmp_path / "0.counters"
    assert read(path) == []
    KeptCounters(path).add_to(families(registry(3)))
    assert {family.name for family in read(path)} == {"ended", "ttft"}
    second = KeptCounters(path)
    assert 'ended_total{reason="finished"} 8.0' in as_text(second.add_to(families(registry(5)))).decode()
    lines = as_text(second.add_to(families(registry(6)))).decode().splitlines()
    assert 'ended_total{reason="finished"} 9.0' in lines
    assert "open 6.0" in lines
    assert 'tokenflow_engine_kv_tokens{engine="e"} 6.0' in lines


def test_a_capability_names_its_owner() -> None:
    first, second = (Capabilities(b"key", owner=owner, others=lambda: ["0", "1"]) for owner in "01")
    granted = second.grant("tf-1")
    assert (first.owner_of("tf-1", granted), second.owner_of("tf-1", granted)) == ("1", "1")
    assert (first.allows("tf-1", granted), second.allows("tf-1", granted)) == (False, True)
    assert first.owner_of("tf-2", granted) is None
    assert Capabilities(b"other", others=lambda: ["0", "1"]).owner_of("tf-1", granted) is None
    assert Capabilities(b"key").owner_of("tf-1", granted) is None, "an owner that nobody knows of"


async def test_a_worker_that_is_gone_or_silent_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow_gateway.workers.peers.ANSWER_WITHIN_S", 0.2)
    one, other = Worker.crew(2, tmp_path)
    peers = Peers(one)
    with pytest.raises(Unreachable) as gone:
        await peers.ask(1, Wanted("status"), str)
    assert gone.value.gone
    over = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    async with await asyncio.start_unix_server(silent, other.socket(1)):
        with pytest.raises(Unreachable) as stuck:
            await peers.ask(1, Wanted("status"), str)
        over.set()
    assert not stuck.value.gone


async def test_workers_answer_each_other_in_place_of_one_that_died(tmp_path: Path) -> None:
    one, other = Worker.crew(2, tmp_path)

    def answer(question: Question) -> dict[str, int]:
        assert isinstance(question, Forwarded)
        return {question.rid: len(question.body)}

    other.socket(1).touch()
    question = Forwarded("tf-1", "capability", b"x" * 65_536)
    async with PeerServer(other, answer).listening():
        assert await Peers(one).ask(1, question, dict[str, int]) == {"tf-1": 65_536}
    with pytest.raises(Unreachable):
        await Peers(one).ask(1, question, dict[str, int])


_KEEPS_DYING = """
from tokenflow_gateway.local.restarts import RestartBudget
from tokenflow_gateway.workers.supervisor import Supervisor
import sys, time

def serve(index):
    if index:
        time.sleep(60)
    return 3

class Short(RestartBudget):
    def spend(self, now_s):
        return None if super().spend(now_s) is None else 0.01

sys.exit(Supervisor(2, serve, budget=Short).run())
"""


def test_a_worker_that_keeps_dying_ends_the_gateway() -> None:
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", _KEEPS_DYING], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("worker started") == 2 + 3, done.stdout
    assert "keeps ending" in done.stdout
    assert time.monotonic() - begun < 15
