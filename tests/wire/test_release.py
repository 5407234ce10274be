"""Whatever ends a request, and wherever: nothing of it is left behind.

A request is ended at each single wait of its task: cancelled, as by a server whose grace is over, or left by
its client. Its engine's connection breaks at every kind of place in the answer. `support.leftovers` says what
is looked for after each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from support import scenarios
from support.gateway import eventually
from support.release_stage import (
    MOST_WAITS,
    SHAPES,
    acting,
    asked,
    fails_visibly,
    recorded,
    staged,
    told,
    until_over,
)
from support.replay_engine import Close, Raw, Reset, Script, Step
from support.socket_client import SocketClient
from support.transcripts import load

# ---- at every wait --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        *((name, ends) for name in SHAPES for ends in ("cancelled", "reset")),
        *((name, "closed") for name in ("stream", "uploaded", "slow client", "queued")),
    ],
)
async def test_a_request_that_ends_at_any_wait_leaves_nothing(name: str, ends: str) -> None:
    shape = SHAPES[name]
    async with staged(shape) as stage:
        whole = await asked(stage, shape, ends=ends)
        for number in range(1, MOST_WAITS, shape.step):
            client = await asked(stage, shape, number, ends=ends)
            if not stage.interruptible.acted:
                break
            if ends == "cancelled":
                place = stage.interruptible.waits[number - 1]
                assert client.body == whole.body or fails_visibly(client), f"{place}: {client.body!r}"
            await stage.usable()
        else:
            pytest.fail("no end of waits")


@pytest.mark.parametrize("ends", ["cancelled", "reset"])
@pytest.mark.parametrize(
    "name",
    [
        "stream",
        "paced",
        "several answers",
        "passed through",
        "messages",
        "responses",
        "slow client",
        "limited",
        "in the background",
        "queued",
    ],
)
async def test_a_request_that_ends_between_any_parts_of_its_answer_leaves_nothing(
    name: str, ends: str
) -> None:
    """Both as the gateway waits for the next part and as the last one is on its way to it."""
    shape = SHAPES[name]
    async with staged(shape) as stage:
        clients: list[SocketClient] = []
        act = stage.interruptible.cancel if ends == "cancelled" else lambda: clients[-1].reset()
        for number in range(0, len(list(shape.script.steps)) + 1, shape.step):
            stage.interruptible.at()
            stage.engine.scripts[shape.model] = acting(shape.script, number, act)
            clients.append(await stage.client(shape))
            await until_over(stage, shape, clients[-1])
            await stage.leftovers.none(f"{ends} at step {number} of the answer")
            stage.engine.scripts[shape.model] = shape.script
            await stage.usable()
        assert clients[-1].complete, "the last one was left alone"


@pytest.mark.parametrize("name", ["stream", "paced", "messages", "document", "slow client", "queued"])
async def test_a_request_cancelled_twice_leaves_nothing(name: str) -> None:
    """The server cancels what outlasts its grace, and the end of the event loop what still runs then."""
    shape = SHAPES[name]
    async with staged(shape) as stage:
        for number in range(1, MOST_WAITS, 3 * shape.step):
            await asked(stage, shape, number, number + 1, ends="cancelled")
            if not stage.interruptible.acted:
                break


async def test_an_unlinked_engine_is_told_of_every_end() -> None:
    """By SGLang's own route, once for each request that was ended, and for no other."""
    shape = SHAPES["stream"]
    async with staged(shape, link=False) as stage:
        for number in range(1, MOST_WAITS):
            before = told(stage.engine)
            client = await asked(stage, shape, number, ends="cancelled")
            assert told(stage.engine) - before == int(fails_visibly(client))
            if not stage.interruptible.acted:
                break


# ---- wherever the engine's connection ends ----------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """An answer as it is on the engine's connection, and where it can end."""

    head: bytes
    parts: tuple[bytes, ...]
    """With their framing, the last of a chunked answer included."""

    @classmethod
    def chunked(cls, *parts: bytes) -> Wire:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        return cls(head, (*(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"))

    @classmethod
    def sized(cls, *parts: bytes) -> Wire:
        size = sum(map(len, parts))
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % size
        return cls(head, parts)

    def places(self) -> dict[str, int]:
        """One of each kind of place, by its offset."""
        data = self.head + b"".join(self.parts)
        first, last = len(self.head), len(data) - len(self.parts[-1])
        places = {
            "before the head": 0,
            "in the status line": 5,
            "behind a line of the head": data.index(b"\r\n") + 2,
            "in a header": data.index(b"content-type") + 4,
            "before the end of the head": first - 2,
            "behind the head": first,
            "in the first part": first + len(self.parts[0]) // 2,
            "behind the first part": first + len(self.parts[0]),
            "before the last part": last,
            "in the last part": len(data) - 2,
            "behind all of it": len(data),
        }
        if b"chunked" in self.head:
            places |= {
                "in a chunk's size": first + 1,
                "behind a chunk's size": data.index(b"\r\n", first) + 2,
                "between the ends of an event": data.index(b"\n\n", first) + 1,
                "behind an event, before its chunk's end": data.index(b"\n\n", first) + 2,
                "before the last event": data.rindex(b"data: "),
                "in the last event": data.rindex(b"data: ") + 8,
                "behind the last event": data.rindex(b"\n\n") + 2,
            }
        if any(byte >= 0xC0 for byte in data):
            places["in a character"] = next(at for at, byte in enumerate(data) if byte >= 0xC0) + 1
        return places

    def until(self, at: int, end: Step) -> Script:
        data = self.head + b"".join(self.parts)
        return Script(steps=[*([Raw(data[:at])] if at else []), end])


WIRES = {
    name: Wire.chunked(*(read.data for read in load(name).reads))
    for name in ("chat_stream_emoji", "chat_stream_usage_continuous", "messages_stream", "responses_stream")
} | {"chat_plain": Wire.sized(load("chat_plain").data)}


@pytest.mark.parametrize("end", [Close(), Reset()], ids=["closed", "reset"])
@pytest.mark.parametrize("name", WIRES)
async def test_an_engine_lost_at_any_kind_of_place_leaves_nothing(name: str, end: Step) -> None:
    wire = WIRES[name]
    shape = recorded(name, request=load(name).request_json())
    shape = replace(shape, script=scenarios.replay(load(name)))
    async with staged(shape) as stage:
        whole = await asked(stage, shape, ends="cancelled")
        assert (whole.status, whole.complete) == (200, True)
        for place, at in wire.places().items():
            stage.engine.scripts[shape.model] = wire.until(at, end)
            client = await asked(stage, shape, ends="cancelled")
            await stage.leftovers.none(f"an engine lost {place}")
            assert client.body == whole.body or fails_visibly(client), f"{place}: {client.body!r}"
            if place in {"before the head", "behind the head", "before the last event"}:
                assert client.body != whole.body
            await eventually(lambda: all(e.healthy for e in stage.gateway.app.registry), "the engine is back")
            await stage.usable()
