"""What the walk over a forest chooses from: branches, the children of one that are left, and runs of them.

*Branches* join the single-child nodes of a forest, because the planner only reorders siblings: sequences that end along
a path (one sample per turn) make many nodes but no branches. All values are Python lists, which are read one at a time.

*Siblings* are the children of one branch that are not placed yet, ordered by size, by height and by constraint. The
constraint key is the walk's: the child that comes last in its order is the hardest to place later.

A *run* of subtrees fills segment after segment, so room is wasted only in the last segment. Which subtrees to take is a
subset-sum problem. The reachable sums are the set bits of an integer; adding a subtree is a shift and an OR. Example:
sizes 2, 3 and 6, with 1 token of room in the current segment and 4 in each later one. The sums 5 and 9 end exactly at a
segment's end (1 + 4 and 1 + 4 + 4), and the shortest run is 2 + 3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_dta.core.tree import PrefixTree

# A choice considers this many children from each end of the size order. More cost time and rarely change the choice.
LOOK_AT = 20
# Maximum number of segments that a run of several subtrees may span.
MAX_SEGMENTS = 32


@dataclass(frozen=True)
class Branches:
    """The K branches of a forest in preorder. Entry K of ``depth`` and ``children`` is the root above all trees.

    Attributes:
        length: number of tokens in each branch.
        size: number of tokens in its subtree.
        height: number of tokens on the longest path from its first token to a leaf.
        depth: number of tokens on the path from the root to its last token.
        children: indices of its children.
        node_begin: first node of each branch; its nodes are consecutive.
        node_end: one past its last node.
        node_subtree_end: one past the last node of its subtree.
    """

    length: list[int]
    size: list[int]
    height: list[int]
    depth: list[int]
    children: list[list[int]]
    node_begin: list[int]
    node_end: list[int]
    node_subtree_end: list[int]

    @classmethod
    def of(cls, tree: PrefixTree) -> Branches:
        parent = tree.node_parent.astype(np.int64)
        num_children = np.bincount(parent + 1, minlength=tree.num_nodes + 1)[1:]
        # A parent of -1 indexes the last node, which is a leaf and has no children.
        only_child = (parent >= 0) & (num_children[parent] == 1) if len(parent) else np.zeros(0, dtype=bool)
        begin = np.flatnonzero(~only_child)
        end = np.append(begin[1:], tree.num_nodes)[: len(begin)]
        branch_of_node = np.cumsum(~only_child) - 1
        branch_parent = np.where(parent[begin] < 0, len(begin), branch_of_node[parent[begin]]).tolist()
        subtree_end = tree.node_subtree_end[begin]
        depth = tree.node_position[end - 1].astype(np.int64) + tree.node_lengths[end - 1]
        length = (tree.node_start[end] - tree.node_start[begin]).tolist()

        height = list(length)
        children: list[list[int]] = [[] for _ in range(len(begin) + 1)]
        for branch in range(len(begin) - 1, -1, -1):
            above = branch_parent[branch]
            children[above].append(branch)
            if above < len(begin):
                height[above] = max(height[above], length[above] + height[branch])
        for siblings in children:
            siblings.reverse()
        return cls(
            length=length,
            size=(tree.node_start[subtree_end] - tree.node_start[begin]).tolist(),
            height=height,
            depth=[*depth.tolist(), 0],
            children=children,
            node_begin=begin.tolist(),
            node_end=end.tolist(),
            node_subtree_end=subtree_end.tolist(),
        )

    def __len__(self) -> int:
        return len(self.length)

    def node_order(self, order: Sequence[int], with_subtree: Sequence[bool]) -> np.ndarray:
        """The tree's nodes in this order of branches, int64 [M]: each branch's nodes, or those of its whole subtree."""
        branch = np.asarray(order, dtype=np.int64)
        nodes = np.asarray([self.node_begin, self.node_end, self.node_subtree_end], dtype=np.int64)
        begin, end, subtree_end = nodes[:, branch]
        counts = np.where(np.asarray(with_subtree, dtype=bool), subtree_end, end) - begin
        offsets = np.cumsum(counts) - counts
        return np.repeat(begin - offsets, counts) + np.arange(counts.sum())


class Siblings:
    """The children of one branch that are not placed yet.

    All orders are total, so every choice is reproducible.

    Attributes:
        count: number of remaining children.
        tokens: number of tokens in their subtrees.
    """

    def __init__(
        self,
        children: Sequence[int],
        size: Sequence[int],
        height: Sequence[int],
        constraint: Callable[[int], tuple[float, ...]],
    ) -> None:
        self._size, self._height = size, height
        self._of_size: dict[int, list[int]] = {}
        for child in reversed(children):
            self._of_size.setdefault(size[child], []).append(child)
        self._left_of_size = {tokens: len(group) for tokens, group in self._of_size.items()}
        self._sizes = sorted(self._of_size)
        self._by_height = sorted(children, key=lambda child: (height[child], -child))
        self._by_constraint = sorted(children, key=constraint)
        self._taken: set[int] = set()
        self.count = len(children)
        self.tokens = sum(size[child] for child in children)

    def take(self, child: int) -> None:
        size = self._size[child]
        self._taken.add(child)
        self.count -= 1
        self.tokens -= size
        self._left_of_size[size] -= 1
        if not self._left_of_size[size]:
            del self._sizes[bisect_right(self._sizes, size) - 1]

    def of_size(self, size: int) -> int:
        """A remaining child of exactly ``size`` tokens; one must exist."""
        return self._last_left(self._of_size[size])

    def largest_within(self, limit: int) -> int | None:
        """The largest child of at most ``limit`` tokens, or None."""
        i = bisect_right(self._sizes, limit)
        return self.of_size(self._sizes[i - 1]) if i else None

    def largest(self) -> int:
        return self.of_size(self._sizes[-1])

    def most_constrained(self) -> int:
        """The child with the largest constraint key."""
        return self._last_left(self._by_constraint)

    def tallest_besides(self, child: int) -> int:
        """Height of the tallest remaining child other than ``child``; 0 if there is no other."""
        tallest = self._last_left(self._by_height)
        if tallest != child:
            return self._height[tallest]
        for other in reversed(self._by_height):
            if other != child and other not in self._taken:
                return self._height[other]
        return 0

    def most_constrained_above(self, limit: int) -> int | None:
        """The most constrained child of more than ``limit`` tokens, or None.

        Only the ``LOOK_AT`` most constrained children are considered; if none of them is larger than ``limit``, the
        result is the largest child.
        """
        if self._sizes[-1] <= limit:
            return None
        self._last_left(self._by_constraint)
        for child in self._by_constraint[: -LOOK_AT - 1 : -1]:
            if child not in self._taken and self._size[child] > limit:
                return child
        return self.largest()

    def some_above(self, limit: int) -> list[int]:
        """One child for each size above ``limit`` tokens; if there are too many sizes, the smallest and the largest."""
        i = bisect_right(self._sizes, limit)
        sizes = self._sizes[i:]
        if len(sizes) > LOOK_AT:
            sizes = sizes[: LOOK_AT // 2] + sizes[-LOOK_AT // 2 :]
        return [self.of_size(size) for size in sizes]

    def sizes_within(self, limit: int) -> list[int]:
        """Sizes of the children of at most ``limit`` tokens, ascending.

        If there are too many, the result has the sizes of the smallest and of the largest ones.
        """
        end = bisect_right(self._sizes, limit)
        largest: list[int] = []
        last = end
        while last > 0 and len(largest) < LOOK_AT:
            last -= 1
            largest.extend(self._repeated(self._sizes[last]))
        smallest: list[int] = []
        first = 0
        while first < last and len(smallest) < LOOK_AT:
            smallest.extend(self._repeated(self._sizes[first]))
            first += 1
        return smallest[:LOOK_AT] + largest[:LOOK_AT][::-1]

    def _repeated(self, size: int) -> list[int]:
        return [size] * min(self._left_of_size[size], LOOK_AT)

    def _last_left(self, children: list[int]) -> int:
        """The last remaining child of ``children``; taken children after it are removed from the list."""
        while children[-1] in self._taken:
            children.pop()
        return children[-1]


class Run(NamedTuple):
    """Sizes of the subtrees in a run, and the tokens of room that it leaves in its last segment."""

    sizes: list[int]
    wasted: int


def least_wasteful(sizes: Sequence[int], free: int, segment_tokens: int, limit: int, *, per_token: bool) -> Run | None:
    """Find the run that wastes the least room; of equal runs, the shortest.

    Args:
        sizes: number of tokens in each candidate subtree, ascending.
        free: number of free tokens in the current segment.
        segment_tokens: capacity of the segments that follow.
        limit: maximum number of tokens in the run.
        per_token: whether the waste for each token of the run is compared, rather than the waste.

    Returns:
        The run, or None if every subtree is above the limit.
    """
    sums = _Sums(sizes, free, segment_tokens, limit)
    totals = sums.totals_before_bounds()
    if not totals:
        return None
    wasted = {total: (free - total) % segment_tokens for total in totals}
    total = min(totals, key=lambda total: (wasted[total] / (total if per_token else 1), total))
    return Run(sums.members(total), wasted[total])


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
