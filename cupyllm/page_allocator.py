"""Hands out the pages of the KV cache and counts who holds them. Knows page numbers only, no arrays and no sequences.

A page is free (count 0) or live (count >= 1: one for each page table it stands in). Several sequences may hold the same
page; it returns to the free list when the last of them lets go.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable


class PageAllocator:
    """Pages 0 to num_pages - 1."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_live(self) -> int:
        return self.num_pages - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one holder. The caller has checked `num_free`."""
        assert 0 <= count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            assert self._holders[page] == 0, f"page {page} was free and held"
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to live pages."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take a holder from each page; a page without holders is free again."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was released twice"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def check_integrity(self, page_tables: Iterable[list[int]]) -> None:
        """Assert that counts, free list and the page tables of all sequences tell the same story."""
        held = Counter(page for table in page_tables for page in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a page stands in the free list twice"
        for page in range(self.num_pages):
            assert self._holders[page] == held[page], (
                f"page {page} counts {self._holders[page]} holders, {held[page]} page tables name it"
            )
            assert (page in free) == (held[page] == 0), f"page {page} is both free and live, or neither"
