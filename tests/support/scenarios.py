"""Scripts for the replayed engine: recordings as they were, and what can go wrong with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from support.replay_engine import Close, Headers, Hold, Never, Pause, Reset, Script, Send, Step
from support.transcripts import Transcript, load

__all__ = [
    "closes_mid_event",
    "crlf",
    "endless",
    "ends_without_done",
    "error_500",
    "faults",
    "flat_error",
    "never_answers",
    "never_begins",
    "pings_only",
    "raw",
    "recordings",
    "replay",
    "resets",
    "sglang",
    "slow_first_byte",
    "split_at",
]

FLAT_ERROR = b'{"object":"error","message":"the engine gave up","type":"InternalServerError","code":500}'


def replay(
    transcript: Transcript, *, speed: float | None = None, gates: Mapping[int, asyncio.Event] | None = None
) -> Script:
    """A recording as it was: the same parts, `speed` times as fast (None: without any delay).

    `gates` maps the number of a part to the event that has to be set before that part is sent.
    """
    steps = list(_steps(transcript, speed=speed, gates=gates or {}))
    return Script(status=transcript.status, headers=_headers(transcript), steps=steps)


def recordings(*names: str, speed: float | None = None) -> dict[str, Script]:
    """Scripts of these recordings, by their names."""
    return {name: replay(load(name), speed=speed) for name in names}


def sglang(*names: str) -> dict[str, Script]:
    """These recordings as models of a healthy SGLang, which tells that it is one."""
    scripts = recordings("models", *names)
    scripts["/v1/models"] = scripts["models"]
    scripts["/model_info"] = Script(headers={"content-type": "application/json"}, steps=[Send(b"{}")])
    return scripts


def raw(parts: Iterable[bytes]) -> Script:
    """An event stream of these parts."""
    return Script(steps=[Send(part) for part in parts])


# ---- other cuts of the same bytes ----


def split_at(transcript: Transcript, positions: Iterable[int]) -> Script:
    """The same body in other parts: cut at these byte offsets."""
    data = transcript.data
    edges = sorted({0, len(data), *positions})
    return raw(data[start:end] for start, end in pairwise(edges))


def crlf(transcript: Transcript) -> Script:
    """The same events with CRLF line ends."""
    return raw(read.data.replace(b"\n", b"\r\n") for read in transcript.reads)


# ---- an engine that is slow ----


def slow_first_byte(transcript: Transcript, gate: asyncio.Event) -> Script:
    """Nothing, not even headers, until the gate opens: a queue or a long prefill."""
    return replay(transcript, gates={0: gate})


def never_answers() -> Script:
    """Takes the request and says nothing at all."""
    return Script(steps=[Never()])


def never_begins() -> Script:
    """Sends headers and no body."""
    return Script(steps=[Headers(), Never()])


def pings_only(*, interval_s: float) -> Script:
    """Comments for ever, and no event."""
    return Script(steps=_Repeat([Send(b": ping\n\n"), Pause(interval_s)]))


def endless(transcript: Transcript) -> Script:
    """The middle of a recording over and over, as fast as the client takes it."""
    return Script(steps=_Repeat([Send(read.data) for read in transcript.reads[1:-2]]))


# ---- an engine that breaks ----


def ends_without_done(transcript: Transcript, *, after_reads: int) -> Script:
    """A proper end of the body in the middle of the answer: no finish_reason, no [DONE]."""
    return raw(read.data for read in transcript.reads[:after_reads])


def closes_mid_event(transcript: Transcript, *, after_bytes: int) -> Script:
    """The connection closes after so many bytes of the body."""
    return Script(steps=[Send(transcript.data[:after_bytes]), Close()])


def resets(transcript: Transcript, *, after_reads: int, gate: asyncio.Event | None = None) -> Script:
    """The connection is cut off; with a gate, once the test has seen what came before."""
    before: list[Step] = [Send(read.data) for read in transcript.reads[:after_reads]]
    return Script(steps=[*before, *([Hold(gate)] if gate else []), Reset()])


def error_500() -> Script:
    """The flat error object of SGLang instead of an answer."""
    headers = {"content-type": "application/json", "content-length": str(len(FLAT_ERROR))}
    return Script(status=500, headers=headers, steps=[Send(FLAT_ERROR)])


def flat_error(transcript: Transcript, *, after_reads: int) -> Script:
    """The flat error object as an event in the middle of the stream, and a proper end."""
    return raw([*(read.data for read in transcript.reads[:after_reads]), b"data: " + FLAT_ERROR + b"\n\n"])


def faults(transcript: Transcript) -> dict[str, Script]:
    """The scripts above that need nothing from the test, by name, for clients in other processes."""
    reads = len(transcript.reads)
    return {
        "as-recorded": replay(transcript),
        "byte-by-byte": split_at(transcript, range(len(transcript.data))),
        "crlf": crlf(transcript),
        "never-answers": never_answers(),
        "never-begins": never_begins(),
        "endless": endless(transcript),
        "ends-without-done": ends_without_done(transcript, after_reads=reads // 2),
        "closes-mid-event": closes_mid_event(transcript, after_bytes=len(transcript.data) // 2),
        "closes-at-once": Script(steps=[Close()]),
        "resets": resets(transcript, after_reads=reads // 2),
        "error-500": error_500(),
        "flat-error": flat_error(transcript, after_reads=reads // 2),
    }


class _Repeat:
    """The same steps for ever, from the start for every request."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = list(steps)

    def __iter__(self) -> Iterator[Step]:
        while True:
            yield from self._steps


def _steps(
    transcript: Transcript, *, speed: float | None, gates: Mapping[int, asyncio.Event]
) -> Iterator[Step]:
    for number, read in enumerate(transcript.reads):
        if speed is not None:
            yield Pause(read.delta_ms / 1000 / speed)
        if number in gates:
            yield Hold(gates[number])
        yield Send(read.data)


def _headers(transcript: Transcript) -> dict[str, str]:
    return {name: value for name, value in transcript.headers.items() if name != "transfer-encoding"}
