"""The engine's end of the link, with a real socket and no engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import zmq

from support.gateway import eventually
from support.raw_link import RawLink
from support.real_engine import wait_until
from tokenflow_engine.control import server as server_module
from tokenflow_engine.control.claim import claim
from tokenflow_engine.control.endpoint import CurveKeys, EndpointError, curve_keys
from tokenflow_engine.control.owners import Confirmation, Delivery, Lost, Owner, Replaced, Update
from tokenflow_engine.control.server import LinkServer
from tokenflow_engine.protocol import (
    LINK_TIMEOUT_S,
    MOST_IN_A_FRAME,
    PROTOCOL_VERSION,
    Aborted,
    EngineStats,
    Hello,
    Ping,
    Refused,
    StreamClosed,
    StreamOpened,
    StreamStates,
    Welcome,
    encode,
)
from tokenflow_gateway.config import EngineConfig
from tokenflow_gateway.engines.engine import NOT_CONNECTED, Engine
from tokenflow_gateway.link.client import EngineLink, LinkEvents, LinkIdentity

SECRET = "a secret"
ME = Owner("test", "1")
WELCOME = Welcome(
    version=PROTOCOL_VERSION,
    engine_id="e",
    model="m",
    engine="none 0",
    capabilities=["count"],
    kv_tokens=10,
    max_running=2,
)
IDLE = EngineStats(
    at=0.0,
    running=0,
    waiting=0,
    parked=0,
    kv_used_tokens=0,
    kv_tokens=10,
    tokens_per_s=0.0,
    generated_total=0,
)


class Clock:
    """Real time, that a test may push forward."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def serve(clock: Clock) -> Iterator[Callable[..., LinkServer]]:
    servers: list[LinkServer] = []

    def start(endpoint: str) -> LinkServer:
        server = LinkServer(
            endpoint, secret=SECRET, welcome=WELCOME, stats=IDLE, hook_errors=lambda: 7, clock=clock
        )
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(serve: Callable[..., LinkServer], tmp_path: Path) -> LinkServer:
    return serve(f"ipc://{tmp_path}/link")


@pytest.fixture
def link(server: LinkServer) -> Iterator[RawLink]:
    with RawLink(server.endpoint, secret=SECRET) as link:
        assert link.hello() == WELCOME
        yield link


def delivered(server: LinkServer, count: int) -> list[Delivery]:
    got: list[Delivery] = []

    def enough() -> bool:
        got.extend(server.receive(limit=100))
        return len(got) >= count

    wait_until(enough, timeout_s=5.0, what=f"{count} deliveries")
    return got


def test_messages_reach_the_scheduler_in_order_and_ring_its_bell(server: LinkServer, link: RawLink):
    link.open("a")
    link.close_stream("a")
    poller = zmq.Poller()
    poller.register(server.for_scheduler.fileno(), zmq.POLLIN)
    assert poller.poll(5000)
    opened, closed = delivered(server, 2)
    assert (opened.owner, type(opened.message)) == (ME, StreamOpened)
    assert closed.message == StreamClosed(rid="a", reason="test")
    assert not poller.poll(0)


def test_work_of_one_turn_is_bounded_and_the_bell_stays_on(server: LinkServer, link: RawLink):
    for i in range(5):
        link.open(f"r{i}")
    poller = zmq.Poller()
    poller.register(server.for_scheduler.fileno(), zmq.POLLIN)
    got: list[Delivery] = []
    while len(got) < 5:
        assert poller.poll(5000)
        batch = server.receive(limit=2)
        assert len(batch) <= 2
        got += batch


def test_statistics_come_five_times_a_second_with_the_errors_of_now(server: LinkServer, link: RawLink):
    start = time.monotonic()
    stats = [link.next(EngineStats) for _ in range(6)]
    took_s = time.monotonic() - start
    assert stats[-1].hook_errors == 7
    assert 0.9 <= took_s <= 3.0


def test_updates_are_coalesced_and_go_only_to_their_owner(server: LinkServer, link: RawLink):
    with RawLink(server.endpoint, secret=SECRET, gateway_id="other") as other:
        other.hello()
        for n in range(1, 200):
            server.post([Update(ME, "a", "running", n), Update(ME, "b", "running", n)], is_urgent=n == 1)
        server.post([Update(ME, "a", "finished", 200)], is_urgent=True)
        link.until_state("a", "finished")
        assert link.history("a")[-1] == ("finished", 200)
        assert link.history("b")[-1] == ("running", 199)
        assert len(link.history("a")) < 20
        other.next(EngineStats)
        other.next(EngineStats)
        assert not [m for m in other.received if isinstance(m, StreamStates)]


