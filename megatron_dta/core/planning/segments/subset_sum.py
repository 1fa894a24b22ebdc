"""Chooses subtrees whose total size ends at the end of a segment.

A run of subtrees fills segment after segment, so room is wasted only in the last segment. Which subtrees to take is a
subset-sum problem. The reachable sums are the set bits of an integer; adding a subtree is a shift and an OR.

Example: sizes 2, 3 and 6, with 1 token of room in the current segment and 4 in each later one. The sums 5 and 9 end
exactly at a segment's end (1 + 4 and 1 + 4 + 4), and the shortest run is 2 + 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Maximum number of segments that a run of several subtrees may span.
MAX_SEGMENTS = 32


class Run(NamedTuple):
    """Sizes of the subtrees in a run, and the tokens of room that it leaves in its last segment."""

    sizes: list[int]
    wasted: int


def fewest_wasted(sizes: Sequence[int], free: int, segment_tokens: int, limit: int) -> Run | None:
    """Find the run that wastes the least room; of equal runs, the shortest.

    Args:
        sizes: number of tokens in each candidate subtree, ascending.
        free: number of free tokens in the current segment.
        segment_tokens: capacity of the segments that follow.
        limit: maximum number of tokens in the run.

    Returns:
        The run, or None if every subtree is above the limit.
    """
    sums = _Sums(sizes, free, segment_tokens, limit)
    totals = sums.totals_before_bounds()
    if not totals:
        return None
    wasted, total = min(((free - total) % segment_tokens, total) for total in totals)
    return Run(sums.members(total), wasted)


def least_wasteful(sizes: Sequence[int], free: int, segment_tokens: int, limit: int) -> Run | None:
    """Find the run that wastes the least room per token; arguments and result as in ``fewest_wasted``."""
    sums = _Sums(sizes, free, segment_tokens, limit)
    totals = sums.totals_before_bounds()
    if not totals:
        return None
    total = min(totals, key=lambda total: (((free - total) % segment_tokens) / total, total))
    return Run(sums.members(total), (free - total) % segment_tokens)


def longest_within(sizes: Sequence[int], free: int, segment_tokens: int, limit: int, tolerance: int) -> Run | None:
    """Find the longest run of at most ``limit`` tokens that wastes at most ``tolerance`` tokens; None if none does."""
    sums = _Sums(sizes, free, segment_tokens, limit)
    for total in reversed(sums.totals_before_bounds()):
        wasted = (free - total) % segment_tokens
        if wasted <= tolerance:
            return Run(sums.members(total), wasted)
    return None


class _Sums:
    """All sums of subsets of ``sizes`` up to ``limit``; a size that exceeds the span of a run counts only alone."""

    def __init__(self, sizes: Sequence[int], free: int, segment_tokens: int, limit: int) -> None:
        span = free + MAX_SEGMENTS * segment_tokens
        self.bounds = [*range(free, min(limit, span), segment_tokens), min(limit, span)]
        self.sizes = [size for size in sizes if size <= self.bounds[-1]]
        self.alone = [size for size in sizes if self.bounds[-1] < size <= limit]
        mask = (1 << (self.bounds[-1] + 1)) - 1
        # reachable[i]: bit t is set if some subset of sizes[i:] has the sum t.
        self.reachable = [1] * (len(self.sizes) + 1)
        for i in range(len(self.sizes) - 1, -1, -1):
            self.reachable[i] = (self.reachable[i + 1] | (self.reachable[i + 1] << self.sizes[i])) & mask

    def totals_before_bounds(self) -> list[int]:
        """The largest sum up to each segment bound and up to the limit, ascending and without 0; then single sizes."""
        totals = []
        bits = self.reachable[0]
        for bound in self.bounds:
            total = (bits & ((1 << (bound + 1)) - 1)).bit_length() - 1
            if total > 0 and (not totals or total > totals[-1]):
                totals.append(total)
        return totals + self.alone

    def members(self, total: int) -> list[int]:
        """The sizes of one subset with the sum ``total``, ascending."""
        if total > self.bounds[-1]:
            return [total]
        members = []
        for i, size in enumerate(self.sizes):
            if total and not (self.reachable[i + 1] >> total) & 1:
                members.append(size)
                total -= size
        return members
