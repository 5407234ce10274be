"""A stream through the meter of its route, as the relay runs it, without any sockets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tokenflow_gateway.readers.track import ReaderTrack
from tokenflow_gateway.relay.dialects import DIALECTS, Meter
from tokenflow_gateway.relay.request import RequestFields

__all__ = ["Outcome", "meter_for", "outcome_of", "through"]


class Outcome(NamedTuple):
    """All that a meter makes of a stream: bytes, counts, and how it ended."""

    data: bytes
    tokens: int
    readable: int
    prompt_tokens: int | None
    settled: bool
    done: bool
    complete: bool
    failed: bool
    aborted: bool


def meter_for(path: str, *, wants_usage: bool, max_event_bytes: int = 4 << 20) -> Meter:
    """The meter of a stream of this route from SGLang."""
    fields = RequestFields(model="m", stream=True, wants_usage=wants_usage, wants_usage_in_chunks=wants_usage)
    track = ReaderTrack(reader="human", declared_rate=None, now=0.0)
    return DIALECTS[path].meter(track, fields, max_event_bytes=max_event_bytes, sglang=True)


def through(meter: Meter, reads: Iterable[bytes]) -> bytes:
    """What leaves for the client when these reads have come, and then the end. Raises `sse.SSEError`."""
    return b"".join([meter.feed(read) for read in reads]) + meter.end()


def outcome_of(meter: Meter, data: bytes) -> Outcome:
    """The state of a meter from which `data` has come."""
    return Outcome(
        data=data,
        tokens=meter.tokens,
        readable=meter.readable,
        prompt_tokens=meter.usage.prompt if meter.usage is not None and meter.settled else None,
        settled=meter.settled,
        done=meter.done,
        complete=meter.complete,
        failed=meter.failed,
        aborted=meter.aborted,
    )
