"""What differs between the APIs that generate text: requests, streams, documents and errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final, NamedTuple, Protocol

import msgspec

from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.errors import RelayError, normalise_error
from tokenflow_gateway.relay.meter import Piece
from tokenflow_gateway.relay.request import Body, RequestFields
from tokenflow_gateway.relay.stream import Stream
from tokenflow_gateway.relay.upstream import Header
from tokenflow_gateway.relay.usage import Usage

__all__ = ["Dialect", "Document", "Meter"]

_PENDING: Final = frozenset({"queued", "in_progress"})


class Meter(Protocol):
    """Follows one stream: `meter.StreamMeter` and `named.NamedEventMeter` say what each member means."""

    tokens: int
    usage: Usage | None
    settled: bool
    done: bool
    failed: bool
    error: bytes | None
    """What failed, in OpenAI's shape, in dialects where that can be the answer to a request too."""
    aborted: bool
    events: int
    sequence: int
    """Number of the next event, in dialects that number them."""

    @property
    def readable(self) -> int: ...

    @property
    def complete(self) -> bool: ...

    @property
    def ending(self) -> bytes:
        """What the stream still lacks where its answer is complete or has failed, and no end came."""

    def feed(self, data: bytes) -> bytes: ...

    def pieces(self, data: bytes) -> list[Piece]: ...

    def end(self) -> bytes: ...


class Document(NamedTuple):
    """What the gateway reads of an answer that is no stream."""

    usage: Usage | None = None
    given_up: bool = False
    """The engine ended the request of itself, and what it has is not the whole answer."""
    response_id: str | None = None
    """By which it can be asked for later, in dialects where answers are stored."""
    status: str | None = None
    """How far the engine has come with such an answer."""

    @property
    def is_pending(self) -> bool:
        """The engine goes on with it by itself."""
        return self.status in _PENDING


class Dialect(ABC):
    """One API. Stateless: what belongs to a stream is in its meter."""

    rid_prefix: ClassVar[str] = "tf-"
    """How the gateway's names for requests begin."""

    @abstractmethod
    def read_fields(self, parsed: Body) -> RequestFields:
        """The deciding fields of a request. Raises `BadRequest` for a wrong type."""

    def user(self, parsed: Body) -> msgspec.Raw | None:
        """The field that names who reads."""
        return parsed.get("user")

    def upstream_headers(self, rid: str | None) -> list[Header]:
        """What the engine needs beside the body; `rid` is None for those that take no names."""
        return []

    @abstractmethod
    def upstream_body(self, body: bytes, parsed: Body, *, rid: str | None, stream: bool) -> bytes:
        """The body for the engine: the client's, with the name and the wishes of the gateway's own."""

    @abstractmethod
    def meter(
        self, track: ReaderTrack, fields: RequestFields, *, max_event_bytes: int, sglang: bool
    ) -> Meter:
        """A meter for one stream; `sglang`: the engine was asked as SGLang can be asked."""

    def keep_alive(self, stream: Stream) -> bytes | None:
        """An event without text, where clients of this API are known to take one."""
        return None

    @abstractmethod
    def document(self, body: bytes) -> Document:
        """What a whole answer says; nothing where it cannot be read."""

    def error_body(self, error: RelayError) -> bytes:
        """A failure before the answer has begun."""
        return error.body()

    def refusal(self, body: bytes, status: int) -> bytes:
        """An engine's error answer in the shape that this API's clients read."""
        return normalise_error(body, status)

    @abstractmethod
    def error_events(self, error: RelayError, *, sequence: int = 0) -> bytes:
        """A failure as the end of a stream that has begun; `sequence` is its meter's."""
