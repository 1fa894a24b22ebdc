"""Merges the segment trees of several ranks into one tree that all of them run.

Ranks that share experts communicate in every layer of every forward and backward, so all of them must run the same ops
in the same order although their segment trees differ. A node of the *merged segment tree* stands for one segment of
each rank, or for an empty segment on a rank that has none there. If segment a is an ancestor of segment b on a rank,
then the node of a is an ancestor of the node of b. Hence every schedule of the merged tree, without its empty segments,
is a valid schedule of each rank's own tree.

Siblings may run in another order than in the stream, and a segment may be below a node whose segment is not its
ancestor; both segments are then in flight. At no node does a rank have more tokens in flight than the budget: the
larger of ``memory_tokens`` and the longest root path of any rank.

Example: rank 0 has segment 0 (4 tokens) with children 1 (3) and 2 (3); rank 1 has segment 0 (4) with child 1 (3).

    node   parent   rank 0   rank 1   tokens
    0          -1        0        0        4
    1           0        2        1        3
    2           0        1    empty        3

A node takes the time of its largest segment, so a tree costs the sum of the largest cost at each node.

How the tree is built: all ranks walk their trees depth first, at the same time, along one path of the merged tree.

1. If nothing is left below the segments at the end of the path, leave that node.
2. Otherwise, the rank with most work left below its segment there opens the next child.
3. Every other rank adds a segment whose parent is open and whose subtree fits into the budget: the largest one whose
   cost is at most the opened subtree's times a factor. A larger one would keep the other ranks waiting.

Several factors are tried, each with the largest or the smallest child first, with costs by tokens and by predicted
time, and the tree of the least time is returned. The result is deterministic, so every rank builds the same tree.

Legend: R ranks, C nodes of the merged tree.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from megatron_dta.core.planning.segments.plan import SegmentTree, path_totals

FACTORS = (0.7, 1.0, 1.5, 4.0, 1e9)


@dataclass(frozen=True, eq=False)
class SegmentForest(SegmentTree):
    """The segments of one rank, as it sends them to the other ranks."""

    segment_parent: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True, eq=False)
class MergedSegmentTree(SegmentTree):
    """The tree that all ranks run.

    Attributes:
        segment_parent: int32 [C], -1 at roots; nodes in preorder.
        segment_of: int32 [R, C], segment of each rank at each node, -1 for an empty one.
        lengths: int64 [C], tokens of the longest segment at each node.
    """

    segment_parent: np.ndarray
    segment_of: np.ndarray
    lengths: np.ndarray

    def largest(self, counts: Sequence[Sequence[int]]) -> np.ndarray:
        """At each node the largest of the ranks' ``counts``, given for each segment of each rank: int64 [C]."""
        return largest_of_ranks(counts, self.segment_of)


def build_merged_segment_tree(
    forests: Sequence[SegmentTree], memory_tokens: int = 0, times: Sequence[Sequence[int]] | None = None
) -> MergedSegmentTree:
    """Build the cheapest merged tree found for the forests of the ranks. Deterministic.

    Args:
        forests: segment forest of each rank.
        memory_tokens: limit on the tokens in flight on a rank; raised to the longest root path of any rank.
        times: predicted time of each segment of each rank, in any unit; None for its tokens.
    """
    kinds = [times] * (times is not None) + [[forest.lengths for forest in forests]]
    by_kind = [[CostedTree(*both) for both in zip(forests, work, strict=True)] for work in kinds]
    trees = by_kind[0]
    budget = max([memory_tokens, *(tree.peak for tree in trees)])
    best: tuple[tuple[int, int], list[int], list[list[int]]] | None = None
    for costed, factor, largest_first in product(by_kind, FACTORS, (True, False)):
        parents, members = _MergedWalk(costed, budget, factor, largest_first).run()
        cost = (
            sum(max(tree.costs[s] for tree, s in zip(trees, node, strict=True) if s >= 0) for node in members),
            len(parents),
        )
        if best is None or cost < best[0]:
            best = cost, parents, members
    _, parents, members = best
    lengths = [max(tree.lengths[s] for tree, s in zip(trees, node, strict=True) if s >= 0) for node in members]
    return MergedSegmentTree(
        np.asarray(parents, dtype=np.int32),
        np.asarray(members, dtype=np.int32).reshape(-1, len(forests)).T,
        np.asarray(lengths, dtype=np.int64),
    )


def largest_of_ranks(counts: Sequence[Sequence[int]], segments: Sequence[np.ndarray]) -> np.ndarray:
    """The largest of the ranks' ``counts`` at their ``segments``, 0 for an empty one (-1): int64 [len(segments[0])]."""
    pairs = zip(counts, segments, strict=True)
    return np.max(
        [np.append(np.asarray(of_rank, dtype=np.int64), 0)[segment_of] for of_rank, segment_of in pairs], axis=0
    )


