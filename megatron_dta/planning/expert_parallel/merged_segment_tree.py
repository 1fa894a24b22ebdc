"""One tree of segments for several ranks that must run in step, each with a tree of its own.

Ranks that share experts meet in every layer of every forward and backward, so all of them must run the same ops in the
same order, though their segment trees differ. The *common tree* holds each rank's tree: a node stands for one segment
of a rank or, where it has none, for an empty one. What a rank's tree has above a segment is above it in the common tree
too, so every schedule of the common tree, with the empty nodes left out, runs the rank's own tree in a right order.
Siblings may run in another order than the stream's, and a segment may lie below one that is no ancestor of its own:
then both are in flight. No rank has more tokens in flight at a node than the budget, the most that any rank's own
depth-first schedule has.

A node takes the largest rank's time, so a tree costs the sum over its nodes of the largest of the ranks' costs there.
How it is built: all ranks walk their trees depth first at once. The top of the common path is closed as soon as all
that is below its segments has run. Otherwise the rank with most left below it opens its next child, and every other
rank joins with a segment that may begin (its parent is open) and whose subtree is the largest that is no larger than
the opened one times some factor: a larger one would keep the others waiting for its end. Several factors are tried, and
the cheapest result wins. Nothing is random: every rank builds the same tree.

Legend: R ranks, C common nodes.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

FACTORS = (0.7, 1.0, 1.5, 4.0, 1e9)


@dataclass(frozen=True)
class SegmentForest:
    """What a rank tells the others of its segments.

    Attributes:
        segment_parent: the parent of each segment, -1 at roots; segments in preorder.
        lengths: tokens of each segment.
    """

    segment_parent: Sequence[int]
    lengths: Sequence[int]


@dataclass(frozen=True, eq=False)
class MergedSegmentTree:
    """The tree that all ranks run; named like a ``SegmentPlan``, so schedules are made of either.

    Attributes:
        segment_parent: int32 [C], -1 at roots; nodes in preorder.
        segment_of: int32 [R, C], each rank's segment at a node, -1 where it has none.
        lengths: int64 [C], tokens of the largest of the segments at a node.
    """

    segment_parent: np.ndarray
    segment_of: np.ndarray
    lengths: np.ndarray

    @property
    def num_segments(self) -> int:
        """Number of nodes."""
        return len(self.segment_parent)

    @cached_property
    def peak_in_flight_tokens(self) -> int:
        """Most tokens on a root path, counting the largest segment of every node: no rank has more in flight."""
        return int(_path_totals(self.segment_parent.tolist(), self.lengths.tolist()).max(initial=0))


def build_merged_segment_tree(forests: Sequence[SegmentForest], memory_tokens: int = 0) -> MergedSegmentTree:
    """The common tree of the ranks' forests; the same for the same forests, wherever it is built."""
    walks = [SegmentTree(forest) for forest in forests]
    budget = max([memory_tokens, *(walk.peak for walk in walks)])
    best: tuple[tuple[int, int], list[int], list[list[int]]] | None = None
    for factor in FACTORS:
        for largest_first in (True, False):
            parents, members = _Zip(walks, budget, factor, largest_first).run()
            cost = (
                sum(max(walk.costs[s] for walk, s in zip(walks, node, strict=True) if s >= 0) for node in members),
                len(parents),
            )
            if best is None or cost < best[0]:
                best = cost, parents, members
    _, parents, members = best
    lengths = [max(walk.lengths[s] for walk, s in zip(walks, node, strict=True) if s >= 0) for node in members]
    return MergedSegmentTree(
        np.asarray(parents, dtype=np.int32),
        np.asarray(members, dtype=np.int32).reshape(-1, len(forests)).T,
        np.asarray(lengths, dtype=np.int64),
    )


