"""The readers of the accuracy table: what each does, and what the gateway is held to."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Plan", "Row", "Segment", "Target", "Via", "table_rows"]

Via = Literal["direct", "nginx"]
Client = Literal["socket", "python", "page"]
Segment = tuple[float, float]
"""Seconds, and tokens per second; 0 is a pause."""

_SMALL_BUFFER_BYTES = 4096
_READING_RATE = 10.0
_LATER_RATE = 6.0
_WORDS_PER_MINUTE = (175.0, 300.0)
_CHARS_PER_WORD = 6.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is promised of a kind of reader; None is not promised.

    `mean_tokens`: mean error of `buffered`; `mean_share`: the same as a share of the tokens read; `pause_ms`:
    until a pause is noticed; `is_bounded`: no error beyond what the reader's kernel hides, which is no more
    than its receive buffer.
    """

    words: str
    mean_tokens: float | None = None
    mean_share: float | None = None
    pause_ms: float | None = None
    is_bounded: bool = False
    is_control: bool = False
    """A reader that lies: the error must be large, or the harness measures nothing."""


REPORTS = Target(words="mean <= 1 token, pause <= 200 ms", mean_tokens=1.0, pause_ms=200.0)
SILENT = Target(words="mean <= 1 token, pause <= 500 ms", mean_tokens=1.0, pause_ms=500.0)
SMALL_BUFFER = Target(words="mean <= 20 tokens, pause <= 500 ms", mean_tokens=20.0, pause_ms=500.0)
DECLARED = Target(words="mean <= 2 % of tokens read", mean_share=0.02)
HIDDEN = Target(words="error <= what the client's kernel hides", is_bounded=True)
NONE = Target(words="-")
LIES = Target(words="control: error must be large", is_control=True)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One reader. `options` are those of its client; `name` is also the model it asks for."""

    name: str
    words: str
    client: Client
    segments: Sequence[Segment]
    target: Target
    via: Via = "direct"
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Seconds that readers read, pause, and read again."""

    before_s: float
    pause_s: float
    after_s: float

    @property
    def total_s(self) -> float:
        return self.before_s + self.pause_s + self.after_s

    def steady(self, rate: float = _READING_RATE) -> list[Segment]:
        """Without a pause."""
        return [(self.total_s, rate)]

    def pausing(self, *, later: float = _READING_RATE) -> list[Segment]:
        """With a pause, and another rate after it."""
        return [(self.before_s, _READING_RATE), (self.pause_s, 0.0), (self.after_s, later)]


def table_rows(plan: Plan, *, chars_per_token: float, rng: random.Random) -> list[Row]:
    """All rows, for one repetition; `rng` draws the person of whom nothing is known."""
    person = rng.uniform(*_WORDS_PER_MINUTE) * _CHARS_PER_WORD / 60 / chars_per_token
    return [*_pages(plan), *_python(plan), *_sockets(plan, person), *_behind_nginx(plan), *_reporting(plan)]


def _pages(plan: Plan) -> list[Row]:
    return [
        Row(
            name="js-visible",
            words="JS client in Chromium, visible, paced text",
            client="page",
            segments=plan.steady(),
            target=REPORTS,
        ),
        Row(
            name="js-hidden",
            words="JS client, its tab hidden for a while",
            client="page",
            segments=plan.pausing(),
            target=REPORTS,
            options={"pause_by": "hiding"},
        ),
        Row(
            name="js-pause",
            words="JS client, pause button",
            client="page",
            segments=plan.pausing(),
            target=REPORTS,
            options={"pause_by": "button"},
        ),
    ]


def _python(plan: Plan) -> list[Row]:
    return [
        Row(
            name="python-paused",
            words="Python client, says that it pauses, then reads slower",
            client="python",
            segments=plan.pausing(later=_LATER_RATE),
            target=REPORTS,
            options={"says_pause": True},
        ),
        Row(
            name="python-silent",
            words="Python client, its loop just stops, then reads slower",
            client="python",
            segments=plan.pausing(later=_LATER_RATE),
            target=SILENT,
            options={"says_pause": False},
        ),
    ]


def _sockets(plan: Plan, person: float) -> list[Row]:
    return [
        Row(
            name="socket-small",
            words="plain socket, SO_RCVBUF 4096, pause",
            client="socket",
            segments=plan.pausing(),
            target=SMALL_BUFFER,
            options={"receive_buffer_bytes": _SMALL_BUFFER_BYTES},
        ),
        Row(
            name="socket-declared",
            words="plain socket, default buffers, declared rate, no pause",
            client="socket",
            segments=plan.steady(),
            target=DECLARED,
            options={"declared_rate": _READING_RATE},
        ),
        Row(
            name="socket-pauses",
            words="plain socket, default buffers, declared rate, pause",
            client="socket",
            segments=plan.pausing(),
            target=HIDDEN,
            options={"declared_rate": _READING_RATE},
        ),
        Row(
            name="declared-only",
            words="takes all at once, a person behind it reads at the declared rate",
            client="socket",
            segments=plan.steady(),
            target=DECLARED,
            options={"declared_rate": _READING_RATE, "takes_all": True},
        ),
        Row(
            name="unknown",
            words="takes all at once, nothing known: a person at 175 to 300 words/min, against the model",
            client="socket",
            segments=plan.steady(person),
            target=NONE,
            options={"takes_all": True},
        ),
    ]


def _behind_nginx(plan: Plan) -> list[Row]:
    return [
        Row(
            name="nginx-js",
            words="nginx, JS client, pause button",
            client="page",
            via="nginx",
            segments=plan.pausing(),
            target=REPORTS,
            options={"pause_by": "button"},
        ),
        Row(
            name="nginx-python",
            words="nginx, Python client, says that it pauses",
            client="python",
            via="nginx",
            segments=plan.pausing(later=_LATER_RATE),
            target=REPORTS,
            options={"says_pause": True},
        ),
        Row(
            name="nginx-declared",
            words="nginx, plain socket, declared rate, no pause",
            client="socket",
            via="nginx",
            segments=plan.steady(),
            target=DECLARED,
            options={"declared_rate": _READING_RATE},
        ),
        Row(
            name="nginx-pauses",
            words="nginx, plain socket, declared rate, pause",
            client="socket",
            via="nginx",
            segments=plan.pausing(),
            target=HIDDEN,
            options={"declared_rate": _READING_RATE},
        ),
    ]


def _reporting(plan: Plan) -> list[Row]:
    """The same reports from one that says what is true and one that does not."""
    return [
        Row(
            name="honest",
            words="plain socket, reports its position by itself",
            client="socket",
            segments=plan.steady(),
            target=REPORTS,
            options={"reports_times": 1.0},
        ),
        Row(
            name="liar",
            words="plain socket, reports twice its position",
            client="socket",
            segments=plan.steady(),
            target=LIES,
            options={"reports_times": 2.0},
        ),
    ]
