"""What is not served, and requests that cannot be used: refused early, in a form that clients understand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from support import scenarios
from support.gateway import RunningGateway, eventually, running_gateway
from support.replay_engine import ReplayEngine
from tokenflow_gateway.relay import exchange

CHAT = "/v1/chat/completions"
PROBED = {"/ready", "/health", "/model_info", "/v1/models"}


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    scripts = scenarios.sglang("chat_stream", "chat_plain")
    async with ReplayEngine(scripts) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: ReplayEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway({"url": engine.base_url, "link": "off"}, max_body_bytes=100_000) as gateway:
        await eventually(lambda: bool(gateway.app.registry.ready()), "the engine is healthy")
        engine.requests.clear()
        yield gateway
        await gateway.everything_released()


class RawConnection:
    """Bytes to the gateway and from it, as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, gateway: RunningGateway) -> RawConnection:
        address = urlsplit(gateway.base_url)
        return cls(*await asyncio.open_connection(address.hostname, address.port))

    async def answer(self) -> tuple[str, dict[str, str]]:
        """Status line and headers."""
        async with asyncio.timeout(5.0):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.strip().split("\r\n")
        return status, dict(line.lower().split(": ", 1) for line in lines)

    async def rest(self) -> bytes:
        """All until the gateway closes the connection."""
        async with asyncio.timeout(5.0):
            return await self.reader.read()

    def close(self) -> None:
        self.writer.close()


def asked(engine: ReplayEngine) -> list[str]:
    """What clients' requests have caused, without the health probe's."""
    return [seen.path for seen in engine.requests if seen.path not in PROBED]


# ---- routes and methods -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/nothing"),
        ("POST", "/generate"),
        ("POST", "/v1/files"),
        ("GET", "/v1/batches/batch_1"),
        ("POST", "/v1/chat/completions/"),
        ("GET", "/v1/models/nobody"),
        ("GET", "/health/live/"),
        ("OPTIONS", "/v1/nothing"),
        ("POST", "/v1/messages/batches"),
    ],
)
async def test_what_is_not_there_is_404_and_no_engine_is_asked(
    gateway: RunningGateway, engine: ReplayEngine, method: str, path: str
) -> None:
    answer = await gateway.client.request(method, path, json={"model": "chat_plain"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (404, "not_found_error")
    assert ("no engine serves" in error["message"]) or f"{method} {path}" in error["message"]
    assert asked(engine) == []


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, {"POST", "OPTIONS"}),
        ("DELETE", "/v1/embeddings", {"POST", "OPTIONS"}),
        ("PATCH", "/v1/responses/resp_1", {"GET", "DELETE", "OPTIONS"}),
        ("TRACE", "/v1/messages", {"POST", "OPTIONS"}),
        ("POST", "/v1/models", {"GET", "HEAD", "OPTIONS"}),
        ("DELETE", "/health/live", {"GET", "HEAD", "OPTIONS"}),
        ("GET", "/admin/engines/e/policy", {"POST", "OPTIONS"}),
        ("PUT", "/v1/streams/tf-1/progress", {"POST", "OPTIONS"}),
    ],
)
async def test_a_method_that_a_route_has_not_is_405_with_those_that_it_has(
    gateway: RunningGateway, engine: ReplayEngine, method: str, path: str, allowed: set[str]
) -> None:
    answer = await gateway.client.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == allowed
    assert answer.json()["error"]["message"]
    options = await gateway.client.options(path)
    assert (options.status_code, options.content) == (204, b"")
    assert set(options.headers["allow"].split(", ")) == allowed
    assert asked(engine) == []


@pytest.mark.parametrize("path", ["/v1/models", "/health/ready", "/metrics", "/dashboard", "/openapi.json"])
async def test_head_is_get_without_the_body(gateway: RunningGateway, path: str) -> None:
    got, head = await gateway.client.get(path), await gateway.client.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.headers["content-length"]
    assert (await gateway.client.get(path)).content, "the connection goes on"


