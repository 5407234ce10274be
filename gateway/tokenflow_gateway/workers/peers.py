"""What workers ask each other: one question and its answer a connection, over sockets private to the gateway.

A question goes to the worker it is meant for, and is never passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, TypeVar

import msgspec
import structlog

from tokenflow_gateway.engines.draining import LocalDraining
from tokenflow_gateway.tenants.limits import Lease, Subject
from tokenflow_gateway.workers.worker import MAX_WORKERS, Worker

__all__ = [
    "Began",
    "Drain",
    "Forwarded",
    "Held",
    "Lesson",
    "PeerAnswer",
    "PeerServer",
    "Peers",
    "Question",
    "Settle",
    "Take",
    "Unreachable",
    "View",
    "Wanted",
    "WorkerDraining",
    "WorkerReports",
]

_log = structlog.stdlib.get_logger("tokenflow.workers")

ANSWER_WITHIN_S = 2.0
_AT_ONCE = 64
"""Questions that one worker asks at a time; others wait for their turn, within the same time."""
_BACKLOG = MAX_WORKERS * _AT_ONCE
"""Connections that may wait for a worker to take them: beyond, the system turns them away."""

T = TypeVar("T")

View = Literal["status", "engines", "streams", "metrics"]


class Wanted(msgspec.Struct, frozen=True, tag="view"):
    """A worker's own part of a view."""

    view: View


class Forwarded(msgspec.Struct, frozen=True, tag="reports"):
    """A request with progress reports that came to another worker than its stream's."""

    rid: str
    capability: str
    body: bytes


class Lesson(msgspec.Struct, frozen=True, tag="lesson"):
    """What a worker has learned of a reader; see `readers.learned`. There is no answer."""

    name: bytes
    ratio: float
    seconds: float


class PeerAnswer(msgspec.Struct, frozen=True):
    """The response to a forwarded request."""

    status: int
    headers: dict[str, str]
    body: bytes


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """An engine is to get nothing new, or is to be asked again."""

    engine: str
    draining: bool


class Take(msgspec.Struct, frozen=True, tag="take"):
    """A request wants its share of limits; see `workers.limits`."""

    subjects: list[Subject]
    lease_id: str
    tokens: int


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """It has ended."""

    lease: Lease
    tokens: int | None


class Began(msgspec.Struct, frozen=True, tag="began"):
    """A worker has begun, and has no request yet."""

    index: int


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Which of its requests are open, asked by a first worker that has begun. The answer is their leases."""


Question = Wanted | Forwarded | Lesson | Drain | Take | Settle | Began | Held


class Unreachable(Exception):
    """A worker does not run, or did not answer; `gone` says which."""

    def __init__(self, name: int | str, *, gone: bool) -> None:
        super().__init__(f"worker {name} {'does not run' if gone else 'does not answer'}")
        self.gone = gone


class Peers:
    """The other workers, as one of them sees them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._telling: set[asyncio.Task[None]] = set()

    def tell(self, lesson: Lesson) -> None:
        """All others, in the background; one that does not hear it does without."""
        for index in range(self._worker.count):
            if index != self._worker.index:
                task = asyncio.get_running_loop().create_task(self._tell(index, lesson))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

    async def _tell(self, index: int, lesson: Lesson) -> None:
        with contextlib.suppress(Unreachable):
            await self.ask(index, lesson, type(None))

    async def ask(self, index: int, question: Question, answer: type[T]) -> T:
        """The answer of worker `index`. Raises `Unreachable`."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S), self._turns:
                frame = await self._exchange(index, msgspec.msgpack.encode(question))
            return msgspec.msgpack.decode(frame, type=answer)
        except (TimeoutError, BlockingIOError) as error:
            raise Unreachable(index, gone=False) from error
        except (OSError, msgspec.DecodeError) as error:
            raise Unreachable(index, gone=True) from error

    async def _exchange(self, index: int, question: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._worker.socket(index))
        try:
            writer.write(question)
            writer.write_eof()
            return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class WorkerReports:
    """Hands progress reports to the worker that has their stream (`api.progress.Owners`)."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def ask(self, owner: str, report: Forwarded) -> PeerAnswer:
        """Raises `Unreachable`."""
        return await self._peers.ask(int(owner), report, PeerAnswer)

    async def refresh(self) -> bool:
        """All workers are known from the start."""
        return False


class WorkerDraining:
    """Has all workers of a gateway leave an engine alone (`engines.draining.Draining`)."""

    def __init__(self, worker: Worker, local: LocalDraining, peers: Peers) -> None:
        self._others = [index for index in range(worker.count) if index != worker.index]
        self._local = local
        self._peers = peers

    async def set(self, name: str, *, draining: bool) -> None:
        """One that does not answer is told by nobody: it has been restarted, or will be."""
        self._local.apply(name, draining=draining)
        told = (self._peers.ask(index, Drain(name, draining), bool) for index in self._others)
        await asyncio.gather(*told, return_exceptions=True)


class PeerServer:
    """Answers the other workers."""

    def __init__(self, worker: Worker, answer: Callable[[Question], Any]) -> None:
        self._path = worker.socket(worker.index)
        self._answer = answer
        self._decode = msgspec.msgpack.Decoder(Question).decode

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """In place of a predecessor that may have died."""
        self._path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, self._path, backlog=_BACKLOG)
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                question = self._decode(await reader.read())
                writer.write(msgspec.msgpack.encode(self._answer(question)))
                await writer.drain()
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            _log.warning("another worker's question was not answered", reason=repr(error))
        finally:
            writer.close()
