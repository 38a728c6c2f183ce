"""Reuse of computed pages: what counts as a hit, when a page is forgotten, and that a hit never changes an answer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from cupyllm.engine import Engine
from cupyllm.model import Model
from cupyllm.page_allocator import PageAllocator
from cupyllm.prefix_cache import CachedPage, PrefixCache
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import Sequence
from tests.engine_case import load_model, make_engine, run_to_end
from tests.tiny_checkpoint import write_tiny_checkpoint

B = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def constant(data: bytes) -> bytes:
    """The worst hash there is: every key is the same."""
    return b"same"


def hash_of_own_ids(data: bytes) -> bytes:
    """A hash that knows nothing of a page's parent, nor of salts."""
    return hashlib.sha256(data[-4 * B :]).digest()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_tiny_checkpoint(tmp_path_factory.mktemp("prefix") / "model"))


def published(cache: PrefixCache, allocator: PageAllocator, ids: list[int], salt: str = "") -> list[CachedPage]:
    """Publish `ids` as full pages and let them go, as a finished sequence does."""
    pages = allocator.allocate(len(ids) // B)
    known: list[CachedPage] = []
    for number, page in enumerate(pages):
        parent = known[-1] if known else None
        known.append(cache.publish(page, ids[number * B : (number + 1) * B], parent, salt))
    allocator.release(pages)
    return known


def make_cache(num_pages: int = 8, **options) -> tuple[PrefixCache, PageAllocator]:
    allocator = PageAllocator(num_pages)
    return PrefixCache(allocator, page_size=B, **options), allocator


def test_the_longest_run_of_full_pages_is_found() -> None:
    cache, allocator = make_cache()
    ids = list(range(12))
    known = published(cache, allocator, ids)
    assert cache.find(ids) == known
    assert cache.find([*ids, 99]) == known
    assert cache.find(ids[:11]) == known[:2]
    assert cache.find(ids[:3]) == []
    assert cache.find([*ids[:4], 99, *ids[5:]]) == known[:1]


@pytest.mark.parametrize("place", range(B))
@pytest.mark.parametrize("change", [1, 256, 65536])
def test_a_page_that_differs_in_one_token_is_another_page(place: int, change: int) -> None:
    cache, allocator = make_cache()
    published(cache, allocator, [1, 2, 3, 4, 5, 6, 7, 8])
    other = [1, 2, 3, 4, 5, 6, 7, 8]
    other[place] += change
    assert cache.find(other) == []


@pytest.mark.parametrize("digest", [None, constant, hash_of_own_ids], ids=["sha256", "constant", "own ids"])
def test_the_same_page_under_another_parent_is_another_page(digest) -> None:
    cache, allocator = make_cache(**({"digest": digest} if digest else {}))
    known = published(cache, allocator, [1, 1, 1, 1, 7, 7, 7, 7])
    published(cache, allocator, [2, 2, 2, 2, 7, 7, 7, 7])
    found = cache.find([2, 2, 2, 2, 7, 7, 7, 7])
    assert known[1] not in found
    assert all(page.parent is not known[0] for page in found)


def test_salts_keep_requests_apart() -> None:
    cache, allocator = make_cache()
    published(cache, allocator, [1, 2, 3, 4], salt="one")
    assert cache.find([1, 2, 3, 4], "two") == []
    assert cache.find([1, 2, 3, 4]) == []
    assert len(cache.find([1, 2, 3, 4], "one")) == 1


def test_a_page_is_forgotten_at_the_moment_it_is_handed_out_and_children_go_before_parents() -> None:
    cache, allocator = make_cache(num_pages=4)
    first = published(cache, allocator, [1] * 8)
    second = published(cache, allocator, [2] * 8)
    assert (allocator.num_free, allocator.num_cached) == (0, 4)
    allocator.allocate(1)
    assert cache.find([1] * 8) == first[:1]
    allocator.share([second[0].page])
    allocator.allocate(2)
    assert cache.find([1] * 8) == []
    assert cache.find([2] * 8) == second[:1], "a page in use is never handed out"
    assert len(cache) == 1
    cache.check_integrity()


def test_the_page_used_last_is_evicted_last() -> None:
    cache, allocator = make_cache(num_pages=2)
    old = published(cache, allocator, [1] * 4)
    published(cache, allocator, [2] * 4)
    allocator.share([old[0].page])
    allocator.release([old[0].page])
    allocator.allocate(1)
    assert cache.find([1] * 4) == old
    assert cache.find([2] * 4) == []


def test_a_page_whose_parent_is_forgotten_makes_way_for_one_that_can_be_found() -> None:
    cache, allocator = make_cache(num_pages=3)
    parent, child, other = allocator.allocate(3)
    first = cache.publish(parent, [1] * B, None)
    cache.publish(child, [2] * B, first)
    allocator.release([parent])
    assert allocator.allocate(1) == [parent], "evicted, while its child is in use"
    assert cache.find([1] * B + [2] * B) == []
    again = cache.publish(parent, [1] * B, None)
    second = cache.publish(other, [2] * B, again)
    assert cache.find([1] * B + [2] * B) == [again, second]
    allocator.release([child])
    assert (allocator.num_free, allocator.num_cached, len(cache)) == (1, 0, 2)
    cache.check_integrity()


def test_a_page_that_is_known_already_is_told_and_what_builds_on_it_is_kept() -> None:
    cache, allocator = make_cache(num_pages=3)
    first, same, next_page = allocator.allocate(3)
    known = cache.publish(first, [1] * B, None)
    assert cache.publish(same, [1] * B, None) is known
    child = cache.publish(next_page, [2] * B, known)
    assert cache.find([1] * B + [2] * B) == [known, child]
    allocator.release([same])
    assert allocator.num_free == 1, "the second copy is not kept"


def test_a_page_that_builds_on_a_forgotten_one_is_not_kept() -> None:
    cache, allocator = make_cache(num_pages=2)
    parent, child = allocator.allocate(2)
    first = cache.publish(parent, [1] * B, None)
    cache.withdraw([first])
    cache.publish(child, [2] * B, first)
    allocator.release([parent, child])
    assert (allocator.num_free, allocator.num_cached, len(cache)) == (2, 0, 0)


@pytest.mark.parametrize("held", [True, False], ids=["held", "let go"])
def test_a_withdrawn_page_is_not_found_and_comes_back_free(held: bool) -> None:
    cache, allocator = make_cache(num_pages=2)
    pages = allocator.allocate(1)
    known = cache.publish(pages[0], [1] * B, None)
    if not held:
        allocator.release(pages)
    cache.withdraw([known])
    cache.withdraw([known])
    assert cache.find([1] * B) == []
    assert (allocator.num_live, allocator.num_cached) == (held, 0)
    if held:
        allocator.release(pages)
    assert allocator.num_free == 2
    allocator.check_integrity([])


def answer(engine: Engine, prompt: list[int], **options) -> Sequence:
    sequence = engine.add(prompt, GREEDY, **options)
    run_to_end(engine)
    return sequence


def ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 500, length).tolist()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 40])
def test_the_same_prompt_again_reuses_all_full_pages_but_always_runs_its_last_token(model: Model, length: int) -> None:
    engine = make_engine(model)
    first, again = answer(engine, ids(length)), answer(engine, ids(length))
    assert again.output_ids == first.output_ids
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == (length - 1) // B * B


