"""What every page of the cache is used for during a step, as runs of neighbours that are used alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from cupyllm.page_allocator import PageAllocator
from cupyllm.sequence import Sequence


class PageRun(NamedTuple):
    """`num_pages` pages in a row: "live" (held by request `owner`), "shared" (by several), "cached" or "free"."""

    state: str
    owner: int | None  # for "live" only
    num_pages: int


class MappedAllocator(PageAllocator):
    """The page allocator unchanged, but for a view of what each page is used for."""

    def page_map(self, running: Iterable[Sequence]) -> tuple[PageRun, ...]:
        """The pages from the first to the last. `running` holds all sequences that have pages."""
        uses: list[tuple[str, int | None]] = [("free", None)] * self.num_pages
        for page in self._cached:
            uses[page] = ("cached", None)
        for sequence in running:
            for page in sequence.page_table:
                uses[page] = ("shared", None) if self.is_shared(page) else ("live", sequence.id)
        return tuple(PageRun(*use, len(list(run))) for use, run in itertools.groupby(uses))
