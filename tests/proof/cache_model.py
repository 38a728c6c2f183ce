"""What the KV cache must hold, told from plans and token ids alone: an independent model to check the scheduler with.

The keys and values of a slot depend on all tokens up to its own. So a slot's contents are modelled by the number of a
chain of tokens, and two slots hold the same exactly when their numbers are equal. Nothing here looks at reference
counts, hashes or the books of the allocator.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from cupyllm.batch import Batch
from cupyllm.page_allocator import PageAllocator
from cupyllm.plan import Plan, PlannedChunk
from cupyllm.sequence import Sequence

NOTHING = -1


class CacheModel:
    """The slots of all pages, each with the chain of tokens whose keys and values it holds."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots = [NOTHING] * (num_pages * page_size)
        self._numbers: dict[tuple[int | str, int], int] = {}

    def chain(self, salt: str, token_ids: Seq[int]) -> list[int]:
        """The number of the chain that ends at each token. Chains of different salts have no number in common."""
        numbers: list[int] = []
        for token_id in token_ids:
            before = numbers[-1] if numbers else salt
            numbers.append(self._numbers.setdefault((before, token_id), len(self._numbers)))
        return numbers

    def slots_of(self, page_table: Seq[int], start: int, stop: int) -> list[int]:
        B = self.page_size
        return [page_table[place // B] * B + place % B for place in range(start, stop)]

    def run(self, plan: Plan, allocator: PageAllocator) -> None:
        """Do what a step does to the cache, and check every slot that it reads and every page that it writes."""
        self._copy(plan.page_copies)
        written: set[int] = set()
        for chunk in plan.chunks:
            sequence, stop = chunk.sequence, chunk.start + chunk.length
            slots = self.slots_of(sequence.page_table, chunk.start, stop)
            for slot, number in zip(slots, self._chain_of(sequence)[chunk.start : stop], strict=True):
                page = slot // self.page_size
                assert allocator.is_live(page), f"sequence {sequence.id} writes to page {page}, which nobody holds"
                assert not allocator.is_shared(page), f"sequence {sequence.id} writes to the shared page {page}"
                assert slot not in written, f"two tokens are written to slot {slot}"
                written.add(slot)
                self.slots[slot] = number
        for chunk in plan.chunks:
            self.check(chunk.sequence, chunk.start + chunk.length)

    def check(self, sequence: Sequence, num_tokens: int) -> None:
        """The pages of a sequence hold its own first tokens."""
        self._check_pages(sequence.page_table, self._chain_of(sequence)[:num_tokens], f"sequence {sequence.id}")

    def check_pages(self, pages: list[int], salt: str, token_ids: Seq[int]) -> None:
        """Pages that are offered for `token_ids` hold just these."""
        self._check_pages(pages, self.chain(salt, token_ids)[: len(pages) * self.page_size], "a prefix hit")

    def _check_pages(self, pages: list[int], expected: list[int], who: str) -> None:
        slots = self.slots_of(pages, 0, len(expected))
        found = [self.slots[slot] for slot in slots]
        assert found == expected, f"{who} reads {found} where {expected} must be"

    def _chain_of(self, sequence: Sequence) -> list[int]:
        return self.chain(sequence.cache_salt, sequence.token_ids)

    def _copy(self, page_copies: list[tuple[int, int]]) -> None:
        sources, copies = {source for source, _ in page_copies}, [copy for _, copy in page_copies]
        assert len(set(copies)) == len(copies), f"two pages are copied to the same one: {page_copies}"
        assert not sources & set(copies), f"a page is copied and copied to in one step: {page_copies}"
        B = self.page_size
        for source, copy in page_copies:
            self.slots[copy * B : copy * B + B] = self.slots[source * B : source * B + B]


def check_batch(batch: Batch, plan: Plan, page_size: int) -> None:
    """Every array of a batch equals what a plain loop over the plan gives."""
    chunks = plan.chunks
    places = [(chunk, place) for chunk in chunks for place in range(chunk.start, chunk.start + chunk.length)]
    contexts = [chunk.start + chunk.length for chunk in chunks]
    ends = np.cumsum([0, *(chunk.length for chunk in chunks)]).tolist()
    expected = {
        "token_ids": [chunk.sequence.token_ids[place] for chunk, place in places],
        "positions": [place for _, place in places],
        "slots": [_slot(chunk, place, page_size) for chunk, place in places],
        "query_starts": ends,
        "context_lens": contexts,
        "logit_rows": [end - 1 for chunk, end in zip(chunks, ends[1:], strict=True) if chunk.reaches_end],
    }
    for name, values in expected.items():
        array = getattr(batch, name)
        assert array.dtype == np.int32, f"{name} is {array.dtype}"
        assert array.tolist() == values, f"{name} is {array.tolist()}, not {values}"
    for row, chunk, context in zip(batch.page_tables.tolist(), chunks, contexts, strict=True):
        used = -(-context // page_size)
        assert row == chunk.sequence.page_table[:used] + [-1] * (len(row) - used)
    assert batch.page_tables.dtype == np.int32
    assert batch.num_decodes == len(plan.decodes)
    assert batch.max_query_len == max(chunk.length for chunk in chunks)
    assert batch.max_context_len == max(contexts)


def _slot(chunk: PlannedChunk, place: int, page_size: int) -> int:
    return chunk.sequence.page_table[place // page_size] * page_size + place % page_size