def _path_totals(parents: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    totals = list(lengths)
    for segment, parent in enumerate(parents):
        if parent >= 0:
            totals[segment] += totals[parent]
    return np.asarray(totals, dtype=np.int64)


class SegmentTree:
    """A rank's tree with what its subtrees cost and hold.

    A segment costs its tokens and, as it is not for nothing to run one at all, a share of the mean length.
    """

    def __init__(self, forest: SegmentForest) -> None:
        self.parents = [int(parent) for parent in forest.segment_parent]
        self.lengths = [int(length) for length in forest.lengths]
        least = sum(self.lengths) // (8 * max(1, len(self.lengths))) + 1
        self.costs = [length + least for length in self.lengths]
        self.subtree_costs, self.heights = list(self.costs), list(self.lengths)
        self.children: list[list[int]] = [[] for _ in self.parents]
        self.roots = [segment for segment, parent in enumerate(self.parents) if parent < 0]
        for segment in range(len(self.parents) - 1, -1, -1):
            parent = self.parents[segment]
            if parent >= 0:
                self.children[parent].append(segment)
                self.subtree_costs[parent] += self.subtree_costs[segment]
                self.heights[parent] = max(self.heights[parent], self.lengths[parent] + self.heights[segment])
        self.peak = int(_path_totals(self.parents, self.lengths).max(initial=0))


class _Zip:
    """One way to walk all trees at once."""

    def __init__(self, walks: Sequence[SegmentTree], budget: int, factor: float, largest_first: bool) -> None:
        self.walks, self.budget, self.factor, self.largest_first = walks, budget, factor, largest_first
        # Of each rank: segments that may begin, sorted by the cost of their subtrees; tokens in flight; and for every
        # segment the cost of what is left to run below it, for the last place that of the whole forest.
        self.ready = [sorted((walk.subtree_costs[root], root) for root in walk.roots) for walk in walks]
        self.in_flight = [0] * len(walks)
        self.left = [
            [cost - own for cost, own in zip(walk.subtree_costs, walk.costs, strict=True)] + [sum(walk.costs)]
            for walk in walks
        ]
        self.parents: list[int] = []
        self.members: list[list[int]] = []

    def run(self) -> tuple[list[int], list[list[int]]]:
        """Parents of the common nodes, and each rank's segment at each."""
        path: list[int] = []
        while True:
            top = self.members[path[-1]] if path else [-1] * len(self.walks)
            left = [self.left[r][s] if s >= 0 or not path else 0 for r, s in enumerate(top)]
            if not any(left):
                if not path:
                    return self.parents, self.members
                path.pop()
                for rank, segment in enumerate(top):
                    if segment >= 0:
                        self.in_flight[rank] -= self.walks[rank].lengths[segment]
                continue
            node = self._open(top, left)
            self.parents.append(path[-1] if path else -1)
            path.append(len(self.members))
            self.members.append(node)

    def _open(self, top: list[int], left: list[int]) -> list[int]:
        """The segment of each rank at the next node below ``top``, begun; see the top of the file."""
        leader = max(range(len(left)), key=lambda rank: (left[rank], -rank))
        node = [-1] * len(self.walks)
        node[leader] = self._next_child(leader, top[leader])
        target = self.walks[leader].subtree_costs[node[leader]]
        for rank in range(len(self.walks)):
            if rank != leader:
                node[rank] = self._best_fit(rank, int(target * self.factor))
        for rank, segment in enumerate(node):
            if segment >= 0:
                self._begin(rank, segment)
        return node

    def _next_child(self, rank: int, segment: int) -> int:
        """The child of ``segment`` (or the root, for -1) that has not begun, the largest or the smallest."""
        candidates = [entry for entry in self.ready[rank] if self.walks[rank].parents[entry[1]] == segment]
        return candidates[-1 if self.largest_first else 0][1]

    def _best_fit(self, rank: int, most: int) -> int:
        """The largest subtree of cost ``most`` or less that may begin within the budget, -1 if there is none."""
        ready, walk = self.ready[rank], self.walks[rank]
        for i in range(bisect_right(ready, (most, len(walk.parents))) - 1, -1, -1):
            if self.in_flight[rank] + walk.heights[ready[i][1]] <= self.budget:
                return ready[i][1]
        return -1

    def _begin(self, rank: int, segment: int) -> None:
        walk, ready = self.walks[rank], self.ready[rank]
        ready.remove((walk.subtree_costs[segment], segment))
        for child in walk.children[segment]:
            insort(ready, (walk.subtree_costs[child], child))
        self.in_flight[rank] += walk.lengths[segment]
        above = segment
        while above >= 0:
            above = walk.parents[above]
            self.left[rank][above] -= walk.costs[segment]
