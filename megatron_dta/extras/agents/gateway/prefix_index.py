"""Finds the longest known prefix of a text, or of a sequence of token ids, by digests.

A session knows the token ids of many prefixes: of every prompt, of every answer with the prompt before it, and of every
prefix of a prompt that ends at a special token, where tokenization may be cut. The index keeps a digest of each prefix
instead of the text, so its size does not depend on the lengths of the texts.
"""

from __future__ import annotations

import bisect
import hashlib
from typing import Generic, TypeVar

Value = TypeVar("Value")


class PrefixIndex(Generic[Value]):
    def __init__(self) -> None:
        self._values: dict[bytes, Value] = {}
        self._lengths: list[int] = []

    def add(self, content: bytes, entries: list[tuple[int, Value]]) -> None:
        """Set the value of the first ``length`` bytes of ``content`` for each (length, value), in ascending order.

        A later value of the same prefix replaces an earlier one.
        """
        for (length, value), digest in zip(entries, _digests(content, [length for length, _ in entries]), strict=True):
            self._values[digest] = value
            index = bisect.bisect_left(self._lengths, length)
            if index == len(self._lengths) or self._lengths[index] != length:
                self._lengths.insert(index, length)

    def find(self, content: bytes) -> tuple[int, Value] | None:
        """The longest known prefix of ``content``: its length in bytes and its value; None if no prefix is known."""
        lengths = self._lengths[: bisect.bisect_right(self._lengths, len(content))]
        for length, digest in zip(reversed(lengths), reversed(_digests(content, lengths)), strict=True):
            if digest in self._values:
                return length, self._values[digest]
        return None


def _digests(content: bytes, lengths: list[int]) -> list[bytes]:
    """The digests of the prefixes of these ascending lengths, in one pass over the content."""
    state, begin, digests = hashlib.blake2b(digest_size=16), 0, []
    view = memoryview(content)
    for length in lengths:
        state.update(view[begin:length])
        begin = length
        digests.append(state.copy().digest())
    return digests
