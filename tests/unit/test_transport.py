"""Readings of a connection, what follows from them, and which byte carried which token."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.gateway import eventually
from tokenflow_gateway.readers.connection import ConnectionTrack
from tokenflow_gateway.readers.estimator import Estimate
from tokenflow_gateway.readers.ledger import ByteLedger
from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.readers.transport import SocketMeter, SocketReading, parse_tcp_info
from tokenflow_gateway.readers.window import WindowEvidence, WindowWatch

EVENT = 200


# ---- the socket ----------------------------------------------------------------------------------


@asynccontextmanager
async def accepted(client: socket.socket, listener: socket.socket) -> AsyncIterator[asyncio.Transport]:
    """The server's side of a connection."""
    made: asyncio.Future[asyncio.Transport] = asyncio.get_running_loop().create_future()

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            made.set_result(transport)

    with client, listener:
        loop = asyncio.get_running_loop()
        make = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        server = await make(Server, sock=listener)  # type: ignore[operator]
        client.setblocking(False)
        await loop.sock_connect(client, listener.getsockname())
        transport = await made
        try:
            yield transport
        finally:
            transport.abort()
            server.close()
            await server.wait_closed()


@asynccontextmanager
async def connection(*, receive_buffer: int = 0) -> AsyncIterator[tuple[asyncio.Transport, socket.socket]]:
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    async with accepted(client, socket.create_server(("127.0.0.1", 0))) as transport:
        yield transport, client


async def test_what_was_written_is_found_again_wherever_it_is() -> None:
    async with connection(receive_buffer=4096) as (transport, client):
        meter = SocketMeter.of(transport)
        assert meter is not None
        meter.start()
        first = meter.probe()
        assert first is not None
        assert (first.written, first.queued, first.buffered) == (0, 0, 0)
        for _ in range(100):
            transport.write(b"x" * EVENT)
        await eventually(lambda: (now := meter.probe()) is not None and now.window == 0, "a full client")
        reading = meter.probe()
        assert reading is not None
        assert reading.written == 100 * EVENT
        assert reading.acked < 8192
        assert reading.buffered + reading.queued > 10_000
        before = reading.edge
        client.recv(4096)
        client.recv(4096)
        await eventually(lambda: (now := meter.probe()) is not None and now.edge > before, "room again")
        transport.abort()
        assert meter.probe() is None


async def test_the_servers_own_buffers_are_cut_for_events_only() -> None:
    async with connection() as (transport, _):
        meter = SocketMeter.of(transport)
        assert meter is not None
        before = transport.get_write_buffer_limits()
        sock = transport.get_extra_info("socket")

        def low_water() -> int:
            value = sock.getsockopt(socket.IPPROTO_TCP, 25)
            assert isinstance(value, int)
            return value

        meter.start()
        assert transport.get_write_buffer_limits() == (0, 0)
        assert low_water() == 1
        meter.start()
        meter.stop()
        assert low_water() == 1, "the next stream had begun before this one was over"
        meter.stop()
        assert transport.get_write_buffer_limits() == before
        assert low_water() == 0


async def test_a_unix_socket_shows_nothing(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    async with accepted(socket.socket(socket.AF_UNIX), listener) as transport:
        assert SocketMeter.of(transport) is None
    assert ConnectionTrack.begin(None, now=0.0) is None


def test_an_older_kernels_shorter_struct_shows_nothing() -> None:
    assert parse_tcp_info(bytes(232), queued=0, buffered=0) is not None
    assert parse_tcp_info(bytes(224), queued=0, buffered=0) is None


# ---- bytes and tokens ----------------------------------------------------------------------------


def test_a_write_counts_once_it_is_whole_and_in_proportion_before() -> None:
    ledger = ByteLedger()
    ledger.wrote([100], [1])
    ledger.wrote([50], [1])
    ledger.wrote([200], [5])
    assert [ledger.tokens_within(size) for size in (-5, 0, 50, 100, 150, 250, 350, 999)] == [
        0.0,
        0.0,
        0.5,
        1.0,
        1.0,
        3.0,
        5.0,
        5.0,
    ]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 3)), max_size=900), st.floats(0, 1))
