"""Which pages of the host pool are free."""

from __future__ import annotations

__all__ = ["HostPages"]


class HostPages:
    """Gives out page numbers below `pages`, adjacent ones where it can: adjacent pages are one copy."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, of which there must be as many free."""
        assert 0 <= count <= len(self._free)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """These are free again; they come out next, in this order."""
        self._free.extend(reversed(pages))

    def check_integrity(self, taken: list[int]) -> None:
        """Assert that free and `taken` pages are all pages, each once."""
        assert sorted([*self._free, *taken]) == list(range(self.pages)), "a host page is lost or used twice"