class CostedTree:
    """The segment tree of a rank, with the cost and height of every subtree.

    A segment costs its ``work``, tokens or predicted time, plus an eighth of the mean, which stands for the time to
    launch a segment.

    Attributes:
        parents, lengths: parent and tokens of each segment.
        costs, subtree_costs: cost of each segment and of its subtree.
        heights: tokens of the longest path down from each segment, with its own.
        children, roots: children of each segment, and the segments without a parent.
        peak: tokens of the longest root path.
    """

    def __init__(self, forest: SegmentTree, work: Sequence[int]) -> None:
        self.parents = [int(parent) for parent in forest.segment_parent]
        self.lengths = [int(length) for length in forest.lengths]
        fixed = int(sum(work)) // (8 * max(1, len(work))) + 1
        self.costs = [int(segment) + fixed for segment in work]
        self.subtree_costs, self.heights = list(self.costs), list(self.lengths)
        self.children: list[list[int]] = [[] for _ in self.parents]
        self.roots = [segment for segment, parent in enumerate(self.parents) if parent < 0]
        for segment in range(len(self.parents) - 1, -1, -1):
            parent = self.parents[segment]
            if parent >= 0:
                self.children[parent].append(segment)
                self.subtree_costs[parent] += self.subtree_costs[segment]
                self.heights[parent] = max(self.heights[parent], self.lengths[parent] + self.heights[segment])
        self.peak = int(path_totals(self.parents, self.lengths).max(initial=0))


class _MergedWalk:
    """Walks all trees at once, with one factor and one order of children."""

    def __init__(self, trees: Sequence[CostedTree], budget: int, factor: float, largest_first: bool) -> None:
        self.trees, self.budget, self.factor, self.largest_first = trees, budget, factor, largest_first
        # For each rank: segments that can begin, sorted by the cost of their subtrees; tokens in flight; and the cost
        # left to run below each segment, with that of the whole forest in the last place (index -1).
        self.ready = [sorted((tree.subtree_costs[root], root) for root in tree.roots) for tree in trees]
        self.in_flight = [0] * len(trees)
        self.left = [
            [cost - node_cost for cost, node_cost in zip(tree.subtree_costs, tree.costs, strict=True)]
            + [sum(tree.costs)]
            for tree in trees
        ]
        self.parents: list[int] = []
        self.members: list[list[int]] = []

    def run(self) -> tuple[list[int], list[list[int]]]:
        """Parent of each node, and the segments of all ranks at each node."""
        path: list[int] = []
        while True:
            top = self.members[path[-1]] if path else [-1] * len(self.trees)
            left = [self.left[r][s] if s >= 0 or not path else 0 for r, s in enumerate(top)]
            if not any(left):
                if not path:
                    return self.parents, self.members
                path.pop()
                for rank, segment in enumerate(top):
                    if segment >= 0:
                        self.in_flight[rank] -= self.trees[rank].lengths[segment]
                continue
            node = self._open(top, left)
            self.parents.append(path[-1] if path else -1)
            path.append(len(self.members))
            self.members.append(node)

    def _open(self, top: list[int], left: list[int]) -> list[int]:
        """Open the next node below ``top`` (steps 2 and 3 of the module) and return the segment of each rank."""
        leader = max(range(len(left)), key=lambda rank: (left[rank], -rank))
        node = [-1] * len(self.trees)
        node[leader] = self._next_child(leader, top[leader])
        target = self.trees[leader].subtree_costs[node[leader]]
        for rank in range(len(self.trees)):
            if rank != leader:
                node[rank] = self._best_fit(rank, int(target * self.factor))
        for rank, segment in enumerate(node):
            if segment >= 0:
                self._begin(rank, segment)
        return node

    def _next_child(self, rank: int, segment: int) -> int:
        """Largest or smallest child of ``segment`` that has not begun; for -1, a root."""
        candidates = [entry for entry in self.ready[rank] if self.trees[rank].parents[entry[1]] == segment]
        return candidates[-1 if self.largest_first else 0][1]

    def _best_fit(self, rank: int, most: int) -> int:
        """Root of the largest subtree of cost at most ``most`` that fits into the budget; -1 if there is none."""
        ready, tree = self.ready[rank], self.trees[rank]
        for i in range(bisect_right(ready, (most, len(tree.parents))) - 1, -1, -1):
            if self.in_flight[rank] + tree.heights[ready[i][1]] <= self.budget:
                return ready[i][1]
        return -1

    def _begin(self, rank: int, segment: int) -> None:
        tree, ready = self.trees[rank], self.ready[rank]
        ready.remove((tree.subtree_costs[segment], segment))
        for child in tree.children[segment]:
            insort(ready, (tree.subtree_costs[child], child))
        self.in_flight[rank] += tree.lengths[segment]
        above = segment
        while above >= 0:
            above = tree.parents[above]
            self.left[rank][above] -= tree.costs[segment]