@pytest.mark.parametrize("length", [8, 9, 10, 11])
def test_a_longer_conversation_reuses_prompt_and_answer(model: Model, length: int) -> None:
    engine = make_engine(model)
    first = answer(engine, ids(length))
    follow_up = [*first.token_ids, 5, 6, 7]
    second = answer(engine, follow_up)
    assert second.num_cached_tokens == (first.num_tokens - 1) // B * B
    assert second.output_ids == answer(make_engine(model, prefix_cache=False), follow_up).output_ids


def test_answers_stay_right_when_pages_are_reused_after_eviction(model: Model) -> None:
    engine = make_engine(model, num_pages=12)
    alone = {seed: answer(make_engine(model), ids(30, seed)).output_ids for seed in range(4)}
    for seed in (0, 1, 2, 0, 3, 1, 1, 0):
        assert answer(engine, ids(30, seed)).output_ids == alone[seed]


def test_a_hash_that_is_always_the_same_costs_hits_but_no_answer(model: Model) -> None:
    engine = make_engine(model)
    allocator = engine.scheduler.allocator
    engine.scheduler.prefix_cache = PrefixCache(allocator, page_size=B, digest=constant)
    for seed in (0, 1, 0, 2, 1):
        assert answer(engine, ids(20, seed)).output_ids == answer(make_engine(model), ids(20, seed)).output_ids


def test_cached_pages_without_a_holder_are_charged_at_admission(model: Model) -> None:
    engine = make_engine(model, num_pages=10, max_decode_batch_size=4)
    shared = ids(12)
    answer(engine, shared)
    sequences = [
        engine.add([*shared, *ids(4, seed)], SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True))
        for seed in range(4)
    ]
    run_to_end(engine)
    assert engine.stats.num_preemptions > 0, "the pool must be too small for all, or the case is void"
    assert all(sequence.num_output_tokens == 14 for sequence in sequences)


@pytest.mark.parametrize("num_pages", [8, 9])
def test_a_prompt_waits_until_its_hits_and_the_rest_fit_together(model: Model, num_pages: int) -> None:
    engine = make_engine(model, num_pages=num_pages)
    answer(engine, ids(12))  # leaves 4 cached pages, the first 3 of them the prompt's
    running = engine.add(ids(14, seed=1), GREEDY)  # takes 4
    engine.step()
    hit = engine.add(ids(12) + ids(4, seed=2), GREEDY)  # 3 pages it finds, and 2 more
    engine.step()
    assert len(running.page_table) == 4
    assert (hit.num_cached_tokens, hit.num_preemptions) == ((12, 0) if num_pages == 9 else (None, 0))


def test_a_preempted_sequence_finds_its_own_pages_again(model: Model) -> None:
    engine = make_engine(model, num_pages=13, max_decode_batch_size=2)
    long = SamplingParams(temperature=0.0, max_tokens=22, ignore_eos=True)
    first, second = engine.add(ids(12, 1), long), engine.add(ids(12, 2), long)
    hits = 0
    while engine.has_work:
        before = second.num_preemptions and not second.page_table
        engine.step()
        engine.scheduler.check_integrity()
        if before and second.page_table:
            hits = max(hits, len(second.cached_pages))
    assert second.num_preemptions > 0
    assert hits > 0
    for sequence, seed in ((first, 1), (second, 2)):
        alone = make_engine(model).add(ids(12, seed), long)
        assert sequence.num_output_tokens == alone.max_tokens


def test_another_salt_finds_nothing(model: Model) -> None:
    engine = make_engine(model)
    answer(engine, ids(16), cache_salt="tenant a")
    assert answer(engine, ids(16), cache_salt="tenant b").num_cached_tokens == 0
    assert answer(engine, ids(16), cache_salt="tenant a").num_cached_tokens == 12


def test_nothing_is_reused_when_switched_off(model: Model, tmp_path: Path) -> None:
    engine = make_engine(model, prefix_cache=False)
    answer(engine, ids(16))
    assert answer(engine, ids(16)).num_cached_tokens == 0
    assert engine.stats.num_cached_pages == 0
