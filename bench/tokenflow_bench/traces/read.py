"""From a file of recorded traffic to arrivals and lengths."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from tokenflow_bench.traces.documents import MooncakeFormat, ShareGptFormat
from tokenflow_bench.traces.errors import RowError, TraceError
from tokenflow_bench.traces.rows import Rows
from tokenflow_bench.traces.tables import AZURE, BURSTGPT
from tokenflow_bench.workload import Workload

__all__ = ["FORMATS", "Trace", "read_trace"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Format(Protocol):
    """How one kind of file is read."""

    def fits(self, head: str) -> bool:
        """Whether a file that begins with this line is one."""

    def rows(self, file: TextIO) -> Rows:
        """All rows, read as they are asked for. Raises `RowError`."""


FORMATS: Final[dict[str, Format]] = {
    "burstgpt": BURSTGPT,
    "azure": AZURE,
    "mooncake": MooncakeFormat(),
    "sharegpt": ShareGptFormat(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival; `arrived` in seconds from the first one, None if it has none."""

    arrived: Floats | None
    prompt: Ints
    output: Ints
    failed: int
    """Requests without an answer, left out."""

    def __len__(self) -> int:
        return len(self.prompt)

    def workload(self, rate: Floats, *, arrived: Floats | None = None) -> Workload:
        """With readers of these rates. `arrived`: instead of the trace's own times, or where it has none."""
        times = self.arrived if arrived is None else arrived
        assert times is not None, "a trace without times needs arrivals"
        return Workload.of(times, self.prompt, self.output, rate)


def read_trace(
    path: Path,
    *,
    limit: int | None = None,
    begin_s: float = 0.0,
    end_s: float = math.inf,
    faster: float = 1.0,
    length_scale: float = 1.0,
) -> Trace:
    """The requests of a trace, in whichever of `FORMATS` it is; `.gz` is unpacked on the way.

    `begin_s`, `end_s`: a window in seconds from the trace's first request, of which at most the first `limit`
    requests with an answer are taken; the rest of the file is not read. `faster` divides the times,
    `length_scale` multiplies the lengths (at least 1 token remains). Raises `TraceError` for a file of no
    known format, a bad row, rows that are not in order of time, and an empty window.
    """
    rows: list[tuple[float, int, int]] = []
    failed = 0
    has_times = True
    with _open(path) as file:
        try:
            for at, prompt, output in _window(_format(path, file).rows(file), begin_s, end_s):
                if output == 0:
                    failed += 1
                    continue
                has_times = has_times and at is not None
                rows.append((at or 0.0, prompt, output))
                if len(rows) == limit:
                    break
        except RowError as error:
            message, line = error.args
            raise TraceError(f"{path}, line {line}: {message}") from None
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise TraceError(f"{path}: {error}") from None
    if not rows:
        raise TraceError(f"{path}: no answered request between {begin_s:g} and {end_s:g} s of it")
    times, prompts, outputs = (np.array(column) for column in zip(*rows, strict=True))
    return Trace(
        arrived=(times - times[0]) / faster if has_times else None,
        prompt=_scaled(prompts, length_scale),
        output=_scaled(outputs, length_scale),
        failed=failed,
    )


def _window(rows: Rows, begin_s: float, end_s: float) -> Iterator[tuple[float | None, int, int]]:
    """Times from the first row; stops at the first row beyond the window."""
    first = before = None
    for line, at, prompt, output in rows:
        if at is None:
            yield None, prompt, output
            continue
        first = at if first is None else first
        if before is not None and at < before:
            raise RowError(f"its time is {before - at:g} s before that of the row above", line)
        before = at
        if at - first >= end_s:
            return
        if at - first >= begin_s:
            yield at - first, prompt, output


def _scaled(tokens: NDArray[np.int64], factor: float) -> Ints:
    scaled: Ints = np.maximum(np.rint(tokens * factor), 1).astype(np.int64)
    return scaled


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    """Unpacked, as text."""
    if path.suffix == ".gz":
        with cast("TextIO", gzip.open(path, "rt", encoding="utf-8", newline="")) as file:
            yield file
    else:
        with path.open(encoding="utf-8", newline="") as file:
            yield file


def _format(path: Path, file: TextIO) -> Format:
    """By the first line that is not empty; the file is at its beginning afterwards."""
    head = file.readline(_HEAD_CHARS)
    while head and not head.strip():
        head = file.readline(_HEAD_CHARS)
    file.seek(0)
    for known in FORMATS.values():
        if known.fits(head):
            return known
    raise TraceError(f"{path}: none of {', '.join(FORMATS)}; it begins with {head[:60].strip()!r}")


_HEAD_CHARS = 4096
