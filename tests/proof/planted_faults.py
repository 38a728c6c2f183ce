"""Faults to plant in scheduler, cache, sampling and text: mistakes that other engines have made, or that lie near.

`python scripts/mutation.py --by-hand` plants each and sees whether the named tests notice.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFIX_CACHE = "tests/test_prefix_cache.py"
SCHEDULER = "tests/test_scheduler.py"
MODEL = "tests/proof/test_model_of_cache.py"
ALLOCATOR = "tests/test_page_allocator.py"
FAULTS_IN_STEPS = "tests/proof/test_faults.py"
FORKS = "tests/test_forks.py"
TEXT = "tests/test_text_stream.py"
SAMPLING = "tests/ops/test_sampling_op.py"


@dataclass(frozen=True)
class PlantedFault:
    """In cupyllm/`module`.py each `old`, which stands there exactly once, becomes `new`; one of `tests` must notice."""

    name: str
    module: str
    replacements: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


def fault(name: str, module: str, old: str, new: str, *tests: str) -> PlantedFault:
    return PlantedFault(name, module, ((old, new),), tests)


# fmt: off
FAULTS = [
    # Hash
    fault("the ids of a hit are not compared", "prefix_cache", "page.token_ids != ids or page", "page", PREFIX_CACHE),
    fault("the parent of a hit is not compared", "prefix_cache", " or page.parent is not parent:", ":", PREFIX_CACHE),
    fault("the request's salt does not count", "prefix_cache", " + cache_salt.encode(", " + b\"\".decode().encode(",
          PREFIX_CACHE),
    PlantedFault("the last token of a page does not count", "prefix_cache",
                 (("ids = data[start : start + width]", "ids = data[start : start + width - 4]"),
                  ("ids = self._pack(*token_ids)", "ids = self._pack(*token_ids)[:-4]")), (PREFIX_CACHE,)),
    # Eviction
    fault("the name of a page outlives its contents", "page_allocator", "        self.on_reuse(page)\n", "",
          ALLOCATOR),
    fault("the page used last is evicted first", "page_allocator", "popitem(last=False)", "popitem(last=True)",
          PREFIX_CACHE),
    fault("the beginning of a prompt is evicted before its end", "page_allocator", "in reversed(pages):", "in pages:",
          PREFIX_CACHE),
    fault("a held page can be evicted", "page_allocator",
          "                del self._cached[page]\n            self._holders", "            self._holders",
          PREFIX_CACHE),
    # Admission
    fault("cached pages that nobody holds are not charged", "scheduler", " - len(hits) + unheld", " - len(hits)",
          PREFIX_CACHE),
    fault("what running prompts still need is not counted", "scheduler", "_has_room(wanted + promised)",
          "_has_room(wanted)", SCHEDULER),
    fault("the first output token is not counted", "scheduler", "min(sequence.num_tokens + 1, sequence.most_tokens)",
          "sequence.num_tokens", SCHEDULER),
    fault("one row too many", "scheduler", "most and self.waiting and self.num_running <",
          "most and self.waiting and self.num_running <=", SCHEDULER),
    fault("a wholly cached prompt has nothing to run", "scheduler", "sequence.token_ids[:-1]", "sequence.token_ids",
          PREFIX_CACHE),
    # Edges of chunks and pages
    fault("a page is published before its last token is written", "scheduler", "num_computed - page_size + 1,",
          "num_computed - page_size + 2,", SCHEDULER),
    fault("a chunk short of the end is sampled", "plan", "== self.sequence.num_tokens",
          ">= self.sequence.num_tokens - 1", SCHEDULER),
    fault("later chunks begin at position 0", "batch", " - np.int32(decodes.num_decodes) - starts)",
          " - np.int32(decodes.num_decodes))", MODEL),
    fault("a row gets its next page late", "scheduler", "1 % self.page_size", "2 % self.page_size", SCHEDULER),
    fault("the first prompt takes the whole budget", "plan", "-(-budget // 2)", "budget", SCHEDULER),
    fault("pages held early are not taken back", "scheduler",
          "            for sequence in self.decoding:\n                self._take_early_pages(sequence)\n", "",
          SCHEDULER),
    fault("a page held early counts against a copy that is needed", "scheduler",
          "max(self._pages_for(num_tokens) - len(table), 0)", "self._pages_for(num_tokens) - len(table)", SCHEDULER),
    # Sharing
    fault("a fork does not count as a holder", "scheduler", "        self.allocator.share(child.page_table)\n", "",
          FORKS),
    fault("a shared page is written to without a copy", "scheduler",
          "must_copy = first < len(table) and self.allocator.is_shared(table[first])", "must_copy = False", MODEL),
    fault("forks share one list of published pages", "scheduler", "list(parent.cached_pages)", "parent.cached_pages",
          MODEL),
    fault("a copy's source is let go before the copy is planned", "scheduler",
          "self._page_copies.append((table[first], copy))",
          "self._page_copies.append((table[first], copy)); self.allocator.release([table[first]])", FORKS),
    # Rollback
    fault("the preempted count as computed", "scheduler",
          "        sequence.cached_pages = []\n        sequence.num_computed = 0\n",
          "        sequence.cached_pages = []\n", SCHEDULER),
    fault("the oldest is preempted", "scheduler", "next(holder for holder in reversed(self.running)",
          "next(holder for holder in self.running", SCHEDULER),
    fault("the preempted go to the end of the queue", "scheduler",
          "        self._release_pages(sequence)\n        insort(self.waiting, sequence, key=by_rank)",
          "        self._release_pages(sequence)\n        self.waiting.append(sequence)", SCHEDULER),
    fault("copies planned for the preempted keep their sources", "scheduler",
          "        self._cancel_copies(sequence)\n", "", SCHEDULER),
    fault("what a failed sequence wrote can be found", "scheduler",
          "self.prefix_cache.withdraw(sequence.cached_pages)", "pass", FAULTS_IN_STEPS),
    # Sampling and text
    fault("the same noise for every token", "ops/sample_reference", "int(sampling.positions[r])", "0", SAMPLING),
    fault("top-p leaves out the token that reaches it", "ops/sample_reference", "order[before < top_p]",
          "order[before + weights[order] < top_p]", SAMPLING),
    fault("a stop string is shown in part", "text_stream", "self._held = text[certain:]",
          'certain, self._held = len(text), ""', TEXT),
    fault("the first stop in the list wins", "text_stream", "min(found)", "found[0]", TEXT),
    fault("broken bytes are left out", "text_stream", '("replace")', '("ignore")', TEXT),
]
# fmt: on
