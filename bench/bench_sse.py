"""What splitting costs an event: nanoseconds of CPU time, best of several rounds.

python bench/bench_sse.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import click

from tokenflow_gateway.relay.sse import Event, SSEReader, is_done

EVENTS = 20_000
ROUNDS = 7
CHUNK = (
    b'data: {"id":"c0a696b498614ddc83703bbacf080051","object":"chat.completion.chunk","created":1795963934,'
    b'"model":"smollm2-135m","choices":[{"index":0,"delta":{"reasoning_content":null,"content":" capital"},'
    b'"logprobs":null,"finish_reason":null,"matched_stop":null}]}\n\n'
)


def feed_all(reads: Iterable[bytes], use: Callable[[Event], object]) -> int:
    """Split a stream that arrives in these reads; the number of events."""
    reader, count = SSEReader(), 0
    for data in reads:
        for event in reader.feed(data):
            use(event)
            count += 1
    return count + len(reader.end())


def ns_per_event(reads: list[bytes], use: Callable[[Event], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time_ns()
        count = feed_all(reads, use)
        best = min(best, (time.process_time_ns() - started) / count)
    return best


def in_reads(stream: bytes, read_bytes: int) -> list[bytes]:
    return [stream[at : at + read_bytes] for at in range(0, len(stream), read_bytes)]


@click.command()
def main() -> None:
    """Measure the ways a stream can arrive."""
    stream = CHUNK * EVENTS
    crlf = stream.replace(b"\n", b"\r\n")
    cases: dict[str, tuple[list[bytes], Callable[[Event], object]]] = {
        "one whole event a read": (in_reads(stream, len(CHUNK)), lambda event: event.raw),
        "the same, is_done": (in_reads(stream, len(CHUNK)), is_done),
        "the same, data": (in_reads(stream, len(CHUNK)), lambda event: event.data),
        "8 whole events a read": (in_reads(stream, 8 * len(CHUNK)), lambda event: event.raw),
        "reads of 16 KiB": (in_reads(stream, 16_384), lambda event: event.raw),
        "reads of 100 bytes": (in_reads(stream, 100), lambda event: event.raw),
        "CRLF, one event a read": (in_reads(crlf, len(CHUNK) + 2), lambda event: event.raw),
    }
    for name, (reads, use) in cases.items():
        click.echo(f"{name:24} {ns_per_event(reads, use):7.0f} ns/event")


if __name__ == "__main__":
    main()
