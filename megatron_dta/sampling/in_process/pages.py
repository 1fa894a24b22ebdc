"""Tracks which pages of the K/V cache are free, how many requests share each, and which prefix each full page holds.

A page is held by every request whose table lists it and is free if no request holds it. Full pages with computed K and
V are registered under a digest of all tokens up to their end, so that a new request finds its longest cached prefix; so
is the last page of a context, which may be partly filled. A registered page that waiting requests expect outlives its
holders until all of them have begun, or memory is short. Pages are only numbers here; the tensors are in the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

_FIRST_PAGES = 64


class PagePool:
    """Pages ``0 .. num_pages - 1``. The pool begins empty and grows up to ``max_pages`` (None: no limit), at first to
    an eighth more than was ever asked for, as tensors are copied whenever it grows. ``num_losses``: pages put free."""

    def __init__(self, page_size: int, max_pages: int | None = None) -> None:
        self.page_size, self.max_pages = page_size, max_pages
        self.num_pages = self.peak_pages = self.num_losses = self._most_asked = 0
        self._free: list[int] = []
        self._holders: list[int] = []
        self._page_of_digest: dict[bytes, int] = {}
        self._digests_of_page: dict[int, tuple[bytes, ...]] = {}
        # Waiting requests by the digests of their prefixes, and pages without holders that are kept for them.
        self._expected: dict[bytes, int] = {}
        self._kept: dict[int, None] = {}

    @property
    def pages_in_use(self) -> int:
        """Number of held pages."""
        return self.num_pages - len(self._free) - len(self._kept)

    def has_room(self, count: int) -> bool:
        """Whether ``count`` pages can be taken; grows the pool if it may, and else frees kept pages."""
        asked = self.num_pages - len(self._free) + count
        self._most_asked = max(self._most_asked, asked)
        if asked > self.num_pages:
            wanted = max(self._most_asked * 9 // 8 if not self.num_pages else asked, 2 * self.num_pages, _FIRST_PAGES)
            total = wanted if self.max_pages is None else min(wanted, self.max_pages)
            # Low numbers come first, since the tensors contain them already.
            self._free[:0] = range(total - 1, self.num_pages - 1, -1)
            self._holders += [0] * (total - self.num_pages)
            self.num_pages = total
        while count > len(self._free) and self._kept:
            self._put_free(next(iter(self._kept)))
        return count <= len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes ``count`` free pages, each with one holder. Call ``has_room`` first."""
        first = len(self._free) - count
        pages = self._free[first:][::-1]
        del self._free[first:]
        for page in pages:
            self._holders[page] = 1
        self.peak_pages = max(self.peak_pages, self.pages_in_use)
        return pages

    def share(self, pages: np.ndarray) -> None:
        """Adds a holder to each of ``pages``, int64."""
        for page in pages.tolist():
            self._holders[page] += 1
            self._kept.pop(page, None)

    def give_back(self, pages: np.ndarray) -> None:
        """Removes a holder for each entry; a page without holders becomes free unless it is expected."""
        for page in pages.tolist():
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if self._is_useful(page):
                self._kept[page] = None
            else:
                self._put_free(page)

    def is_lost(self, page: int) -> bool:
        """Whether ``page`` is free, whatever it once held."""
        return self._holders[page] == 0 and page not in self._kept

    def expect(self, digests: Iterable[bytes]) -> None:
        """A request waits that can use the prefixes with ``digests``."""
        for digest in digests:
            self._expected[digest] = self._expected.get(digest, 0) + 1

    def expect_no_more(self, digests: Iterable[bytes]) -> None:
        """A request that has called ``expect`` waits no more."""
        for digest in digests:
            self._expected[digest] -= 1
            if not self._expected[digest]:
                del self._expected[digest]
                page = self._page_of_digest.get(digest)
                if page in self._kept and not self._is_useful(page):
                    self._put_free(page)

    def is_expected(self, digest: bytes) -> bool:
        """Whether a waiting request can use the prefix with ``digest``."""
        return digest in self._expected

    def _is_useful(self, page: int) -> bool:
        """Whether a waiting request expects a prefix that ends in the page."""
        return bool(self._expected) and not self._expected.keys().isdisjoint(self._digests_of_page.get(page, ()))

    def _put_free(self, page: int) -> None:
        self._kept.pop(page, None)
        self._free.append(page)
        self.num_losses += 1
        for digest in self._digests_of_page.pop(page, ()):
            del self._page_of_digest[digest]

    def clear(self) -> None:
        """Removes all pages; none may be held."""
        assert self.pages_in_use == 0, f"{self.pages_in_use} pages are still held"
        self.num_pages, self._free, self._holders = 0, [], []

    def register(self, digests: Iterable[bytes], pages: Iterable[int]) -> None:
        """Registers each page as the last one of the prefix with its digest, unless another page is registered."""
        for digest, page in zip(digests, pages, strict=True):
            if digest not in self._page_of_digest:
                self._page_of_digest[digest] = page
                self._digests_of_page[page] = *self._digests_of_page.get(page, ()), digest

    def find(self, digest: bytes) -> int | None:
        """The last page of the prefix with ``digest``, or None."""
        return self._page_of_digest.get(digest)


def extend_digest(previous: bytes, token_ids: bytes) -> bytes:
    """Digest of a prefix from the digest of its beginning and the int32 tokens that follow."""
    return hashlib.blake2b(previous + token_ids, digest_size=16).digest()
