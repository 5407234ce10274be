"""Text that waits for its client, in little more memory than its bytes."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from tokenflow_gateway.relay.meter import Piece

__all__ = ["Backlog"]

_TRIM_MARKS = 256


class Backlog:
    """A queue of pieces: bytes, and a mark of 16 bytes for each piece that may leave by itself.

    `write_bytes` is the most that one write takes.
    """

    __slots__ = ("_blocks", "_first", "_readable", "_sizes", "_tokens", "_write_bytes", "cut")

    def __init__(self, *, write_bytes: int) -> None:
        self._write_bytes = write_bytes
        self._blocks: list[bytearray] = []  # few: a queue of the library takes more than they do, empty
        self._sizes = array("I")
        self._tokens = array("q")
        self._readable = array("I")
        self._first = 0  # marks before this one are of pieces that have left
        self.cut = False
        """Of the first piece, a part has left."""

    def __bool__(self) -> bool:
        return self._first < len(self._sizes)

    @property
    def readable(self) -> int:
        """What the client can read once it has the first piece. Only while there is one."""
        return self._readable[self._first]

    def add(self, piece: Piece, *, join: bool) -> None:
        """Append a piece: as a part of the last one, if that is wanted or it brings nothing to read.

        Only as long as one write can take both.
        """
        self._keep(piece.data)
        size = len(piece.data)
        if (
            self
            and (join or piece.readable == self._readable[-1])
            and self._sizes[-1] + size <= self._write_bytes
        ):
            self._sizes[-1] += size
            self._tokens[-1] = piece.tokens
            self._readable[-1] = piece.readable
            return
        self._sizes.append(size)
        self._tokens.append(piece.tokens)
        self._readable.append(piece.readable)

    def take(self, *, has: tuple[int, int], due: Callable[[int, int], bool]) -> Piece:
        """What the next write takes: the first piece, and those behind it that may go with it.

        Of a piece that is too large for one write, a part: with it the client has no more than the tokens it
        `has`. `due(before, after)` says of the next text, by the readable tokens without it and with it,
        whether it may go.
        """
        last, size = self._first, self._sizes[self._first]
        if size > self._write_bytes:
            self._sizes[last] -= self._write_bytes
            self.cut = True
            return Piece(self._cut(self._write_bytes), *has)
        while last + 1 < len(self._sizes) and size + self._sizes[last + 1] <= self._write_bytes:
            if not due(self._readable[last], self._readable[last + 1]):
                break
            last += 1
            size += self._sizes[last]
        self.cut = False
        piece = Piece(self._cut(size), self._tokens[last], self._readable[last])
        self._forget(last + 1)
        return piece

    def _forget(self, marks: int) -> None:
        self._first = marks
        if marks >= _TRIM_MARKS:
            del self._sizes[:marks], self._tokens[:marks], self._readable[:marks]
            self._first = 0

    def _keep(self, data: bytes) -> None:
        """Blocks of about one write: one run of all would be moved as it grows, and leave holes."""
        if self._blocks and len(self._blocks[-1]) + len(data) <= self._write_bytes:
            self._blocks[-1] += data
        elif data:
            self._blocks.append(bytearray(data))

    def _cut(self, size: int) -> bytes:
        """The first `size` bytes."""
        parts = []
        while size:
            block = self._blocks[0]
            if len(block) > size:
                parts.append(block[:size])
                del block[:size]
                break
            parts.append(self._blocks.pop(0))
            size -= len(block)
        return b"".join(parts)
