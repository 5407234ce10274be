"""What the client does where small buffers are impossible."""

from __future__ import annotations

from typing import Any

import pytest

from tokenflow_client._library import LibraryName, find_library
from tokenflow_client._sockets import keep_receive_buffer_small

LIBRARIES = pytest.mark.parametrize("name", ["httpx", "httpx2"])


class OtherBackend:
    """The library's own backend, under an event loop that is not asyncio's."""

    def __init__(self) -> None:
        self.asked: tuple[object, ...] = ()

    async def connect_tcp(self, *asked: object) -> str:
        self.asked = asked
        return "a stream"

    async def sleep(self, seconds: float) -> None: ...


class Pool:
    def __init__(self) -> None:
        self._network_backend: Any = OtherBackend()


class Transport:
    def __init__(self) -> None:
        self._pool = Pool()


@LIBRARIES
def test_other_event_loops_keep_the_systems_buffers(name: LibraryName) -> None:
    """Here there is no loop at all: the coroutine is driven by hand, and never waits."""
    transport = Transport()
    inner = transport._pool._network_backend
    assert keep_receive_buffer_small(transport, find_library(name), size_bytes=4096, is_async=True)
    connecting = transport._pool._network_backend.connect_tcp("host", 80, timeout=3.0)
    with pytest.raises(StopIteration) as result:
        connecting.send(None)
    assert (result.value.value, inner.asked) == ("a stream", ("host", 80, 3.0, None, None))


@LIBRARIES
def test_everything_but_tcp_is_left_to_the_library(name: LibraryName) -> None:
    transport = Transport()
    inner = transport._pool._network_backend
    keep_receive_buffer_small(transport, find_library(name), size_bytes=4096, is_async=True)
    assert transport._pool._network_backend is not inner
    assert transport._pool._network_backend.sleep == inner.sleep


@LIBRARIES
@pytest.mark.parametrize("is_async", [False, True])
def test_a_transport_without_a_pool_is_left_alone(name: LibraryName, is_async: bool) -> None:
    assert not keep_receive_buffer_small(object(), find_library(name), size_bytes=4096, is_async=is_async)


def test_no_library_at_all_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow_client._library.find_spec", lambda _name: None)
    with pytest.raises(ImportError, match="needs httpx or httpx2"):
        find_library()


def test_without_openai_any_library_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow_client._library.find_spec", lambda name: name == "httpx2" or None)
    assert find_library().name == "httpx2"
