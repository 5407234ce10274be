"""The event splitter: right at every split, whatever the line ends, against the words of the standard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.transcripts import Transcript, load, streams
from support.whatwg import BOM, Dispatched, dispatched
from tokenflow_gateway.relay.sse import Event, SSEError, SSEReader, is_done

STREAMS = streams()
LINE_ENDS = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}
FIELDS = [b"data: x", b"data:y", b"data", b"event: e", b": c", b"id: 1", b"data: \xc3\xa9"]
PIECES = [*FIELDS, BOM, b"\n", b"\r", b"\r\n", b"\n\n", b":", b" "]


def reference(stream: bytes) -> list[Dispatched]:
    """What the standard has a client see, and what the end cuts off."""
    return dispatched(stream, cut_off_counts=True)


def split_at(stream: bytes, positions: Iterable[int]) -> Iterator[bytes]:
    """The stream in the reads that these positions make of it, empty ones included."""
    edges = [0, *sorted(positions), len(stream)]
    return (stream[start:end] for start, end in pairwise(edges))


def read_events(reads: Iterable[bytes]) -> list[Event]:
    reader = SSEReader()
    events = [event for data in reads for event in reader.feed(data)]
    return events + reader.end()


def parsed(events: Iterable[Event]) -> list[Dispatched]:
    return [Dispatched(event.event, event.data) for event in events if event.has_data]


def read(stream: bytes, *positions: int) -> list[Dispatched]:
    return parsed(read_events(split_at(stream, positions)))


def joined(events: Iterable[Event]) -> bytes:
    return b"".join(event.raw for event in events)


def with_line_ends(stream: bytes, end: bytes) -> bytes:
    return stream.replace(b"\n", end)


def mixed_line_ends(stream: bytes) -> bytes:
    """Every line ends in another way than the one before it (never CR before a lone LF: that is one end)."""
    lines = stream.split(b"\n")
    ends = [b"\n", b"\r", b"\r\n"]
    return b"".join(line + ends[index % 3] for index, line in enumerate(lines[:-1]))


def named(transcript: Transcript) -> str:
    return transcript.name


def test_the_reference_parser_sees_the_recorded_events() -> None:
    """The measure of all tests below is itself right about a recording that a person has read."""
    events = reference(load("chat_stream").data)
    assert len(events) == 10
    assert events[-1] == Dispatched(b"", b"[DONE]")
    assert b'"content":" Paris"' in events[6].data
    assert reference(load("messages_stream").data)[0].name == b"message_start"


@pytest.mark.parametrize("transcript", STREAMS, ids=named)
def test_recorded_reads_give_the_recorded_events(transcript: Transcript) -> None:
    """SGLang's own reads: the events come out as they went in, byte for byte."""
    events = read_events(read.data for read in transcript.reads)
    assert joined(events) == transcript.data
    assert parsed(events) == reference(transcript.data)


@pytest.mark.parametrize("transcript", STREAMS, ids=named)
def test_split_at_every_byte(transcript: Transcript) -> None:
    """Two reads that meet anywhere, also inside a character, make no difference."""
    expected = reference(transcript.data)
    for position in range(len(transcript.data) + 1):
        events = read_events(split_at(transcript.data, [position]))
        assert parsed(events) == expected, position
        assert joined(events) == transcript.data, position


@pytest.mark.parametrize("end", LINE_ENDS.values(), ids=LINE_ENDS)
@pytest.mark.parametrize("bom", [b"", BOM], ids=["plain", "bom"])
def test_line_ends_and_byte_order_mark_split_at_every_byte(end: bytes, bom: bytes) -> None:
    """Every line end the standard allows, with and without a mark, cut anywhere."""
    for name in ("chat_stream", "messages_stream"):
        stream = bom + with_line_ends(load(name).data, end)
        expected = reference(load(name).data)
        for position in range(len(stream) + 1):
            events = read_events(split_at(stream, [position]))
            assert parsed(events) == expected, position
            assert joined(events) == stream.removeprefix(BOM), position


@pytest.mark.parametrize("transcript", STREAMS, ids=named)
def test_mixed_line_ends_read_byte_by_byte(transcript: Transcript) -> None:
    """The hardest case of both: no two line ends alike, no two bytes in one read."""
    stream = mixed_line_ends(transcript.data)
    assert read(stream, *range(len(stream))) == reference(transcript.data)


