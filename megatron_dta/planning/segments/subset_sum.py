"""Chooses which subtrees to lay out one after another so that a segment ends where the last of them does.

Laid out straight, subtrees fill segment after segment; only where the run ends does room go to waste. Which subtrees to
take is a subset-sum problem: the sums that can be made are the set bits of an integer, and adding a subtree is a shift
and an or.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Segments that a run of several subtrees may span.
MAX_SEGMENTS = 32


class Run(NamedTuple):
    """Subtrees to lay out, by their sizes, and the room left in the last segment."""

    sizes: list[int]
    wasted: int


def fewest_wasted(sizes: Sequence[int], room: int, segment_tokens: int, limit: int) -> Run | None:
    """The run that wastes least; among equals the shortest.

    Args:
        sizes: tokens of the subtrees to choose from, ascending.
        room: tokens left in the current segment.
        segment_tokens: capacity of the segments that follow.
        limit: most tokens of the run.

    Returns:
        The run, or None if no subtree is within the limit.
    """
    sums = _Sums(sizes, room, segment_tokens, limit)
    totals = sums.totals_before_bounds()
    if not totals:
        return None
    wasted, total = min(((room - total) % segment_tokens, total) for total in totals)
    return Run(sums.members(total), wasted)


def least_wasteful(sizes: Sequence[int], room: int, segment_tokens: int, limit: int) -> Run | None:
    """The run that wastes least per token laid out; arguments and result as ``fewest_wasted``."""
    sums = _Sums(sizes, room, segment_tokens, limit)
    totals = sums.totals_before_bounds()
    if not totals:
        return None
    total = min(totals, key=lambda total: (((room - total) % segment_tokens) / total, total))
    return Run(sums.members(total), (room - total) % segment_tokens)


def longest_within(sizes: Sequence[int], room: int, segment_tokens: int, limit: int, tolerance: int) -> Run | None:
    """The longest run of at most ``limit`` tokens that ends a segment with at most ``tolerance`` wasted, or None."""
    sums = _Sums(sizes, room, segment_tokens, limit)
    for total in reversed(sums.totals_before_bounds()):
        wasted = (room - total) % segment_tokens
        if wasted <= tolerance:
            return Run(sums.members(total), wasted)
    return None


class _Sums:
    """The sums up to ``limit`` of the choices among ``sizes``; one longer than a run of several may be, only alone."""

    def __init__(self, sizes: Sequence[int], room: int, segment_tokens: int, limit: int) -> None:
        span = room + MAX_SEGMENTS * segment_tokens
        self.bounds = [*range(room, min(limit, span), segment_tokens), min(limit, span)]
        self.sizes = [size for size in sizes if size <= self.bounds[-1]]
        self.alone = [size for size in sizes if self.bounds[-1] < size <= limit]
        mask = (1 << (self.bounds[-1] + 1)) - 1
        # reachable[i]: bit t is set where t is a sum of some of the sizes from i on.
        self.reachable = [1] * (len(self.sizes) + 1)
        for i in range(len(self.sizes) - 1, -1, -1):
            self.reachable[i] = (self.reachable[i + 1] | (self.reachable[i + 1] << self.sizes[i])) & mask

    def totals_before_bounds(self) -> list[int]:
        """The largest sum before each segment bound and the limit, ascending, without 0; then single sizes."""
        totals = []
        bits = self.reachable[0]
        for bound in self.bounds:
            total = (bits & ((1 << (bound + 1)) - 1)).bit_length() - 1
            if total > 0 and (not totals or total > totals[-1]):
                totals.append(total)
        return totals + self.alone

    def members(self, total: int) -> list[int]:
        """Sizes that add up to ``total``, ascending."""
        if total > self.bounds[-1]:
            return [total]
        members = []
        for i, size in enumerate(self.sizes):
            if total and not (self.reachable[i + 1] >> total) & 1:
                members.append(size)
                total -= size
        return members