def test_what_is_forgotten_changes_nothing_beyond_it(writes: list[tuple[int, int]], share: float) -> None:
    whole, trimmed, tokens = ByteLedger(), ByteLedger(), 0
    for size, more in writes:
        tokens += more
        whole.wrote([size], [tokens])
        trimmed.wrote([size], [tokens])
        trimmed.forget(int(share * trimmed.bytes))
    for size in range(int(share * whole.bytes), whole.bytes + 1, 97):
        assert trimmed.tokens_within(size) == whole.tokens_within(size)


# ---- the window ----------------------------------------------------------------------------------


class Client:
    """A client's kernel, looked at ten times a second.

    It holds `holds` bytes, shows a window of `window` at the most, and tells what was read in whole steps.
    """

    def __init__(self, window: int, *, holds: int = 0, step: int = 1) -> None:
        self.window = window
        self.holds = holds or window
        self.step = step
        self.written = self.read = 0
        self.now = 0.0
        self.watch = WindowWatch(self.reading(), now=0.0)

    def reading(self) -> SocketReading:
        told = self.read // self.step * self.step
        acked = min(self.written, told + self.holds)
        window = min(self.window, told + self.holds - acked)
        return SocketReading(acked, self.written - acked, 0, self.written - acked, window)

    def run(self, seconds: float, *, comes: float, reads: float | None) -> list[WindowEvidence]:
        """So many bytes come a second, and so many are read (None: all)."""
        seen, end = [], self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.1
            self.written += int(comes / 10)
            here = self.reading().acked
            self.read = here if reads is None else min(here, self.read + int(reads / 10))
            seen.append(self.watch.look(self.reading(), event_bytes=EVENT, now=self.now))
            at_most = seen[-1].at_most
            assert at_most is None or at_most >= self.read, "a bound is a bound"
        return seen


def first(seen: list[WindowEvidence], wanted: Callable[[WindowEvidence], bool]) -> float:
    """Seconds until the first look at which this was so."""
    return next((index + 1) / 10 for index, look in enumerate(seen) if wanted(look))


@pytest.mark.parametrize("buffer", [4096, 65536])
def test_a_client_that_keeps_up_shows_nothing_but_its_pauses(buffer: int) -> None:
    client = Client(buffer)
    seen = client.run(5, comes=10_000, reads=None)
    assert not any(look.stalled or look.moved for look in seen)
    assert all(look.at_most is None for look in seen)
    paused = client.run(3, comes=10_000, reads=0)
    assert first(paused, lambda look: look.stalled) <= 0.5
    assert paused[-1].stalled
    again = client.run(2, comes=10_000, reads=None)
    assert not again[-1].stalled
    assert first(again, lambda look: not look.stalled) <= 0.2


def test_nothing_to_read_is_no_pause() -> None:
    client = Client(4096)
    client.run(2, comes=2000, reads=None)
    assert not any(look.stalled for look in client.run(60, comes=0, reads=None))
    assert client.watch.look(client.reading(), event_bytes=EVENT, now=99.0).settled


def test_a_client_with_a_pace_of_its_own_shows_where_it_is() -> None:
    """As measured: a buffer that is kept full holds 1.4 times its window."""
    client = Client(4096, holds=int(1.4 * 4096))
    client.run(3, comes=10_000, reads=2000)
    seen = client.run(5, comes=10_000, reads=2000)
    assert all(look.moved for look in seen)
    assert abs(seen[-1].read_as_shown - client.read) <= EVENT
    assert not any(look.stalled for look in seen)
    paused = client.run(4, comes=10_000, reads=0)
    assert first(paused, lambda look: look.stalled) <= 0.5


def test_a_client_that_is_seen_in_steps_reads_between_them() -> None:
    client = Client(4096, step=3000)
    client.run(6, comes=10_000, reads=2000)
    seen = client.run(6, comes=10_000, reads=2000)
    assert sum(look.moved for look in seen) == 4
    assert not any(look.stalled for look in seen)
    paused = client.run(6, comes=10_000, reads=0)
    assert 1 < first(paused, lambda look: look.stalled) < 4


def test_slower_reading_is_a_pause_once_and_then_slower_reading() -> None:
    client = Client(4096, step=2000)
    client.run(6, comes=10_000, reads=2000)
    slow = client.run(60, comes=10_000, reads=300)
    assert any(look.stalled for look in slow[:100])
    assert not any(look.stalled for look in slow[300:])


def test_a_default_buffer_tells_no_position() -> None:
    client = Client(65536)
    seen = client.run(60, comes=10_000, reads=2000)
    assert not any(look.moved for look in seen)
    at_most = seen[-1].at_most
    assert at_most is not None
    assert client.read <= at_most < client.read + 65536 / 2, "half the buffer at least is known to be unread"


