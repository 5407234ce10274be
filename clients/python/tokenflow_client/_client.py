"""Ready clients and transports."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Unpack

from tokenflow_client._library import Library, LibraryName, find_library
from tokenflow_client._reader import ReaderSettings, TokenFlowReader
from tokenflow_client._transport import make_async_transport, make_sync_transport

__all__ = ["RECEIVE_BUFFER_BYTES", "async_http_client", "async_transport", "http_client", "transport"]

RECEIVE_BUFFER_BYTES = 4096
"""About twenty events; Linux doubles it for its own use."""


def transport(
    *,
    library: LibraryName | None = None,
    receive_buffer_bytes: int | None = RECEIVE_BUFFER_BYTES,
    options: Mapping[str, Any] | None = None,
    **reader: Unpack[ReaderSettings],
) -> Any:
    """A transport for ``httpx.Client`` or ``httpx2.Client``.

    `library` is the one that the installed openai uses, unless it is named. `receive_buffer_bytes` is for
    what people read (None: as the system has it); machines and all other requests keep the system's buffers.
    `options` are those of the library's ``HTTPTransport``: `verify`, `proxy`, `retries` and so on. `reader`
    holds for all requests that have no `TokenFlowReader` of their own. Raises `ValueError` for bad settings.
    """
    found = find_library(library)
    return make_sync_transport(
        found,
        make_reader=_reader_maker(reader),
        receive_buffer_bytes=receive_buffer_bytes,
        options=_complete(found, options or {}),
    )


def async_transport(
    *,
    library: LibraryName | None = None,
    receive_buffer_bytes: int | None = RECEIVE_BUFFER_BYTES,
    options: Mapping[str, Any] | None = None,
    **reader: Unpack[ReaderSettings],
) -> Any:
    """`transport` for ``AsyncClient``."""
    found = find_library(library)
    return make_async_transport(
        found,
        make_reader=_reader_maker(reader),
        receive_buffer_bytes=receive_buffer_bytes,
        options=_complete(found, options or {}),
    )


def http_client(
    *,
    library: LibraryName | None = None,
    receive_buffer_bytes: int | None = RECEIVE_BUFFER_BYTES,
    options: Mapping[str, Any] | None = None,
    **reader: Unpack[ReaderSettings],
) -> Any:
    """What ``openai.OpenAI(http_client=...)`` takes; the parameters are those of `transport`.

    Its attribute `tokenflow` is the transport, whose `statistics()` tell what was reported.
    """
    inner = transport(library=library, receive_buffer_bytes=receive_buffer_bytes, options=options, **reader)
    return _client(find_library(library).http.Client, inner)


def async_http_client(
    *,
    library: LibraryName | None = None,
    receive_buffer_bytes: int | None = RECEIVE_BUFFER_BYTES,
    options: Mapping[str, Any] | None = None,
    **reader: Unpack[ReaderSettings],
) -> Any:
    """`http_client` for ``openai.AsyncOpenAI``."""
    inner = async_transport(
        library=library, receive_buffer_bytes=receive_buffer_bytes, options=options, **reader
    )
    return _client(find_library(library).http.AsyncClient, inner)


def _client(kind: Any, inner: Any) -> Any:
    client = kind(transport=inner, follow_redirects=True)
    client.tokenflow = inner
    return client


def _complete(library: Library, options: Mapping[str, Any]) -> dict[str, Any]:
    """With the limits that the OpenAI SDK gives its own clients, and certificates that are loaded once."""
    chosen = {"limits": library.http.Limits(max_connections=1000, max_keepalive_connections=100), **options}
    if chosen.get("verify", True) is True and "cert" not in chosen:
        chosen["verify"] = library.http.create_ssl_context(trust_env=chosen.get("trust_env", True))
    return chosen


def _reader_maker(settings: ReaderSettings) -> functools.partial[TokenFlowReader]:
    make = functools.partial(TokenFlowReader, **settings)
    make()  # a bad value is told now, not in the middle of a request
    return make
