"""Finds pages whose keys and values another sequence has computed already. Knows token ids and page numbers only.

The keys and values of a page depend on its tokens and on all tokens before them. So a full page is known by a
chain: the sha256 of its parent's key and its own token ids, begun with a salt that stands for everything else that
alters keys and values (the model, its dtype, and a request's own `cache_salt`). The salt has random bytes, so that
nobody outside can prepare prompts that meet. A hit counts only when the token ids are the same and the parent is
the very page that was found before it: a collision of keys costs a hit, never an answer.

A page is published when its keys and values have been written, and forgotten when the allocator hands it out anew.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cupyllm.page_allocator import PageAllocator


@dataclass(eq=False, slots=True)
class CachedPage:
    """A full page whose contents are known, never changed. `parent` is the page before it, None for the first."""

    page: int
    key: bytes
    token_ids: bytes
    parent: CachedPage | None


class PrefixCache:
    """The published pages of one allocator, by their chain of token ids."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        salt: str = "",
        digest: Callable[[bytes], bytes] = lambda data: hashlib.sha256(data).digest(),
    ) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._pack = struct.Struct(f"{page_size}i").pack  # a page's ids as bytes
        self._digest = digest
        self._salt = secrets.token_bytes(16) + salt.encode()
        self._by_key: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        allocator.on_reuse = self._forget

    def __len__(self) -> int:
        return len(self._by_page)

    def find(self, token_ids: Sequence[int], cache_salt: str = "") -> list[CachedPage]:
        """The longest run of published pages that hold the first tokens of `token_ids`."""
        found: list[CachedPage] = []
        data, width = array("i", token_ids).tobytes(), 4 * self._page_size
        parent, key = None, self._root(cache_salt)
        for start in range(0, len(data) - width + 1, width):
            ids = data[start : start + width]
            key = self._digest(key + ids)
            page = self._by_key.get(key)
            if page is None or page.token_ids != ids or page.parent is not parent:
                break
            found.append(page)
            parent = page
        return found

    def publish(
        self, page: int, token_ids: Sequence[int], parent: CachedPage | None, cache_salt: str = ""
    ) -> CachedPage:
        """Make a written page known: it holds `token_ids`, and `parent` is the page before it.

        Returns the page that is known by these tokens: another one, where a sequence beside this one was faster.
        A page whose parent is known no longer could never be found: it is not made known, and makes way for another.
        """
        ids = self._pack(*token_ids)
        key = self._digest((parent.key if parent else self._root(cache_salt)) + ids)
        known = self._by_key.get(key)
        if known is not None and known.token_ids == ids and known.parent is parent:
            return known
        entry = CachedPage(page, key, ids, parent)
        if known is not None and not self._can_be_found(known):
            self.withdraw([known])
            known = None
        if known is None and self._can_be_found(entry):  # a collision leaves the older page known
            self._by_key[key] = entry
            self._by_page[page] = entry
            self._allocator.publish(page)
        return entry

    def withdraw(self, pages: Iterable[CachedPage]) -> None:
        """Forget those of `pages` that are known: what they hold is not to be reused."""
        for entry in pages:
            if self._is_known(entry):
                self._forget(entry.page)
                self._allocator.withdraw(entry.page)

    def check_integrity(self) -> None:
        """Assert that both tables hold the same pages, none of them free."""
        assert len(self._by_key) == len(self._by_page)
        for page, entry in self._by_page.items():
            assert entry.page == page
            assert self._by_key[entry.key] is entry

    def _is_known(self, entry: CachedPage) -> bool:
        return self._by_page.get(entry.page) is entry

    def _can_be_found(self, entry: CachedPage) -> bool:
        return entry.parent is None or self._is_known(entry.parent)

    def _root(self, cache_salt: str) -> bytes:
        return self._digest(self._salt + b"\0" + cache_salt.encode("utf-8", "surrogatepass"))

    def _forget(self, page: int) -> None:
        entry = self._by_page.pop(page)
        del self._by_key[entry.key]