def test_a_state_change_arrives_within_the_step_that_follows(server: LinkServer, link: RawLink):
    delays = []
    for n in range(10):
        sent = time.monotonic()
        server.post([Update(ME, f"r{n}", "running", 1)], is_urgent=True)
        link.until_state(f"r{n}", "running")
        delays.append(time.monotonic() - sent)
    assert sorted(delays)[5] < 0.1


def test_what_is_said_at_one_moment_comes_in_few_frames_and_in_order(server: LinkServer, link: RawLink):
    rids = [f"r{n}" for n in range(MOST_IN_A_FRAME + 1)]
    link.send_bytes(encode([StreamOpened(rid=rid, at=0.0) for rid in rids]))
    assert [d.message.rid for d in delivered(server, len(rids))] == rids
    for rid in rids:
        server.confirm(Confirmation(ME, Aborted(rid=rid, generated=0, was_live=True)))
    link.next_aborted(rids[-1])
    assert [m.rid for m in link.received if isinstance(m, Aborted)] == rids


def test_a_confirmation_does_not_overtake_the_count_before_it(server: LinkServer, link: RawLink):
    server.post([Update(ME, "a", "aborted", 41)], is_urgent=False)
    server.confirm(Confirmation(ME, Aborted(rid="a", generated=41, was_live=True)))
    assert link.next_aborted("a").generated == 41
    assert link.history("a") == [("aborted", 41)]


@pytest.mark.parametrize(
    ("secret", "version", "code"),
    [
        ("wrong", PROTOCOL_VERSION, "bad_secret"),
        ("ünwahr", PROTOCOL_VERSION, "bad_secret"),
        (SECRET, 99, "bad_version"),
    ],
)
def test_a_stranger_is_refused_with_one_clear_log_line(
    server: LinkServer, caplog: pytest.LogCaptureFixture, secret: str, version: int, code: str
):
    with caplog.at_level(logging.WARNING), RawLink(server.endpoint, secret=secret) as link:
        for _ in range(3):
            answer = link.hello(version=version)
            assert isinstance(answer, Refused)
            assert answer.code == code
        link.open("a")
        assert link.next(Refused).code == "hello_required"
    assert server.receive(limit=10) == []
    lines = [r.getMessage() for r in caplog.records if f"({code})" in r.getMessage()]
    assert len(lines) == 1
    assert "TokenFlow link: refused gateway 'test'" in lines[0]
    assert SECRET not in lines[0]


def test_who_has_not_said_hello_is_asked_to(server: LinkServer):
    with RawLink(server.endpoint, secret=SECRET) as link:
        link.ping()
        assert link.next(Refused).code == "hello_required"
        assert link.hello() == WELCOME


def test_garbage_is_refused_and_the_link_goes_on(server: LinkServer, link: RawLink):
    link.send_bytes(b"\xff\x00garbage")
    assert link.next(Refused).code == "bad_message"
    link.open("a")
    assert delivered(server, 1)[0].owner == ME