@settings(max_examples=200, deadline=None)
@given(choice=st.data())
def test_random_splits_of_every_variant(choice: st.DataObject) -> None:
    """Any number of reads, any line end, with or without a mark."""
    data = choice.draw(st.sampled_from(STREAMS)).data
    end = choice.draw(st.sampled_from([*LINE_ENDS.values(), None]))
    bom = choice.draw(st.sampled_from([b"", BOM]))
    stream = bom + (with_line_ends(data, end) if end else mixed_line_ends(data))
    positions = choice.draw(st.lists(st.integers(0, len(stream)), min_size=2, max_size=12))
    events = read_events(split_at(stream, positions))
    assert parsed(events) == reference(data)
    cut_short = joined(events) + b"\n"  # the last blank line is CR CRLF, and a read ended inside the CRLF
    assert stream.removeprefix(BOM) in (joined(events), cut_short)


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30), choice=st.data())
def test_any_bytes_at_any_splits(pieces: list[bytes], choice: st.DataObject) -> None:
    """Streams nobody would send: the same events as the reference, and nothing lost but blank lines."""
    stream = b"".join(pieces)
    positions = choice.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    events = read_events(split_at(stream, positions))
    assert parsed(events) == reference(stream)
    assert joined(events).startswith(stream.removeprefix(BOM).rstrip(b"\r\n"))
    assert all(event.raw.strip(b"\r\n") for event in events)


@pytest.mark.parametrize("blank", [b"\n", b"\n\n", b"\n\n\n", b"\n\n\n\n"])
def test_blank_lines_between_events_are_no_events(blank: bytes) -> None:
    """In reads of their own, or in front of or behind an event: never an event that says nothing."""
    one, two, three = (b"data: %d\n\n" % number for number in (1, 2, 3))
    for reads in ([one, blank, two, three], [one, blank + two + three], [one, two + blank, blank, three]):
        events = read_events(reads)
        assert [event.data for event in events] == [b"1", b"2", b"3"]
        assert joined(events) == b"".join(reads)


def test_an_event_comes_with_the_read_that_completes_it() -> None:
    """Nothing waits for the next read, whichever line end the upstream uses."""
    for end in LINE_ENDS.values():
        reader = SSEReader()
        assert reader.feed(b"data: 1" + end) == []
        assert [event.data for event in reader.feed(end)] == [b"1"]
        assert reader.pending_bytes == 0


def test_a_crlf_cut_in_half_stays_with_its_event() -> None:
    """The LF that is on its way belongs to the event before it, not in front of the next one."""
    reader = SSEReader()
    assert reader.feed(b"data: 1\r\n\r") == []
    assert [event.raw for event in reader.feed(b"\ndata: 2\r\n\r\n")] == [
        b"data: 1\r\n\r\n",
        b"data: 2\r\n\r\n",
    ]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (b"data: x\n\n", Dispatched(b"", b"x")),
        (b"data:x\n\n", Dispatched(b"", b"x")),
        (b"data:  x\n\n", Dispatched(b"", b" x")),
        (b"data\n\n", Dispatched(b"", b"")),
        (b"data: \n\n", Dispatched(b"", b"")),
        (b"data: 1\ndata: 2\n\n", Dispatched(b"", b"1\n2")),
        (b"data: a: b\n\n", Dispatched(b"", b"a: b")),
        (b"event: e\ndata: 1\n\n", Dispatched(b"e", b"1")),
        (b"event: e\nevent: f\ndata: 1\n\n", Dispatched(b"f", b"1")),
        (b": c\nid: 7\nretry: 5\ndata: 1\n\n", Dispatched(b"", b"1")),
        (b"\n\ndata: 1\n\n", Dispatched(b"", b"1")),
    ],
)
def test_fields(block: bytes, expected: Dispatched) -> None:
    """One block, by the rules of the standard."""
    (event,) = read_events([block])
    assert Dispatched(event.event, event.data) == expected == reference(block)[0]
    assert event.has_data
    assert not event.is_comment


@pytest.mark.parametrize(
    ("block", "is_comment"),
    [(b": ping\n\n", True), (b":\n: more\n\n", True), (b"retry: 1000\n\n", False), (b"event: e\n\n", False)],
)
def test_blocks_without_data(block: bytes, is_comment: bool) -> None:
    """Comments and stray fields come out, recognisable, with no data."""
    (event,) = read_events([block])
    assert (event.is_comment, event.has_data, event.data) == (is_comment, False, b"")


