"""What happened to one stream, as its client saw it. Times in seconds, 0 at the start of the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenflow_bench.metrics import Record
from tokenflow_bench.reading import Person, read_times, waits
from tokenflow_bench.sla import ONE_CLASS, Sla

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
    sla: Sla = ONE_CLASS
    begun_s: float | None = None
    """When the driver turned to it and began to connect: what this is later than `due_s` is its own fault."""
    sent_s: float | None = None
    """When the request had been handed to a connection."""
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

    def record(self, *, ttft_target_s: float | None = None) -> Record:
        """For the metrics. `ttft_target_s`: instead of its class's."""
        return Record(
            due_s=self.due_s,
            token_s=np.array(self.token_s),
            person=self.person,
            output_tokens=self.output_tokens,
            is_whole=self.is_whole,
            ttft_target_s=self.sla.ttft_target_s if ttft_target_s is None else ttft_target_s,
            sla=self.sla.name,
        )

    def document(self) -> dict[str, Any]:
        """For a file of logs."""
        read_s = read_times(self.person, self.token_s)
        return {
            "index": self.index,
            "sla": self.sla.name,
            "due_s": self.due_s,
            "begun_s": self.begun_s,
            "sent_s": self.sent_s,
            "end_s": self.end_s,
            "error": self.error,
            "stream": self.stream,
            "rate": None if self.person.is_machine else self.person.rate,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "pauses": self.person.pauses(),
            "token_s": _rounded(self.token_s),
            "read_s": _rounded(read_s.tolist()),
            "stalls": [_rounded(gap) for gap in waits(self.person, self.token_s, read_s)],
        }


def _rounded(times: Iterable[float]) -> list[float]:
    return [round(at, 4) for at in times]
