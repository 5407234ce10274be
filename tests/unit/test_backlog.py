"""The backlog: order, whole pieces, counts, and what it costs in memory."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from tokenflow_gateway.relay.backlog import Backlog
from tokenflow_gateway.relay.meter import Piece

WRITE_BYTES = 100
pieces = st.lists(st.tuples(st.integers(1, 350), st.integers(0, 2), st.booleans()), max_size=60)


def always(before: int, after: int) -> bool:
    return True


def never(before: int, after: int) -> bool:
    return before == after


@given(pieces, st.booleans(), st.booleans())
def test_every_byte_leaves_in_order_and_every_token_with_its_last_byte(
    sizes: list[tuple[int, int, bool]], join: bool, in_between: bool
) -> None:
    backlog, sent, got = Backlog(write_bytes=WRITE_BYTES), b"", b""
    ends: dict[int, tuple[int, int]] = {0: (0, 0)}
    has, tokens, readable = (0, 0), 0, 0

    def take() -> None:
        nonlocal got, has
        piece = backlog.take(has=has, due=always)
        got += piece.data
        has = piece.tokens, piece.readable
        assert len(piece.data) <= WRITE_BYTES
        assert has == max(counts for end, counts in ends.items() if end <= len(got))

    for number, (size, hidden, shown) in enumerate(sizes):
        tokens += hidden + shown
        readable += shown
        data = bytes([number]) * size
        sent += data
        ends[len(sent)] = tokens, readable
        backlog.add(Piece(data, tokens, readable), join=join)
        if in_between and number % 3 == 2:
            take()
    while backlog:
        take()
    assert got == sent


def test_a_piece_without_bytes_brings_its_tokens() -> None:
    backlog = Backlog(write_bytes=WRITE_BYTES)
    backlog.add(Piece(b"", 1, 1), join=False)
    assert backlog
    backlog.add(Piece(b"", 2, 1), join=False)
    assert backlog.take(has=(0, 0), due=never) == Piece(b"", 2, 1)


def test_only_what_is_due_leaves_and_what_is_no_text_leaves_with_the_text_before_it() -> None:
    backlog = Backlog(write_bytes=WRITE_BYTES)
    for number in range(3):
        backlog.add(Piece(b"text", 2 * number + 1, number + 1), join=False)
        backlog.add(Piece(b"[call]", 2 * number + 2, number + 1), join=False)
    assert backlog.readable == 1
    assert backlog.take(has=(0, 0), due=never) == Piece(b"text[call]", 2, 1)
    assert backlog.readable == 2
    assert backlog.take(has=(2, 1), due=always) == Piece(b"text[call]text[call]", 6, 3)
    assert not backlog


def test_a_piece_is_cut_only_if_no_write_can_take_it_and_its_tokens_come_with_its_end() -> None:
    backlog = Backlog(write_bytes=WRITE_BYTES)
    backlog.add(Piece(b"a" * 60, 1, 1), join=False)
    backlog.add(Piece(b"b" * 60, 2, 2), join=True)
    backlog.add(Piece(b"c" * 250, 3, 3), join=True)
    taken, has = [], (0, 0)
    while backlog:
        piece = backlog.take(has=has, due=always)
        has = piece.tokens, piece.readable
        taken.append((len(piece.data), *has))
    assert taken == [(60, 1, 1), (60, 2, 2), (100, 2, 2), (100, 2, 2), (50, 3, 3)]


def test_small_pieces_cost_little_more_than_their_bytes() -> None:
    count, event = 5_000, b"x" * 47
    backlog = Backlog(write_bytes=16 * 1024)
    tracemalloc.start()
    for number in range(count):
        backlog.add(Piece(event, number, number), join=False)
    cost = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert cost / count < 1.15 * (47 + 16)
