"""Which pages of the K/V cache are free, who shares them, and which prefix each full one holds.

A page is held by every sequence whose table lists it and is free when nobody does. Full pages whose K and V have been
computed are registered under a digest of all tokens up to their end, so a new sequence finds the longest prefix that is
there, whoever computed it. Host side only: pages are numbers here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

_FIRST_PAGES = 64


class PagePool:
    """Pages ``0 .. num_pages - 1``, at first none; it grows up to ``max_pages`` (None: without bound)."""

    def __init__(self, page_size: int, max_pages: int | None = None) -> None:
        self.page_size, self.max_pages = page_size, max_pages
        self.num_pages = self.peak_pages = 0
        self._free: list[int] = []
        self._holders: list[int] = []
        self._page_of_digest: dict[bytes, int] = {}
        self._digest_of_page: dict[int, bytes] = {}

    @property
    def pages_in_use(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - len(self._free)

    def holders(self, page: int) -> int:
        """How many hold ``page``."""
        return self._holders[page]

    def has_room(self, count: int) -> bool:
        """Whether ``count`` pages can be taken; the pool grows for it where it may."""
        missing = count - len(self._free)
        if missing > 0:
            wanted = max(self.num_pages + missing, 2 * self.num_pages, _FIRST_PAGES)
            total = wanted if self.max_pages is None else min(wanted, self.max_pages)
            # Low numbers first: they exist in the tensors already.
            self._free[:0] = range(total - 1, self.num_pages - 1, -1)
            self._holders += [0] * (total - self.num_pages)
            self.num_pages = total
        return count <= len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` free pages, from now on held once; ``has_room`` was asked before."""
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        self.peak_pages = max(self.peak_pages, self.pages_in_use)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of ``pages``."""
        for page in pages:
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One holder less for each of ``pages``."""
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
                digest = self._digest_of_page.pop(page, None)
                if digest is not None:
                    del self._page_of_digest[digest]

    def clear(self) -> None:
        """Forget all pages; nobody may hold one."""
        assert self.pages_in_use == 0, f"{self.pages_in_use} pages are held by nobody known"
        self.num_pages, self._free, self._holders = 0, [], []

    def register(self, digest: bytes, page: int) -> None:
        """``page`` holds the K and V at the end of the prefix with ``digest``; nothing where another already does."""
        if digest not in self._page_of_digest:
            self._page_of_digest[digest] = page
            self._digest_of_page[page] = digest

    def find(self, digest: bytes) -> int | None:
        """The page at the end of that prefix, if there is one."""
        return self._page_of_digest.get(digest)


def extend_digest(previous: bytes, token_ids: np.ndarray) -> bytes:
    """Digest of a prefix from the digest of its beginning and the int32 tokens that follow."""
    return hashlib.blake2b(previous + token_ids.tobytes(), digest_size=16).digest()