def test_a_byte_order_mark_is_dropped_once() -> None:
    """Only in front of the stream; a second one is part of the line it stands in."""
    first, second = read_events([BOM + b"data: 1\n\n" + BOM + b"data: 2\n\n"])
    assert first.raw == b"data: 1\n\n"
    assert (second.raw, second.has_data) == (BOM + b"data: 2\n\n", False)


@pytest.mark.parametrize(
    ("tail", "raw"),
    [
        (b"data: [DONE]", b"data: [DONE]\n\n"),
        (b"data: [DONE]\n", b"data: [DONE]\n\n"),
        (b"data: [DONE]\r\n", b"data: [DONE]\r\n\n"),
        (b"data: [DONE]\r", b"data: [DONE]\r\n\n"),
        (b"data: [DONE]\r\n\r", b"data: [DONE]\r\n\r\n"),
    ],
)
def test_the_end_completes_what_was_cut_off(tail: bytes, raw: bytes) -> None:
    """The last event counts without its blank line, and is passed on with one."""
    reader = SSEReader()
    assert reader.feed(b"data: 1\n\n" + tail)[0].data == b"1"
    (event,) = reader.end()
    assert event.raw == raw
    assert is_done(event)
    assert reader.end() == []


@pytest.mark.parametrize("rest", [b"", b"\n", b"\r\n\r\n"])
def test_blank_lines_at_the_end_are_no_event(rest: bytes) -> None:
    """Nothing is made up at the end of a stream that was complete."""
    assert [event.data for event in read_events([b"data: 1\n\n", rest])] == [b"1"]


def test_done_is_a_whole_data() -> None:
    """A model that writes about the protocol does not end its own stream."""
    text = b'data: {"choices":[{"delta":{"content":"data: [DONE]"}}]}\n\n'
    split_lines = b"data: [DO\ndata: NE]\n\n"
    quoted, lines, comment, done, named_done = read_events(
        [text, split_lines, b": [DONE]\n\n", b"data: [DONE]\n\n", b"event: end\ndata:[DONE]\n\n"]
    )
    assert not any(map(is_done, (quoted, lines, comment)))
    assert is_done(done)
    assert is_done(named_done)


@pytest.mark.parametrize("read_bytes", [1000, 65_536, 1 << 20])
def test_a_line_of_200_kb(read_bytes: int) -> None:
    """A long line passes, in few reads or many."""
    event = b'data: {"arguments":"' + b"x" * 200_000 + b'"}\n\n'
    stream = event + b"data: [DONE]\n\n"
    assert [e.raw for e in read_events(split_at(stream, range(read_bytes, len(stream), read_bytes)))] == [
        event,
        b"data: [DONE]\n\n",
    ]


@pytest.mark.parametrize("reads", [[b"data: " + b"x" * 95 + b"\n\n"], [b"data: ", b"x" * 95, b"\n\n"]])
def test_an_event_over_the_limit_is_an_error(reads: list[bytes]) -> None:
    """However it arrives; one byte less passes."""
    size = len(b"".join(reads))
    reader = SSEReader(max_event_bytes=size)
    assert sum(len(reader.feed(data)) for data in reads) == 1
    reader = SSEReader(max_event_bytes=size - 1)
    with pytest.raises(SSEError, match=f"longer than {size - 1} bytes"):
        [reader.feed(data) for data in reads]


def test_what_never_ends_is_bounded() -> None:
    """An upstream that sends no line end at all is cut off at the limit."""
    reader = SSEReader(max_event_bytes=10_000)
    for _ in range(100):
        reader.feed(b"x" * 100)
    assert reader.pending_bytes == 10_000
    with pytest.raises(SSEError):
        reader.feed(b"x")


def test_many_events_in_one_read_may_exceed_the_limit_together() -> None:
    """The limit is one event's, not one read's."""
    reader = SSEReader(max_event_bytes=20)
    assert len(reader.feed(b"data: 1\n\n" * 50) + reader.feed(b"data: 1\n\n" * 50)) == 100


def test_blank_lines_are_looked_at_once() -> None:
    """However many have come, a read costs what it brings; they stay in front of the next event."""
    reader = SSEReader()
    begun = process_time()
    for _ in range(4000):
        assert reader.feed(b"\n" * 100) == []
    (event,) = reader.feed(b"data: 1\n\n")
    assert process_time() - begun < 1.0, "it is seconds where each read looks at all of them"
    assert event.raw == b"\n" * 400_000 + b"data: 1\n\n"
