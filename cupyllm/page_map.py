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
        self._tables: dict[int, list[int]] = {}  # sequence id -> its page table as last seen
        self._lengths: dict[int, int] = {}  # of the page tables
        self._holders: dict[int, list[int]] = {}  # live page -> sequence ids
        self._places: dict[int, int] = {}  # live page -> its place in the page tables
        self._cached = {page for page in range(allocator.num_pages) if allocator.is_cached(page)}
        self._changed: set[int] = set()

    def update(self, sequence: Sequence) -> None:
        """Look at one sequence's page table again."""
        old, new = self._tables.get(sequence.id, []), sequence.page_table
        same = len(old)
        if old != new[:same]:
            same = next(k for k, page in enumerate(old) if k >= len(new) or new[k] != page)
        for page in old[same:]:
            self._holders[page].remove(sequence.id)
            self._changed.add(page)
        for place, page in enumerate(new[same:], start=same):
            self._holders.setdefault(page, []).append(sequence.id)
            self._places[page] = place
            self._changed.add(page)
        self._tables[sequence.id] = list(new)
        self._lengths[sequence.id] = len(new)
        if not new:
            del self._tables[sequence.id], self._lengths[sequence.id]

    def changed(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those whose page table has become longer or shorter."""
        lengths = self._lengths
        return [sequence for sequence in sequences if len(sequence.page_table) != lengths.get(sequence.id, 0)]

    def holders(self, page: int) -> list[int]:
        """Ids of the sequences that hold a page, who took it first is first."""
        return self._holders.get(page, [])

    def changes(self) -> tuple[PageUse, ...]:
        """The pages whose use has changed since the last call."""
        pages, self._changed = self._changed, set()
        uses = [self._settle(page) for page in sorted(pages)]
        if len(self._cached) != self._allocator.num_cached:  # pages that left the cache and are in no page table
            gone = [page for page in self._cached if not self._allocator.is_cached(page)]
            uses += [self._settle(page) for page in gone]
        return tuple(uses)

    def all(self) -> tuple[PageUse, ...]:
        """Every page that is not free."""
        return tuple(self._settle(page) for page in sorted({*self._holders, *self._cached}))

    def _settle(self, page: int) -> PageUse:
        """What a page is used for now; forgets who let go of it."""
        self._cached.discard(page)
        holders = self._holders.get(page)
        if holders:
            return PageUse(page, "live", self._places[page], tuple(holders))
        self._holders.pop(page, None)
        self._places.pop(page, None)
        if self._allocator.is_cached(page):
            self._cached.add(page)
            return PageUse(page, "cached", None, ())
        return PageUse(page, "free", None, ())