def test_a_silent_gateway_is_forgotten_and_resumes_as_the_same_owner(
    server: LinkServer, link: RawLink, clock: Clock, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        clock.ahead_s += 10.0
        lost = "'test' has gone silent; its streams go on"
        wait_until(lambda: lost in caplog.text, timeout_s=5.0, what="the loss is logged")
    link.ping()
    assert link.next(Refused).code == "hello_required"
    assert link.hello() == WELCOME
    link.open("a")
    lost, opened = delivered(server, 2)  # no `Replaced`: the same process came back
    assert (type(lost.message), type(opened.message), opened.owner) == (Lost, StreamOpened, ME)


def test_an_old_process_goes_on_beside_a_new_one_until_it_falls_silent(
    server: LinkServer, link: RawLink, clock: Clock
):
    with RawLink(server.endpoint, secret=SECRET, incarnation="2") as successor:
        assert successor.hello() == WELCOME
        link.open("a")
        successor.open("b")
        owners = {(d.owner, type(d.message)) for d in delivered(server, 2)}
        assert owners == {(ME, StreamOpened), (Owner("test", "2"), StreamOpened)}
        link.next(EngineStats)
        successor.next(EngineStats)
        clock.ahead_s += 10.0
        messages = [d.message for d in delivered(server, 3)]
        assert [m for m in messages if isinstance(m, Replaced)] == [Replaced("test", ("1",))]


def test_a_new_process_replaces_one_that_has_been_silent(server: LinkServer, link: RawLink, clock: Clock):
    clock.ahead_s += 10.0
    assert [type(d.message) for d in delivered(server, 1)] == [Lost]
    with RawLink(server.endpoint, secret=SECRET, incarnation="2") as successor:
        assert successor.hello() == WELCOME
        assert [d.message for d in delivered(server, 1)] == [Replaced("test", ("1",))]


def test_what_waits_for_the_scheduler_is_bounded_and_the_gateway_is_told_by_silence(
    server: LinkServer, link: RawLink, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_module, "_MAX_INBOX", 10)
    for i in range(30):
        link.open(f"r{i}")
    link.next(Refused)  # cut off: whatever it says, it has to say hello first
    hello = Hello(version=PROTOCOL_VERSION, gateway_id="test", incarnation="1", secret=SECRET)
    link.send(hello)
    with pytest.raises(AssertionError):
        link.next(Welcome, timeout_s=0.5)
    with pytest.raises(AssertionError):
        link.next(EngineStats, timeout_s=0.5)
    assert [d.message.rid for d in delivered(server, 10)] == [f"r{i}" for i in range(10)]  # type: ignore[union-attr]
    link.send(hello)
    link.next(Welcome)
    link.open("again")
    assert delivered(server, 1)[0].owner == ME


def test_a_message_of_absurd_size_is_not_taken_in(server: LinkServer, link: RawLink):
    with RawLink(server.endpoint, secret=SECRET, gateway_id="big") as big:
        big.hello()
        big.send_bytes(b"x" * 5 * 1024 * 1024)
        with pytest.raises(AssertionError):
            big.wait(lambda m: isinstance(m, Refused) and m.code == "bad_message", timeout_s=1.0, what="read")
    link.open("a")
    assert delivered(server, 1)[0].owner == ME


def test_a_second_engine_does_not_take_the_socket_of_a_living_one(
    serve: Callable[..., LinkServer], server: LinkServer, link: RawLink
):
    with pytest.raises(EndpointError, match=r"another engine listens at ipc://.*: give this one"):
        serve(server.endpoint)
    link.open("a")
    assert delivered(server, 1)[0].owner == ME


def test_a_socket_in_a_directory_that_is_not_there_is_an_error_that_says_what_to_do(
    serve: Callable[..., LinkServer], tmp_path: Path
):
    with pytest.raises(EndpointError, match="name another endpoint in TOKENFLOW_LINK"):
        serve(f"ipc://{tmp_path}/absent/link")


def test_a_server_that_never_started_leaves_nothing_behind(serve: Callable[..., LinkServer], tmp_path: Path):
    endpoint = f"ipc://{tmp_path}/link"
    unused = LinkServer(endpoint, secret=SECRET, welcome=WELCOME, stats=IDLE)
    bell = unused.for_scheduler.fileno()
    unused.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(bell)
    assert list(tmp_path.iterdir()) == []


def test_the_socket_of_an_engine_that_has_ended_is_free(serve: Callable[..., LinkServer], tmp_path: Path):
    endpoint = f"ipc://{tmp_path}/link"
    first = claim(endpoint)
    assert first is not None
    with pytest.raises(EndpointError):
        serve(endpoint)
    first.close()
    with RawLink(serve(endpoint).endpoint, secret=SECRET) as link:
        assert link.hello() == WELCOME


def test_an_endpoint_that_is_taken_is_an_error_at_start(serve: Callable[..., LinkServer]):
    first = serve("tcp://127.0.0.1:*")
    with pytest.raises(zmq.ZMQError, match="in use"):
        serve(first.endpoint)


@pytest.mark.parametrize(
    ("secret", "curve", "gets_in"),
    [
        (SECRET, curve_keys(SECRET, "gateway"), True),
        (SECRET, CurveKeys(*zmq.curve_keypair()), False),
        ("wrong", curve_keys("wrong", "gateway"), False),
        (SECRET, None, False),
    ],
    ids=["our key", "a stranger's key", "another secret", "no encryption"],
)
def test_over_tcp_only_holders_of_the_secret_get_a_connection_and_others_one_log_line(
    serve: Callable[..., LinkServer],
    caplog: pytest.LogCaptureFixture,
    secret: str,
    curve: CurveKeys | None,
    gets_in: bool,
):
    endpoint = serve("tcp://127.0.0.1:*").endpoint
    refusal = f"refused a peer at {endpoint}: it does not hold this engine's secret"
    with caplog.at_level(logging.WARNING), RawLink(endpoint, secret=secret, curve=curve) as link:
        link.send_bytes(
            encode([Hello(version=PROTOCOL_VERSION, gateway_id="g", incarnation="1", secret=SECRET)])
        )
        answered = False
        with contextlib.suppress(AssertionError):
            answered = link.next(Welcome, timeout_s=5.0 if gets_in else 0.5) == WELCOME
        assert answered is gets_in
        if not gets_in:
            wait_until(lambda: refusal in caplog.text, timeout_s=5.0, what="the engine says why")
    assert caplog.text.count("refused") == (not gets_in)


class Nobody(LinkEvents):
    """No streams."""


class Quiet(Nobody):
    """Of which the engine is told nothing."""

    def announcements(self, engine: Engine) -> tuple[()]:
        return ()


class OddSocket(zmq.Socket[bytes]):
    """A real one, until a test has it fail, or have something to be read."""

    fails_with: ClassVar[Exception | None] = None
    incoming: ClassVar[list[bytes]] = []

    def send(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails_with is not None:
            raise self.fails_with
        return super().send(*args, **kwargs)

    def get(self, option: int) -> Any:  # type: ignore[override]
        return zmq.POLLIN if option == zmq.EVENTS and self.incoming else super().get(option)

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        return self.incoming.pop(0) if self.incoming else super().recv(*args, **kwargs)


class OddContext(zmq.Context[zmq.Socket[bytes]]):
    _socket_class = OddSocket


@pytest.fixture
async def linked(
    serve: Callable[..., LinkServer], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Engine, Callable[..., None]]]:
    """An engine with its link up, and what changes its socket."""
    engine = Engine(EngineConfig(url="http://127.0.0.1:1"))
    context = OddContext()
    identity = LinkIdentity("g", "1", SECRET)
    endpoint = serve("tcp://127.0.0.1:*").endpoint
    task = asyncio.create_task(EngineLink(engine, endpoint, identity, Quiet(), context=context).run())
    await eventually(lambda: engine.linked, "linked")

    def becomes(**odd: object) -> None:
        for name, value in odd.items():
            monkeypatch.setattr(OddSocket, name, value)

    yield engine, becomes
    monkeypatch.undo()
    task.cancel()
    await asyncio.wait([task])
    context.destroy(linger=0)


async def test_a_socket_that_fails_is_replaced(linked: tuple[Engine, Callable[..., None]]):
    engine, becomes = linked
    becomes(fails_with=zmq.ZMQError(zmq.ENOTSOCK))
    engine.tell(Ping())
    await eventually(lambda: not engine.linked, "the failure is noticed", timeout_s=LINK_TIMEOUT_S / 2)
    assert engine.link_reason is not None
    assert engine.link_reason.startswith("link failed")
    becomes(fails_with=None)
    await eventually(lambda: engine.linked, "linked anew")


async def test_what_comes_while_the_engine_does_not_read_is_not_left_lying(
    linked: tuple[Engine, Callable[..., None]],
):
    engine, becomes = linked
    becomes(fails_with=zmq.Again())
    assert engine.tell(Ping())
    await asyncio.sleep(0)
    becomes(incoming=[encode([IDLE])])
    assert not engine.tell(Ping()), "it is dropped"
    for _ in range(2):
        await asyncio.sleep(0)
    assert engine.stats == IDLE


async def test_a_gateway_with_another_secret_hears_no_answer_and_that_it_may_be_the_secret(
    serve: Callable[..., LinkServer], clock: Clock
):
    engine = Engine(EngineConfig(url="http://127.0.0.1:1"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    identity = LinkIdentity("g", "1", "another secret")
    endpoint = serve("tcp://127.0.0.1:*").endpoint
    task = asyncio.create_task(
        EngineLink(engine, endpoint, identity, Nobody(), context=context, clock=clock).run()
    )
    await asyncio.sleep(0)
    clock.ahead_s += 10.0
    await eventually(lambda: engine.link_reason != NOT_CONNECTED, "the silence is noticed")
    task.cancel()
    await asyncio.wait([task])
    context.destroy(linger=0)
    assert (
        engine.link_reason == f"no plugin answers at {endpoint}, or its TOKENFLOW_LINK_SECRET is another one"
    )