def test_the_network_is_not_the_reader() -> None:
    """Nothing arrives, with a window that is open: what is unsent is unread, and nobody has paused."""
    first_one = SocketReading(0, 0, 0, 0, 65536)
    watch = WindowWatch(first_one, now=0.0)
    for tick in range(1, 100):
        stuck = SocketReading(1000, 5000, 3000, 4000, 64536)
        look = watch.look(stuck, event_bytes=EVENT, now=tick * 0.1)
        assert (look.at_most, look.stalled, look.moved) == (1000, False, False)


def shut(reads_every_s: float | None) -> list[WindowEvidence]:
    """Looks at a client with a default buffer that fills in a moment, and is emptied by 8 kB each time."""
    watch = WindowWatch(SocketReading(0, 0, 0, 0, 65536), now=0.0)
    acked, window, seen = 0, 65536, []
    for tick in range(1, 200):
        now = tick / 10
        sent = min(window, 70_000)
        acked, window = acked + sent, window - sent
        if reads_every_s is not None and tick % int(reads_every_s * 10) == 0:
            window += 8192
        waiting = SocketReading(acked, 16_000, 4000, 16_000, window)
        seen.append(watch.look(waiting, event_bytes=EVENT, now=now))
    return seen


def test_a_client_that_never_reads_is_noticed_once_its_window_is_shut() -> None:
    seen = shut(None)
    assert 0.5 < first(seen, lambda look: look.stalled) <= 1.1
    assert all(look.stalled for look in seen[20:])


def test_a_window_that_opens_in_steps_is_a_pause_once_and_then_slow_reading() -> None:
    seen = shut(4.0)
    assert not any(look.stalled for look in seen[45:])


# ---- both together -------------------------------------------------------------------------------


class Followed:
    """A stream to `client`, its connection and its reader. The client is the track's socket, too."""

    def __init__(self, client: Client, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.client = client
        self.reader = ReaderTrack(reader="human", declared_rate=5.0, now=0.0)
        track = ConnectionTrack.begin(self, headers, now=0.0)  # type: ignore[arg-type]
        assert track is not None
        self.track = track

    def start(self) -> None:
        """As `SocketMeter.start`."""

    def probe(self) -> SocketReading:
        return self.client.reading()

    def hand_over(self, events: int, *, now: float) -> None:
        """So many in one write."""
        for _ in range(events):
            self.reader.content("word ")
        tokens, size = self.reader.shape.tokens, events * EVENT
        self.reader.delivered([tokens], [now])
        self.track.wrote([size], tokens, [tokens])
        self.client.written += size + len(f"{size:x}") + 4

    def look(self, *, now: float) -> Estimate:
        self.track.look(self.reader, now=now)
        return self.reader.estimate(now)


@pytest.mark.parametrize(("at_once", "every"), [(1, 1), (5, 1), (50, 5), (200, 10)])
def test_a_pause_is_noticed_however_many_events_come_at_once(at_once: int, every: int) -> None:
    client = Client(4096)
    followed = Followed(client)
    states = []
    for tick in range(1, 61):
        if tick % every == 0:
            followed.hand_over(at_once, now=tick / 10)
        while tick <= 30 and client.read < client.written:
            client.read = client.reading().acked
        states.append(followed.look(now=tick / 10).state)
    assert "paused" not in states[:30]
    assert states[-1] == "paused"


@pytest.mark.parametrize(("headers", "proxied"), [([], False), ([(b"via", b"1.1 edge")], True)])
def test_a_proxy_that_names_itself_tells_no_position(
    headers: list[tuple[bytes, bytes]], proxied: bool
) -> None:
    client = Client(4096, holds=int(1.4 * 4096))
    followed = Followed(client, headers)
    rates = set()
    for tick in range(1, 81):
        followed.hand_over(5, now=tick / 10)
        client.read = min(client.reading().acked, client.read + 200)
        rates.add(followed.look(now=tick / 10).rate)
    assert followed.track.proxied == proxied
    assert (len(rates) == 1) == proxied, "only positions teach a rate"
    for tick in range(81, 121):
        followed.hand_over(5, now=tick / 10)
        estimate = followed.look(now=tick / 10)
    assert (estimate.state, estimate.source) == ("paused", "transport"), "which is proven all the same"
