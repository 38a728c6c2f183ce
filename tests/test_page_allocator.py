"""The allocator alone: pages go out once, come back once, and its books can be checked against the page tables."""

from __future__ import annotations

import pytest

from cupyllm.page_allocator import PageAllocator


def test_pages_go_out_once_and_come_back() -> None:
    allocator = PageAllocator(4)
    first, second = allocator.allocate(3), allocator.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (allocator.num_free, allocator.num_live) == (0, 4)
    allocator.release(first)
    assert (allocator.num_free, allocator.num_live) == (3, 1)
    allocator.check_integrity([second])


def test_a_shared_page_is_free_only_after_its_last_holder() -> None:
    allocator = PageAllocator(2)
    table = allocator.allocate(2)
    allocator.share(table[:1])
    allocator.release(table)
    assert allocator.num_free == 1
    allocator.check_integrity([table[:1]])
    allocator.release(table[:1])
    assert allocator.num_free == 2


def test_a_pool_of_one_page() -> None:
    allocator = PageAllocator(1)
    assert allocator.allocate(0) == []
    assert not allocator.is_live(0)
    assert allocator.allocate(1) == [0]
    assert (allocator.is_live(0), allocator.is_shared(0)) == (True, False)
    allocator.share([0])
    assert allocator.is_shared(0)


def test_a_published_page_is_handed_out_last_and_its_owner_is_told() -> None:
    told: list[int] = []
    allocator = PageAllocator(3, on_reuse=told.append)
    pages = allocator.allocate(3)
    allocator.publish(pages[1])
    allocator.release(pages)
    assert (allocator.num_free, allocator.num_cached, allocator.num_available) == (2, 1, 3)
    assert [allocator.is_cached(page) for page in pages] == [False, True, False]
    assert pages[1] not in allocator.allocate(2)
    assert told == []
    assert allocator.allocate(1) == [pages[1]]
    assert told == [pages[1]]
    allocator.release([pages[1]])
    assert allocator.num_cached == 0, "it holds something else now"
    assert not allocator.is_cached(pages[1])


@pytest.mark.parametrize(
    "mistake",
    [
        lambda allocator: allocator.allocate(3),
        lambda allocator: allocator.release([1]),
        lambda allocator: allocator.share([1]),
        lambda allocator: allocator.release([0, 0]),
        lambda allocator: allocator.publish(1),
        lambda allocator: allocator.allocate(-1),
        lambda allocator: PageAllocator(0),
    ],
    ids=[
        "more pages than are free",
        "a free page released",
        "a free page shared",
        "released twice",
        "a free page published",
        "fewer than no pages",
        "a pool of none",
    ],
)
def test_a_mistake_of_ours_is_caught(mistake) -> None:
    allocator = PageAllocator(2)
    assert allocator.allocate(1) == [0]
    with pytest.raises(AssertionError):
        mistake(allocator)


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[0, 1]]], ids=["leaked", "held by one too many", "free and named"])
def test_integrity_check_finds_books_that_disagree(tables: list[list[int]]) -> None:
    allocator = PageAllocator(2)
    allocator.allocate(1)
    with pytest.raises(AssertionError, match="page"):
        allocator.check_integrity(tables)


def test_pages_that_get_or_lose_a_holder_or_leave_the_cache_are_noted() -> None:
    allocator = PageAllocator(4)
    allocator.touched = set()
    first, second, third = allocator.allocate(3)
    assert allocator.touched == {first, second, third}
    for change, touched in [
        (lambda: allocator.share([second]), {second}),
        (lambda: allocator.publish(first), set()),
        (lambda: allocator.release([second, third]), {second, third}),
        (lambda: allocator.release([first]), {first}),
        (lambda: allocator.withdraw(first), {first}),
    ]:
        allocator.touched.clear()
        change()
        assert allocator.touched == touched
