"""Hands out the pages of the KV cache and counts who holds them. Knows page numbers only, no arrays and no sequences.

A page is in one of three states:

    free      nobody holds it and nothing in it is worth keeping
    live      held by one or more page tables
    cached    held by nobody, but its contents are published in the prefix cache; handed out when no free page is left,
              the one that was let go longest ago first

Several sequences may hold the same page. Everything here costs time for the pages it touches, never for the pool.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable


class PageAllocator:
    """Pages 0 to num_pages - 1. `on_reuse` is told of a published page at the moment it is handed out anew.

    Who wants to know sets `touched` to a set: pages that get or lose a holder, or leave the cache, are added to it.
    """

    def __init__(self, num_pages: int, on_reuse: Callable[[int], None] = lambda page: None) -> None:
        assert num_pages >= 1
        self.num_pages = num_pages
        self.on_reuse = on_reuse
        self.touched: set[int] | None = None
        self._free = deque(range(num_pages))  # given back last, handed out first: that memory is nearer
        self._cached: OrderedDict[int, None] = OrderedDict()  # let go longest ago first
        self._published: set[int] = set()
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_live(self) -> int:
        return self.num_pages - self.num_available

    def is_live(self, page: int) -> bool:
        return self._holders[page] > 0

    def is_cached(self, page: int) -> bool:
        """Whether nobody holds the page and its contents are kept."""
        return page in self._cached

    def is_shared(self, page: int) -> bool:
        """Whether more than one page table holds the page, so that nobody may write to it."""
        return self._holders[page] > 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one holder. The caller has checked `num_available`."""
        assert 0 <= count <= self.num_available, f"{count} pages wanted, {self.num_available} available"
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            assert self._holders[page] == 0, f"page {page} was available and held"
            self._holders[page] = 1
        self._touch(pages)
        return pages

    def publish(self, page: int) -> None:
        """The contents of a live page are worth keeping when nobody holds it any more."""
        assert self._holders[page] > 0, f"page {page} is not live and cannot be published"
        self._published.add(page)

    def withdraw(self, page: int) -> None:
        """The contents of a published page are worth nothing after all. Who holds it keeps it."""
        self._published.remove(page)
        if page in self._cached:
            del self._cached[page]
            self._free.appendleft(page)
            self._touch([page])

    def share(self, pages: list[int]) -> None:
        """Add a holder to pages that are live or cached."""
        self._touch(pages)
        for page in pages:
            if self._holders[page] == 0:
                assert page in self._cached, f"page {page} is free and cannot be shared"
                del self._cached[page]
            self._holders[page] += 1

    def release(self, pages: list[int]) -> None:
        """Take a holder from each page of a page table.

        The last pages go first: they are evicted before those that their contents build on.
        """
        self._touch(pages)
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} was released twice"
            self._holders[page] -= 1
            if self._holders[page] > 0:
                continue
            if page in self._published:
                self._cached[page] = None
            else:
                self._free.appendleft(page)

    def check_integrity(self, page_tables: Iterable[list[int]]) -> None:
        """Assert that counts, lists and the page tables of all sequences tell the same story."""
        held = Counter(page for table in page_tables for page in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a page stands in the free list twice"
        for page in range(self.num_pages):
            assert self._holders[page] == held[page], (
                f"page {page} counts {self._holders[page]} holders, {held[page]} page tables name it"
            )
            states = (page in free) + (page in self._cached) + (held[page] > 0)
            assert states == 1, f"page {page} is in {states} of the states free, cached and live"
        assert self._published >= set(self._cached), "a page is kept although it was never published"
        assert not self._published & free, "a published page is free"

    def _touch(self, pages: list[int]) -> None:
        if self.touched is not None:
            self.touched.update(pages)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._published.remove(page)
        self.on_reuse(page)
        return page
