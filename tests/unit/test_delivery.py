"""Delivery with a client that is played: order, bounds, counts, and what cancellation leaves behind."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from tokenflow_engine.buffer import VirtualBuffer
from tokenflow_gateway.config import DeliverySettings, EngineConfig
from tokenflow_gateway.engines.engine import Engine
from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay import delivery as delivery_module
from tokenflow_gateway.relay.delivery import Delivery
from tokenflow_gateway.relay.errors import ClientTooSlow
from tokenflow_gateway.relay.exchange import Exchange
from tokenflow_gateway.relay.guard import ClientGone
from tokenflow_gateway.relay.pacer import Pacer
from tokenflow_gateway.relay.stream import Stream


class Client:
    """Stands in for `Exchange`: takes writes while `reads` is set, which ends once `room` bytes are here."""

    def __init__(self) -> None:
        self.got = b""
        self.writes = 0
        self.room: float = math.inf
        self.ended = False
        self.reads = asyncio.Event()
        self.reads.set()
        self.breaks = False
        self.lost = False

    @property
    def writable(self) -> bool:
        return self.reads.is_set()

    async def write(self, data: bytes) -> None:
        await self.reads.wait()
        self.write_now(data)

    def write_now(self, data: bytes) -> None:
        assert self.writable
        if self.breaks:
            raise ZeroDivisionError
        self.got += data
        self.writes += 1
        if len(self.got) >= self.room:
            self.reads.clear()

    async def finish(self) -> None:
        await self.reads.wait()
        self.ended = True


def stream_of(rate: float | None = None) -> Stream:
    track = ReaderTrack(reader="human", declared_rate=rate, now=time.monotonic())
    return Stream(
        rid="r",
        request_id="q",
        route="/v1/chat/completions",
        model="m",
        engine=Engine(EngineConfig(url="http://127.0.0.1:1")),
        reader=track,
        engine_copy=VirtualBuffer(rate=5.0, now=0.0),
    )


class Played:
    """One delivery to one played client."""

    def __init__(self, client: Client, stream: Stream, delivery: Delivery) -> None:
        self.client = client
        self.stream = stream
        self.delivery = delivery
        self.put_count = 0

    async def put(self, text: str = "abcd", count: int = 1) -> None:
        """`count` pieces of one token each."""
        for _ in range(count):
            self.put_count += 1
            self.stream.reader.content(text)
            self.delivery.put(text.encode(), self.put_count, self.put_count)


def played(rate: float | None = None, **settings: Any) -> Played:
    client, stream = Client(), stream_of(rate)
    pacer = None if rate is None else Pacer(now=time.monotonic())
    delivery = Delivery(cast(Exchange, client), stream, DeliverySettings(**settings), pacer=pacer)
    return Played(client, stream, delivery)


@pytest.fixture
async def play() -> AsyncIterator[Played]:
    made = played(max_buffered_bytes=40, max_hold_s=0.1)
    async with made.delivery:
        yield made


def only_this_task() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_client_that_keeps_up_costs_no_task(play: Played) -> None:
    await play.put(count=100)
    assert play.client.got == b"abcd" * 100
    assert play.delivery.empty
    assert only_this_task()
    assert (play.stream.delivered, play.stream.reader.handed_over, play.stream.held_bytes) == (100, 100, 0)


async def test_what_was_handed_over_is_counted_and_not_what_has_come(play: Played) -> None:
    await play.put(count=3)
    play.client.reads.clear()
    await play.put(count=5)
    assert (play.stream.delivered, play.stream.reader.handed_over) == (3, 3)
    assert play.stream.held_bytes == 20
    play.client.reads.set()
    await play.delivery.drained()
    assert (play.stream.delivered, play.stream.reader.handed_over, play.stream.held_bytes) == (8, 8, 0)


async def test_what_waits_for_a_client_that_leaves_is_not_handed_over(play: Played) -> None:
    await play.put(count=3)
    play.client.reads.clear()
    await play.put(count=5)
    await asyncio.sleep(0)
    play.client.lost = True
    play.client.reads.set()  # whoever waits for it is woken, and writes go nowhere
    with pytest.raises(ClientGone):
        await play.delivery.drained()
    assert (play.stream.delivered, play.stream.reader.handed_over) == (3, 3)
    assert not play.delivery.empty


async def test_order_is_kept_over_any_stops(play: Played) -> None:
    sent = ""
    for number in range(60):
        (play.client.reads.clear if number % 7 == 3 else play.client.reads.set)()
        await play.put(f"<{number}>")
        sent += f"<{number}>"
        if play.delivery.full:
            play.client.reads.set()
            await play.delivery.room()
        await asyncio.sleep(0)
    play.client.reads.set()
    await play.delivery.drained()
    assert play.client.got.decode() == sent


async def test_what_has_waited_goes_out_in_few_writes(play: Played) -> None:
    play.client.reads.clear()
    await play.put(count=50)
    play.client.reads.set()
    await play.delivery.drained()
    assert play.client.writes <= 2


async def test_room_comes_when_the_client_reads_again(play: Played) -> None:
    play.client.reads.clear()
    await play.put(count=10)
    assert play.delivery.full
    room = asyncio.create_task(play.delivery.room())
    await asyncio.sleep(0)
    assert not room.done()
    play.client.reads.set()
    await room
    assert not play.delivery.full


async def test_a_client_that_takes_nothing_at_the_cap_is_given_up_after_a_while(play: Played) -> None:
    play.client.reads.clear()
    await play.put(count=10)
    started = time.monotonic()
    with pytest.raises(ClientTooSlow, match="40 bytes of the answer wait"):
        await play.delivery.room()
    assert time.monotonic() - started >= 0.09
    play.client.reads.set()  # it has come back: nothing is lost
    await play.delivery.drained()
    assert play.client.got == b"abcd" * 10


async def test_at_the_cap_abort_does_not_wait() -> None:
    made = played(max_buffered_bytes=40, at_cap="abort", max_hold_s=60)
    async with made.delivery:
        made.client.reads.clear()
        await made.put(count=9)
        await made.delivery.room()
        await made.put()
        with pytest.raises(ClientTooSlow):
            await made.delivery.room()


async def test_a_large_event_waits_where_it_is_counted() -> None:
    """What the connection does not take at once is not handed to the server, whose buffer nobody bounds."""
    made = played(max_buffered_bytes=1000)
    made.client.room = 50_000
    event = b"x" * 200_000
    async with made.delivery:
        made.stream.reader.content("x")
        made.delivery.put(event, 1, 1)
        assert 50_000 <= len(made.client.got) < 70_000
        assert made.stream.held_bytes == len(event) - len(made.client.got)
        assert made.delivery.full
        assert (made.stream.delivered, made.stream.first_token) == (0, None)
        made.client.room = math.inf
        made.client.reads.set()
        await made.delivery.finish()
        assert made.client.got == event
        assert (made.stream.delivered, made.stream.held_bytes) == (1, 0)


async def test_a_large_event_alone_is_no_reason_to_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, "_LARGE_EVENT_S", 0.1)
    made = played(max_buffered_bytes=1000, at_cap="abort")
    made.client.room = 50_000
    async with made.delivery:
        made.delivery.put(b"x" * 200_000, 0, 0)
        room = asyncio.create_task(made.delivery.room())
        await asyncio.sleep(0)
        made.client.room = 150_000
        made.client.reads.set()
        await asyncio.sleep(0)
        assert not room.done()
        with pytest.raises(ClientTooSlow):
            await room
        with pytest.raises(ClientTooSlow):  # with another behind it
            await made.put()
            await made.delivery.room()


async def test_the_end_waits_for_the_client_no_longer_than_the_rest(play: Played) -> None:
    await play.put()
    play.client.reads.clear()
    with pytest.raises(ClientTooSlow):
        await play.delivery.finish()
    play.client.reads.set()
    await play.delivery.finish()
    assert play.client.ended


async def test_last_words_come_behind_what_waits_and_wait_no_longer_than_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery_module, "_LAST_PATIENCE_S", 0.1)
    made = played(max_hold_s=60)
    async with made.delivery:
        made.client.reads.clear()
        await made.put(count=10)
        await made.delivery.last_words(b"[error]")
        async with asyncio.timeout(5):
            with pytest.raises(ClientTooSlow):
                await made.delivery.finish()
        made.client.reads.set()
        await made.delivery.finish()
        assert made.client.got == b"abcd" * 10 + b"[error]"


async def test_leaving_with_a_full_queue_leaves_nothing() -> None:
    made = played(max_buffered_bytes=40)
    async with made.delivery:
        made.client.reads.clear()
        await made.put(count=10)
        assert not only_this_task()
    assert only_this_task()
    assert made.stream.held_bytes == 0
    assert made.client.got == b""


async def test_being_cancelled_while_waiting_for_room_leaves_nothing() -> None:
    made = played(max_buffered_bytes=40)

    async def relay() -> None:
        async with made.delivery:
            made.client.reads.clear()
            await made.put(count=10)
            await made.delivery.room()

    task = asyncio.create_task(relay())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert only_this_task()


@pytest.mark.parametrize("rate", [None, 20.0])
async def test_cancelled_at_any_moment_it_leaves_nothing(rate: float | None) -> None:
    """Cut off after so many turns of the loop, with a client that stops and goes on in between."""
    for turns in range(40):
        made = played(rate=rate, max_buffered_bytes=40)
        task = asyncio.create_task(_relay(made))
        for turn in range(turns):
            (made.client.reads.clear if turn % 5 < 2 else made.client.reads.set)()
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        assert only_this_task()
        assert made.stream.held_bytes == 0
        had = made.client.got
        made.client.reads.set()
        await asyncio.sleep(0)
        assert made.client.got == had == b"abcd" * made.stream.delivered


async def _relay(made: Played) -> None:
    async with made.delivery:
        for _ in range(60):
            await asyncio.sleep(0)
            await made.put()
            if made.delivery.full:
                await made.delivery.room()
        await made.delivery.drained()


async def test_a_fault_of_the_writer_reaches_the_request(play: Played) -> None:
    play.client.breaks = True
    play.client.reads.clear()
    await play.put(count=10)
    play.client.reads.set()
    with pytest.raises(ZeroDivisionError):
        await play.delivery.drained()
    with pytest.raises(ZeroDivisionError):
        await play.put()


# ---- paced ---------------------------------------------------------------------------------------------


async def test_paced_text_waits_for_its_reader_and_what_is_no_text_waits_for_the_text() -> None:
    made = played(rate=20.0)
    async with made.delivery:
        await made.put(count=24)  # 15 at once, the others over 450 ms
        assert 15 <= made.stream.delivered <= 17
        made.delivery.put(b"[end]", 24, 24)
        started = time.monotonic()
        await made.delivery.drained()
        assert 0.25 < time.monotonic() - started < 2.0
        assert made.client.got == b"abcd" * 24 + b"[end]"


async def test_hurry_hands_everything_over() -> None:
    made = played(rate=0.5)
    async with made.delivery:
        await made.put(count=100)
        assert made.stream.delivered < 5
        made.delivery.hurry()
        async with asyncio.timeout(5):  # of three minutes
            await made.delivery.drained()
        assert made.stream.delivered == 100


async def test_news_of_the_reader_take_effect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, "_LOOK_AGAIN_S", 60.0)  # such a look would find them, too
    made = played(rate=0.1)
    async with made.delivery:
        await made.put(count=100)
        await asyncio.sleep(0)  # the writer waits for the reader, ten seconds for each token
        assert made.stream.on_reader_change is not None
        now = time.monotonic()
        made.stream.reader._estimator.report(at=now, position=None, rate=1000.0, paused=False, now=now)
        made.stream.on_reader_change()
        async with asyncio.timeout(5):
            await made.delivery.drained()


async def test_an_engine_ahead_of_its_reader_is_no_reason_to_abort() -> None:
    made = played(rate=20.0, max_buffered_bytes=20, at_cap="abort")
    async with made.delivery:
        await made.put(count=24)
        assert made.delivery.full
        await made.delivery.room()
        assert not made.delivery.full


def report(made: Played, *, paused: bool, rate: float | None = None) -> None:
    now = time.monotonic()
    made.stream.reader._estimator.report(at=now, position=None, rate=rate, paused=paused, now=now)
    if made.stream.on_reader_change is not None:
        made.stream.on_reader_change()


async def test_a_reader_who_pauses_for_long_gets_what_waits_and_no_error() -> None:
    made = played(rate=20.0, max_hold_s=0.2)
    async with made.delivery:
        report(made, paused=True)
        started = time.monotonic()
        await made.put(count=50)
        assert made.stream.delivered == 0
        await made.delivery.finish()
        assert 0.19 < time.monotonic() - started < 2.0
        assert made.client.got == b"abcd" * 50
        assert made.client.ended


async def test_a_pause_that_ends_in_time_is_paced_again_and_the_next_one_counts_anew() -> None:
    made = played(rate=20.0, max_hold_s=0.7)
    async with made.delivery:
        await made.put(count=40)
        for _ in range(4):  # 800 ms of pauses, none of them too long
            report(made, paused=True)
            had = made.stream.delivered
            await asyncio.sleep(0.2)
            assert made.stream.delivered == had
            report(made, paused=False)
            await asyncio.sleep(0.02)
        assert made.stream.delivered < 40


async def test_a_pace_slower_than_the_patience_with_clients_is_kept() -> None:
    made = played(rate=4.0, max_hold_s=0.05, max_buffered_bytes=8)
    async with made.delivery:
        await made.put(count=5)
        started = time.monotonic()
        await made.delivery.room()
        await made.put()
        await made.delivery.finish()
        assert time.monotonic() - started > 0.4
        assert made.client.got == b"abcd" * 6


async def test_after_a_failure_the_pace_is_kept_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, "_LAST_PATIENCE_S", 0.3)
    made = played(rate=0.5)
    async with made.delivery:
        await made.put(count=20)
        await made.delivery.last_words(b"[error]")
        assert made.stream.delivered < 3
        async with asyncio.timeout(5):
            await made.delivery.finish()
        assert made.client.got == b"abcd" * 20 + b"[error]"


async def test_a_paced_client_whose_connection_takes_nothing_is_too_slow() -> None:
    made = played(rate=1000.0, max_hold_s=0.1)
    async with made.delivery:
        made.client.reads.clear()
        await made.put(count=50)
        with pytest.raises(ClientTooSlow):
            await made.delivery.finish()
