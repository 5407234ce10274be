"""A server for the Python client: the replayed engine with the gateway's side of progress reports."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import openai

import tokenflow_client
from support.replay_engine import Hold, ReplayEngine, Script, SeenRequest, Send, Step

__all__ = ["DONE", "App", "ProgressServer", "eventually", "gated", "text_event"]

PATIENCE_S = 30.0
DONE = b"data: [DONE]\n\n"
QUESTION: list[Any] = [{"role": "user", "content": "Say something."}]
_BYTES_ACKED = slice(120, 128)  # of struct tcp_info
_PROGRESS = re.compile(r"/v1/streams/([A-Za-z0-9-]+)/progress")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "seq": int,
    "age_ms": (int, float),
    "tokens": int,
    "chars": int,
    "rate": (int, float),
    "paused": bool,
}


def text_event(text: str) -> bytes:
    """One chunk with this content."""
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    delta = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({**chunk, "choices": [delta]}).encode() + b"\n\n"


def gated(events: Iterable[bytes], gate: asyncio.Event) -> Script:
    """These events in one write, and the end once the gate opens."""
    steps: list[Step] = [Send(b"".join(events)), Hold(gate), Send(DONE)]
    return Script(steps=steps)


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Let the loop run until `condition` holds; AssertionError with `what` when time is up."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while not condition():
        assert loop.time() < deadline, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Received:
    """One report as it arrived, `at_s` by the loop's clock."""

    at_s: float
    stream: str
    report: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.report.get(name)


@dataclass
class Refusal:
    """What progress requests are answered with instead of 200."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    steps: Iterable[Step] = (Send(b"{}"),)


class ProgressServer(ReplayEngine):
    """Answers streams with `X-TokenFlow-Stream` and takes reports; what breaks the rules is in `faults`."""

    def __init__(self, scripts: Mapping[str, Script] | None = None, **options: Any) -> None:
        super().__init__(scripts, **options)
        self.received: list[Received] = []
        self.posts = 0
        self.faults: list[str] = []
        self.refusal: Refusal | None = None
        self.offers_capability = True
        self._capabilities: dict[str, str] = {}
        self._seqs: dict[str, int] = {}
        self._came = asyncio.Condition()

    async def reported(self, which: Callable[[Received], bool], *, after: int = 0) -> Received:
        """The first report (from number `after` on) for which `which` holds, waiting for it."""

        def found() -> Received | None:
            return next(filter(which, self.received[after:]), None)

        async with asyncio.timeout(PATIENCE_S), self._came:
            await self._came.wait_for(lambda: found() is not None)
        report = found()
        assert report is not None
        return report

    def acknowledged_bytes(self) -> int:
        """The most that the kernel at the other end of an open connection has taken (Linux)."""
        sockets = [connection.transport.get_extra_info("socket") for connection in self._connections]
        infos = [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for sock in sockets]
        return max(int.from_bytes(info[_BYTES_ACKED], "little") for info in infos)

    async def saw(self, seen: SeenRequest) -> None:
        await super().saw(seen)
        async with self._came:
            self._came.notify_all()

    def script_for(self, seen: SeenRequest) -> Script:
        if match := _PROGRESS.fullmatch(seen.path):
            return self._progress(match[1], seen)
        script = super().script_for(seen)
        if script.status != 200 or not self.offers_capability:
            return script
        stream = f"tf-{len(self._capabilities):04x}"
        self._capabilities[stream] = f"cap-{stream}"
        headers = {**script.headers, "x-tokenflow-stream": f"{stream}.cap-{stream}"}
        return Script(steps=script.steps, status=script.status, headers=headers)

    def _progress(self, stream: str, seen: SeenRequest) -> Script:
        self.posts += 1
        if self.refusal:
            headers = {"content-type": "application/json", **self.refusal.headers}
            return Script(status=self.refusal.status, headers=headers, steps=self.refusal.steps)
        body = seen.json()
        if body["capability"] != self._capabilities[stream]:
            self.faults.append(f"capability of another stream: {body}")
        for report in body["reports"]:
            self._take(stream, report)
        return _json({"accepted": 1, "consumed": 0.0, "delivered": 0, "state": "reading"})

    def _take(self, stream: str, report: Mapping[str, Any]) -> None:
        wrong = [name for name, value in report.items() if not isinstance(value, _TYPES[name])]
        if wrong or not {"tokens", "chars"} & set(report) or report["age_ms"] < 0:
            self.faults.append(f"malformed: {report}")
        if report["seq"] <= self._seqs.get(stream, 0):
            self.faults.append(f"seq does not grow: {report}")
        self._seqs[stream] = report["seq"]
        self.received.append(Received(asyncio.get_running_loop().time(), stream, dict(report)))


@dataclass
class App:
    """An application with one answer open. The same test drives it with either library, in either colour.

    `take` is the application asking for the next chunk: in a thread where the client is synchronous.
    """

    base_url: str
    library: Literal["httpx", "httpx2"]
    is_async: bool
    client: Any = None
    stream: Any = None

    def connect(self, **settings: Any) -> None:
        make = tokenflow_client.async_http_client if self.is_async else tokenflow_client.http_client
        self.http = make(library=self.library, **settings)
        sdk: Any = openai.AsyncOpenAI if self.is_async else openai.OpenAI
        self.client = sdk(base_url=f"{self.base_url}/v1", api_key="k", max_retries=0, http_client=self.http)

    async def ask(self, model: str = "m", *, stream: bool = True, **more: Any) -> Any:
        create = self.client.chat.completions.create
        self.stream = await self._call(create, model=model, messages=QUESTION, stream=stream, **more)
        return self.stream

    async def take(self) -> str | None:
        """The next chunk's text ("" where it has none), None at the end."""
        if self.is_async:
            chunk = await anext(self.stream, None)
        else:
            chunk = await asyncio.to_thread(next, self.stream, None)
        if chunk is None:
            return None
        return (chunk.choices and chunk.choices[0].delta.content) or ""

    async def take_all(self) -> str:
        text = ""
        while (part := await self.take()) is not None:
            text += part
        return text

    async def leave(self) -> None:
        """Close the answer before its end."""
        await self._call(self.stream.close)

    async def close(self) -> None:
        await self._call(self.client.close)

    def statistics(self) -> tokenflow_client.Statistics:
        statistics: tokenflow_client.Statistics = self.http.tokenflow.statistics()
        return statistics

    async def _call(self, function: Any, **more: Any) -> Any:
        return await (function(**more) if self.is_async else asyncio.to_thread(function, **more))


def _json(value: Any) -> Script:
    data = json.dumps(value).encode()
    headers = {"content-type": "application/json", "content-length": str(len(data))}
    return Script(headers=headers, steps=[Send(data)])
