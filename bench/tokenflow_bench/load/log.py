"""What happened to one stream, as its client saw it. Times in seconds, 0 at the start of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenflow_bench.load.reading import Person, Reading

__all__ = ["StreamLog"]


@dataclass(slots=True, kw_only=True)
class StreamLog:
    """One request.

    `due_s` is when it was scheduled, whatever held it up: latency counts from there, so that a driver or
    server that falls behind does not hide it (coordinated omission).
    """

    index: int
    due_s: float
    person: Person
    output_tokens: int
    """What it asked for."""
    sent_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    """When each token came."""
    prompt_tokens: int | None = None
    """As the server counts them, where it says."""
    end_s: float | None = None
    """When the answer was over; None if it was not by the horizon."""
    error: str | None = None
    stream: str | None = None
    """The gateway's name of it."""

    @property
    def is_whole(self) -> bool:
        """The answer came to its end, without an error."""
        return self.end_s is not None and self.error is None

    def reading(self) -> Reading:
        """How its person read it."""
        return Reading.of(self.person, self.token_s)

    def document(self) -> dict[str, Any]:
        """For a file of logs."""
        reading = self.reading()
        return {
            "index": self.index,
            "due_s": self.due_s,
            "sent_s": self.sent_s,
            "end_s": self.end_s,
            "error": self.error,
            "stream": self.stream,
            "rate": None if self.person.is_machine else self.person.rate,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "pauses": self.person.pauses(),
            "token_s": _rounded(self.token_s),
            "read_s": _rounded(reading.read_s),
            "stalls": [_rounded(stall) for stall in reading.stalls],
        }


def _rounded(times: list[float] | tuple[float, ...]) -> list[float]:
    return [round(at, 4) for at in times]
