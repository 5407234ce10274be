"""Where one stream's KV is: two watermarks over its tokens.

KV of a stream is only ever appended to, so that two numbers say it all. Tokens below `synced` are in host
memory; those from there to `queued` are on their way; the rest is on the device alone.
"""

from __future__ import annotations

from tokenflow_engine.kv.transfer.base import Run

__all__ = ["StreamLedger"]


class StreamLedger:
    """The host pages of one stream, in token order, and its watermarks."""

    __slots__ = ("_page_tokens", "digests", "failed", "host_only", "pages", "queued", "synced", "writing")

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.pages: list[int] = []
        self.synced = 0
        self.queued = 0
        self.writing = 0
        """Tokens that copies in the queue or in flight cover. More than `queued - synced` never."""
        self.failed = False
        """A write failed; what is still in flight behind it does not count."""
        self.host_only = False
        self.digests: list[int] = []
        """Of each token below `synced`, if they are kept."""

    def pages_short(self, upto: int) -> int:
        """Pages missing to hold the tokens below `upto`."""
        return max(0, -(-upto // self._page_tokens) - len(self.pages))

    def begin_write(self, upto: int, pages: list[int]) -> tuple[int, int]:
        """Put the tokens up to `upto` on their way, onto these further pages; the range."""
        assert len(pages) == self.pages_short(upto)
        assert upto > self.queued
        assert not self.failed
        start, self.queued = self.queued, upto
        self.pages += pages
        self.writing += upto - start
        return start, upto

    def finish_write(self, start: int, end: int) -> bool:
        """A copy of this range has arrived, in order; whether it counts."""
        self.writing -= end - start
        if self.failed:
            return False
        assert start == self.synced
        self.synced = end
        return True

    def cancel_write(self, tokens: int) -> None:
        """A copy of so many tokens failed or was never begun: nothing behind it counts until `settle`."""
        self.writing -= tokens
        self.failed = True

    def settle(self) -> list[int]:
        """After a failure, nothing being in flight: start again behind `synced`; the pages to spare."""
        assert self.failed
        assert not self.writing
        self.failed = False
        return self.truncate(self.synced)

    def truncate(self, tokens: int) -> list[int]:
        """Only the first `tokens` tokens count from now on; the pages no longer needed."""
        assert not self.writing
        assert tokens <= self.synced
        self.synced = self.queued = tokens
        del self.digests[tokens:]
        keep = -(-tokens // self._page_tokens)
        spare = self.pages[keep:]
        del self.pages[keep:]
        return spare

    def runs(self, start: int, end: int) -> list[Run]:
        """The host rows of the tokens ``[start, end)``, in order, adjacent ones joined."""
        runs: list[Run] = []
        while start < end:
            page, offset = divmod(start, self._page_tokens)
            tokens = min(self._page_tokens - offset, end - start)
            row = self.pages[page] * self._page_tokens + offset
            if runs and runs[-1].row + runs[-1].tokens == row:
                runs[-1] = Run(runs[-1].row, runs[-1].tokens + tokens)
            else:
                runs.append(Run(row, tokens))
            start += tokens
        return runs

    def check_integrity(self) -> None:
        """Assert that the watermarks and the pages agree."""
        assert 0 <= self.synced <= self.queued
        assert len(self.pages) == -(-self.queued // self._page_tokens)
        if not self.failed:
            assert self.writing == self.queued - self.synced
