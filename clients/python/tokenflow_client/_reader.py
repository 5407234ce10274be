"""Who reads an answer, how fast, and what an application says about it while it is read."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypedDict, TypeVar, get_args
from weakref import WeakValueDictionary

__all__ = [
    "READER_ID",
    "Delivery",
    "Evidence",
    "Kind",
    "ReaderSettings",
    "Shown",
    "TokenFlowReader",
    "find_reader",
]

Kind = Literal["human", "voice", "machine"]
Delivery = Literal["immediate", "paced"]
Evidence = Literal["pull", "shown", "none"]
T = TypeVar("T")


class ReaderSettings(TypedDict, total=False):
    """What `TokenFlowReader` takes."""

    rate: float | None
    kind: Kind
    sla: str | None
    ttft_ms: float | None
    delivery: Delivery | None
    evidence: Evidence | None


MAX_RATE = 1000.0
"""Tokens per second: the gateway takes more for a mistake."""
READER_ID = "x-tokenflow-client-reader"
"""Tells our own transport which reader a request is for; never sent."""

_ids = itertools.count(1)
_readers: WeakValueDictionary[str, TokenFlowReader] = WeakValueDictionary()


def find_reader(reader_id: str) -> TokenFlowReader | None:
    """The reader whose `headers` a request was made with."""
    return _readers.get(reader_id)


class Shown:
    """What its reader has seen or heard of one answer."""

    __slots__ = ("chars", "closed", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.chars = 0
        self.closed = False
        """The reader is gone, or reads another answer: it will not become more."""


class TokenFlowReader:
    """The reader of one answer at a time; may read the next one when the first has ended.

    `rate` is in tokens per second, `ttft_ms` the time to the first token that is asked for. `evidence` says
    what counts as read:

    - ``"pull"``: an event is read when the application asks for the next one (default for human, machine);
    - ``"shown"``: only what `shown` says (default for voice, whose player takes text ahead of the sound);
    - ``"none"``: nothing is reported. For servers that pass the text on to somebody else's screen.

    Methods may be called from any thread and do not block. Raises `ValueError` for values that make no sense.
    """

    def __init__(
        self,
        *,
        rate: float | None = None,
        kind: Kind = "human",
        sla: str | None = None,
        ttft_ms: float | None = None,
        delivery: Delivery | None = None,
        evidence: Evidence | None = None,
    ) -> None:
        self._rate = _rate(rate)
        self.kind: Kind = _one_of("kind", kind, Kind)
        self.sla = _header_value("sla", sla)
        self.ttft_ms = _positive("ttft_ms", ttft_ms)
        self.delivery: Delivery | None = delivery and _one_of("delivery", delivery, Delivery)
        fitting: Evidence = "shown" if kind == "voice" else "pull"
        self.evidence: Evidence = _one_of("evidence", evidence or fitting, Evidence)
        self._changed: Callable[[], None] = _nobody
        self._lock = threading.Lock()
        self._pauses = 0
        self._pause_pressed = False
        self._shown = Shown()
        self._id = str(next(_ids))
        _readers[self._id] = self

    # ---- for applications ----

    def headers(self) -> dict[str, str]:
        """For one request: ``client.chat.completions.create(..., extra_headers=reader.headers())``."""
        return _ReaderHeaders(self, {READER_ID: self._id, **self.request_headers()})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The reader does not read inside this block. Blocks may be nested and overlap."""
        self._count_pause(1)
        try:
            yield
        finally:
            self._count_pause(-1)

    def pause(self) -> None:
        """The reader stops, until `resume`: for buttons and players. Doing it twice is harmless."""
        self._pause_pressed = True
        self._changed()

    def resume(self) -> None:
        """The reader goes on, unless a `paused` block is open."""
        self._pause_pressed = False
        self._changed()

    @property
    def is_paused(self) -> bool:
        return self._pause_pressed or self._pauses > 0

    def shown(self, *, tokens: int | None = None, chars: int | None = None) -> None:
        """What the reader has seen or heard so far, since the start of the answer.

        `tokens` counts chunks with content, `chars` Unicode code points of content; give one of them. A value
        lower than before changes nothing. Go on after the end of the answer, until all of it is shown.
        """
        if (tokens is None) == (chars is None):
            raise ValueError("shown() takes either tokens or chars")
        with self._lock:
            if self._shown.closed:
                return
            self._shown.tokens = max(self._shown.tokens, tokens or 0)
            self._shown.chars = max(self._shown.chars, chars or 0)

    def close(self) -> None:
        """The reader is gone: what has not been shown will not be. Ends the reports of this answer."""
        with self._lock:
            self._shown.closed = True
        self._changed()

    @property
    def rate(self) -> float | None:
        """Tokens per second, where it is known. Setting it tells the gateway at once."""
        return self._rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        self._rate = _rate(rate)
        self._changed()

    # ---- for the transport ----

    def request_headers(self) -> dict[str, str]:
        """The headers that tell a gateway about this reader."""
        known = {
            "X-TokenFlow-Reader": self.kind,
            "X-TokenFlow-Rate": self._rate and f"{self._rate:g}",
            "X-TokenFlow-SLA": self.sla,
            "X-TokenFlow-TTFT-Ms": self.ttft_ms and f"{self.ttft_ms:g}",
            "X-TokenFlow-Delivery": self.delivery,
        }
        return {name: value for name, value in known.items() if value}

    def begin(self, changed: Callable[[], None]) -> Shown:
        """A new answer begins; `changed` is called when the reporter should look at once.

        Returns what `shown` will say of this answer. Of the one before nothing more will be said.
        """
        with self._lock:
            before, self._shown = self._shown, Shown()
            before.closed |= self.evidence == "shown"
            self._changed = changed
            return self._shown

    def _count_pause(self, step: int) -> None:
        with self._lock:
            self._pauses += step
        self._changed()


class _ReaderHeaders(dict[str, str]):
    """Headers that keep their reader alive as long as the call that sends them."""

    def __init__(self, reader: TokenFlowReader, headers: dict[str, str]) -> None:
        super().__init__(headers)
        self.reader = reader


def _nobody() -> None:
    """No answer is being read."""


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a positive number, not {value!r}")
    return value


def _rate(value: float | None) -> float | None:
    if value is not None and value > MAX_RATE:
        raise ValueError(f"rate must be at most {MAX_RATE:g} tokens per second, not {value!r}")
    return _positive("rate", value)


def _one_of(name: str, value: T, choices: object) -> T:
    known = get_args(choices)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    return value


def _header_value(name: str, value: str | None) -> str | None:
    if value is not None and not (value.isascii() and value.isprintable() and value == value.strip() != ""):
        raise ValueError(f"{name} must be plain printable text, not {value!r}")
    return value
