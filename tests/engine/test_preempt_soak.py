"""Everything at once, at random: preemptions, aborts, clients that leave, flushes, pauses, changes of policy.

Answers that were not cut short are compared token for token; at the end nothing may be left anywhere. Fifteen
seconds by default; ``TOKENFLOW_SOAK_S`` makes it longer (`make soak`).
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from support.completions import StreamedRequest
from support.generation import Answer, Ask, asks, flush, generate, generate_all, post, use_policy
from support.raw_link import RawLink
from support.real_engine import RealEngine
from tokenflow_engine.protocol import EngineStats, SetPolicy

SOAK_S = float(os.environ.get("TOKENFLOW_SOAK_S", "15"))
SEED = int(os.environ.get("TOKENFLOW_SOAK_SEED", "0"))
WORKERS = 14

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(SOAK_S + 300)]

CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_DEBUG_MEMORY_POOL": "1",
    "TOKENFLOW_CHAOS": str(SEED),
}
POLICIES = ["chaos", "chaos", "adaptive", "tokenflow", "andes", "fcfs"]


@dataclass
class Tally:
    """What the workers did; appended to from all of them."""

    finished: int = 0
    cut: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Crowd:
    """Clients, each with one request after another until time is up."""

    def __init__(self, engine: RealEngine, wanted: list[Ask], expected: list[Answer]) -> None:
        self.tally = Tally()
        self.announced: list[str] = []
        """Of requests that a gateway would have opened; to be sent over the link by its thread."""
        self._engine = engine
        self._wanted = wanted
        self._expected = expected
        self._until = time.monotonic() + SOAK_S

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def work(self, number: int) -> None:
        dice = random.Random(1000 * SEED + number)  # noqa: S311 - a test\'s dice
        turn = 0
        while not self.is_over:
            turn += 1
            rid = f"soak-{number}-{turn}"
            if dice.random() < 0.5:
                self.announced.append(rid)
            act = dice.choices([self._finish, self._abort, self._leave], [70, 15, 15])[0]
            act(rid, dice)

    def _finish(self, rid: str, dice: random.Random) -> None:
        which = dice.randrange(len(self._wanted))
        answer = generate(self._engine, rid, self._wanted[which])
        with self.tally.lock:
            if answer.finish["type"] == "abort":
                self.tally.cut += 1
            else:
                self.tally.finished += 1
                if answer.tokens != self._expected[which].tokens:
                    self.tally.wrong.append(rid)

    def _abort(self, rid: str, dice: random.Random) -> None:
        delay = dice.random()
        abort = threading.Timer(delay, post, (self._engine, "/abort_request", {"rid": rid}))
        abort.start()
        self._finish(rid, dice)
        abort.join()

    def _leave(self, rid: str, dice: random.Random) -> None:
        body = {"rid": rid, "prompt": self._wanted[0].text, "max_tokens": 150, "ignore_eos": True}
        if dice.random() < 0.3:
            body["n"] = 2
        with StreamedRequest(self._engine.base_url, "/v1/completions", body) as request:
            events = request.events()
            for _ in range(dice.randrange(1, 20)):
                next(events, None)
        self.tally.left += 1


def disturb(engine: RealEngine, link: RawLink, dice: random.Random) -> None:
    """One thing an operator could do."""
    what = dice.random()
    if what < 0.5:
        link.send(SetPolicy(policy=dice.choice(POLICIES)))
    elif what < 0.7:
        with contextlib.suppress(urllib.error.HTTPError):  # refused while anything runs
            flush(engine)
    else:
        post(engine, "/pause_generation", {"mode": dice.choice(["retract", "in_place"])})
        link.ping()
        post(engine, "/continue_generation")


def test_a_crowd_with_everything_at_once(new_engine: Callable[..., RealEngine]):
    dice = random.Random(SEED)  # noqa: S311 - a test\'s dice
    wanted = asks(12, seed=21)
    with (
        new_engine("--max-total-tokens", "2048", env=CHECKS) as engine,
        RawLink(engine.link, secret=engine.secret) as link,
    ):
        link.hello()
        expected = generate_all(engine, link, wanted, tag="calm")
        use_policy(link, "chaos")
        crowd = Crowd(engine, wanted, expected)
        with ThreadPoolExecutor(WORKERS) as pool:
            clients = [pool.submit(crowd.work, number) for number in range(WORKERS)]
            until = time.monotonic()
            while not all(client.done() for client in clients):
                while crowd.announced:
                    rid = crowd.announced.pop()
                    link.open(rid)
                    if dice.random() < 0.1:
                        link.close_stream(rid)
                if time.monotonic() >= until and not crowd.is_over:
                    until = time.monotonic() + 2 * dice.random()
                    disturb(engine, link, dice)
                link.listen_until(lambda: True, timeout_s=1.0, what="")
                with contextlib.suppress(AssertionError):
                    link.listen_until(lambda: bool(crowd.announced), timeout_s=0.2, what="news")
            for client in clients:
                client.result()
        use_policy(link, "fcfs")
        stats = link.wait(is_empty, what="nothing is left", timeout_s=60.0)
        assert isinstance(stats, EngineStats)
        flush(engine)
        log = engine.log()
    print(crowd.tally, stats.preemptions, stats.written_bytes, stats.loaded_bytes)  # noqa: T201
    assert crowd.tally.wrong == []
    assert crowd.tally.finished > WORKERS
    assert stats.preemptions["parked"] > WORKERS
    assert stats.preemptions["loaded"] > 0
    assert (stats.hook_errors, stats.plan_errors) == (0, 0)
    assert "leak" not in log


def is_empty(message: object) -> bool:
    return isinstance(message, EngineStats) and not any(
        (
            message.running,
            message.waiting,
            message.parked,
            message.offloaded,
            message.kv_used_tokens,
            message.host_used_tokens,
        )
    )
