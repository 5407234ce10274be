"""Which token ends at which byte of a stream."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice

__all__ = ["ByteLedger"]

_TRIM_ENTRIES = 256


class ByteLedger:
    """Bytes on the wire and the readable tokens they carry, one entry a write; 16 bytes of memory each."""

    __slots__ = ("_bytes", "_from", "_tokens", "bytes", "tokens")

    def __init__(self) -> None:
        self._bytes = array("Q")
        self._tokens = array("Q")
        self._from = (0, 0)
        self.bytes = 0
        """Written so far."""
        self.tokens = 0

    def wrote(self, sizes: Iterable[int], tokens: Sequence[int]) -> None:
        """So many more bytes have been handed over in each write, and complete so many tokens in all."""
        self._bytes.extend(islice(accumulate(sizes, initial=self.bytes), 1, None))
        self._tokens.extend(tokens)
        self.bytes, self.tokens = self._bytes[-1], tokens[-1]

    def tokens_within(self, size: int) -> float:
        """How many tokens the first `size` bytes carry; inside of a write, in proportion."""
        if size >= self.bytes:
            return float(self.tokens)
        after = bisect_right(self._bytes, size)
        start, before = (self._bytes[after - 1], self._tokens[after - 1]) if after else self._from
        if size <= start:
            return float(before)
        share = (size - start) / (self._bytes[after] - start)
        return before + share * (self._tokens[after] - before)

    def forget(self, size: int) -> None:
        """Nobody will ask for anything within the first `size` bytes any more."""
        passed = bisect_right(self._bytes, size)
        if passed >= _TRIM_ENTRIES:
            self._from = self._bytes[passed - 1], self._tokens[passed - 1]
            del self._bytes[:passed], self._tokens[:passed]