# ---- bodies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/admin/engines/e/policy"])
async def test_a_body_that_announces_too_much_is_refused_before_it_comes(
    gateway: RunningGateway, engine: ReplayEngine, path: str
) -> None:
    """Nothing of ten gigabytes is sent, and the client is not told to go ahead."""
    connection = await RawConnection.to(gateway)
    connection.writer.write(
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 10000000000\r\n"
        "expect: 100-continue\r\n\r\n".encode()
    )
    status, headers = await connection.answer()
    assert status.startswith("HTTP/1.1 413 ")
    assert headers["connection"] == "close"
    assert b"request_too_large" in await connection.reader.readexactly(int(headers["content-length"]))
    connection.close()
    assert asked(engine) == []


@pytest.mark.parametrize(
    ("path", "status_of"), [(CHAT, 413), ("/v1/nothing", 404), ("/admin/engines/e/policy", 413)]
)
async def test_a_body_that_goes_on_and_on_is_refused_where_it_is_too_much(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, path: str, status_of: int
) -> None:
    """The answer is there while the client still sends; then the connection is closed."""
    monkeypatch.setattr(exchange, "_LINGER_S", 0.2)
    connection = await RawConnection.to(gateway)
    connection.writer.write(
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
        "content-type: application/json\r\n\r\n".encode()
    )
    connection.writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
    for _ in range(120):
        connection.writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
    status, headers = await connection.answer()
    assert status.startswith(f"HTTP/1.1 {status_of} ")
    assert len(await connection.rest()) == int(headers["content-length"])
    connection.close()


@pytest.mark.parametrize(
    ("path", "status"), [(CHAT, 413), ("/v1/files", 404), ("/admin/engines/e/policy", 413)]
)
async def test_a_refused_body_that_is_sent_nevertheless_costs_the_client_no_answer(
    gateway: RunningGateway, path: str, status: int
) -> None:
    """A client that first sends all, as most do, gets the answer and no reset."""
    answer = await gateway.client.post(path, content=b"x" * 5_000_000)
    assert (answer.status_code, answer.headers["connection"]) == (status, "close")
    assert (await gateway.client.post(CHAT, json={"model": "chat_plain"})).status_code == 200


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b'{\n  "model": "m"\n  "stream": true\n}', "at line 3, column 3 (byte 19)", None),
        (b'{"model": "m", "stream": "yes"}', "`stream` must be true or false", "stream"),
        (b'{"model": "m", "stream_options": {"include_usage": 3}}', "bool", "stream_options.include_usage"),
        (b'{"stream": false, "model": "m", "stream": true}', "`stream` is there more than once", "stream"),
    ],
)
async def test_a_fault_in_a_body_is_400_with_its_place(
    gateway: RunningGateway, engine: ReplayEngine, body: bytes, message: str, param: str | None
) -> None:
    answer = await gateway.client.post(CHAT, content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert message in error["message"]
    assert asked(engine) == []


async def test_a_fault_in_a_control_request_is_400_with_its_place(gateway: RunningGateway) -> None:
    path = "/admin/engines/e/policy"
    headers = {"content-type": "application/json"}
    broken = (await gateway.client.post(path, content=b'{"policy" 3}', headers=headers)).json()["error"]
    assert broken["message"].startswith("the request body is not valid JSON: ")
    assert broken["message"].endswith("at byte 10")
    answer = await gateway.client.post(path, json={"policy": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "policy")


# ---- HTTP/1.0 ---------------------------------------------------------------------------------------------


async def test_a_client_of_http_1_0_gets_a_stream_that_the_close_ends(gateway: RunningGateway) -> None:
    body = b'{"model": "chat_stream", "stream": true}'
    connection = await RawConnection.to(gateway)
    connection.writer.write(
        b"POST %b HTTP/1.0\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n%b"
        % (CHAT.encode(), len(body), body)
    )
    _, headers = await connection.answer()
    data = await connection.rest()
    connection.close()
    assert "transfer-encoding" not in headers
    assert data.startswith(b"data: {")
    assert data.endswith(b"data: [DONE]\n\n")
