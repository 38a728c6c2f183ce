"""Who holds which page, kept up to date from the page tables that change. Plain Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cupyllm.page_allocator import PageAllocator
from cupyllm.sequence import Sequence


class PageUse(NamedTuple):
    """What a page is used for: "free", "cached" or "live"."""

    page: int
    state: str
    place: int | None  # where it stands in the page tables of its holders, 0 is first; None unless it is live
    holders: tuple[int, ...]  # ids of the sequences whose page tables name it: its reference count is their number


class PageMap:
    """The pages of an allocator as the sequences see them. `update` tells it of every table that has changed."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._touched = allocator.touched = set[int]()
        self._tables: dict[int, list[int]] = {}  # sequence id -> its page table as last seen
        self._holders: dict[int, list[int]] = {}  # live page -> sequence ids
        self._places: dict[int, int] = {}  # live page -> its place in the page tables

    def close(self) -> None:
        """Have the allocator note nothing any more."""
        self._allocator.touched = None

    @property
    def num_touched(self) -> int:
        """Pages that may have changed since `changes` or `lengthened` were called last."""
        return len(self._touched)

    def update(self, sequence: Sequence) -> None:
        """Look at one sequence's page table again."""
        old, new = self._tables.get(sequence.id, []), sequence.page_table
        same = len(old)
        if old != new[:same]:
            same = next(k for k, page in enumerate(old) if k >= len(new) or new[k] != page)
        for page in old[same:]:
            self._holders[page].remove(sequence.id)
        for place, page in enumerate(new[same:], start=same):
            self._holders.setdefault(page, []).append(sequence.id)
            self._places[page] = place
        self._tables[sequence.id] = list(new)
        if not new:
            del self._tables[sequence.id]

    def changed(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those whose page table has become longer or shorter."""
        tables = self._tables
        return [sequence for sequence in sequences if len(sequence.page_table) != len(tables.get(sequence.id, ()))]

    def holders(self, page: int) -> list[int]:
        """Ids of the sequences that hold a page, who took it first is first."""
        return self._holders.get(page, [])

    def changes(self) -> tuple[PageUse, ...]:
        """The pages whose use may have changed since the last call; `update` has been told of all tables."""
        pages = sorted(self._touched)
        self._touched.clear()
        return tuple([self._settle(page) for page in pages])

    def lengthened(self, sequences: Iterable[Sequence]) -> tuple[PageUse, ...]:
        """What `changes` would return where page tables have got new pages of their own, and nothing else happened."""
        uses = []
        for sequence in sequences:
            old, new = self._tables[sequence.id], sequence.page_table
            for place in range(len(old), len(new)):
                page = new[place]
                old.append(page)
                self._holders[page] = [sequence.id]
                self._places[page] = place
                uses.append(PageUse(page, "live", place, (sequence.id,)))
        self._touched.clear()
        return tuple(sorted(uses))

    def all(self) -> tuple[PageUse, ...]:
        """Every page that is not free."""
        cached = {page for page in range(self._allocator.num_pages) if self._allocator.is_cached(page)}
        return tuple([self._settle(page) for page in sorted(cached.union(self._holders))])

    def _settle(self, page: int) -> PageUse:
        """What a page is used for now; forgets who let go of it."""
        holders = self._holders.get(page)
        if holders:
            return PageUse(page, "live", self._places[page], tuple(holders))
        self._holders.pop(page, None)
        self._places.pop(page, None)
        return PageUse(page, "cached" if self._allocator.is_cached(page) else "free", None, ())
