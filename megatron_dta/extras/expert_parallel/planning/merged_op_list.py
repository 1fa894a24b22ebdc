"""Builds one list of forwards and backwards for ranks that share experts, each with its own segment tree.

Ranks that share experts communicate in every layer of every op, so op k of the list is a forward on all ranks or a
backward on all ranks. In a forward, a rank runs any segment whose parent is in flight; in a backward, any segment in
flight without children in flight or to come. A rank without such a segment runs an empty one.

A backward can use the activations of a forward only if all ranks kept theirs: the activations that a rank computed for
another rank's tokens belong to the forward of its own segment at that op. A backward therefore recomputes its forward,
unless it directly follows the forward of the same segments on all ranks.

The alternative, a merged segment tree (``merged_segment_tree``), runs the same segments together in forward and
backward, so it can keep activations. But a rank whose branch has ended waits for the branches of the others, and for
trees of different shapes most of its nodes are empty. ``synchronized_plan`` takes the cheaper of the two.

Example: the lengths are in parentheses, and each segment costs its length plus 1 (see ``CostedTree``).

    rank 0: segment 0 (4) with children 1 (3) and 2 (3)    rank 1: segment 0 (4) with child 1 (3)

    op         rank 0   rank 1   cost
    forward         0        0   5
    forward         2        1   4
    backward        2        1   8    the same segments as in the op before: twice the forward
    forward         1    empty   4
    backward        1        0   15   recomputes its forward: three times the largest segment, 5
    backward        0    empty   15

The list costs 51.

How the list is built: a greedy pass compares the next forward with the next backward and takes the one that leaves the
ranks less idle. The use of an op is its total cost over (ranks x its largest cost); that of a backward is multiplied by
a weight.

1. Forward: each rank begins a segment whose parent is in flight if the segment's whole subtree fits into the rank's
   budget of in-flight tokens. The last segment begun can then always be finished first, and the budget always holds.
2. Backward: each rank ends its largest segment that has no child left, or an empty segment in flight. A backward is
   possible only if every rank has one of the two.

The pass runs with several orders of beginning segments and several weights; the cheapest list is returned. The result
is deterministic, so every rank builds the same list.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dta.core.planning.segments.plan import SegmentTree
from megatron_dta.extras.expert_parallel.planning.merged_segment_tree import CostedTree, MergedSegmentTree

# Which of the segments that fit a rank begins first, and the weights of a backward's use against a forward's.
_ORDERS: dict[str, Callable[[CostedTree, int], int]] = {
    "last": lambda tree, segment: segment,
    "first": lambda tree, segment: -segment,
    "deepest below": lambda tree, segment: tree.heights[segment],
    "most below": lambda tree, segment: tree.subtree_costs[segment],
}
_WEIGHTS = (0.7, 1.0, 1.5)


@dataclass(frozen=True)
class MergedOp:
    """One op that all ranks run together.

    Attributes:
        is_backward: whether the op is a backward.
        segments: segment of each rank, -1 for an empty one.
        recomputes: whether this is a backward that recomputes its forward.
    """

    is_backward: bool
    segments: tuple[int, ...]
    recomputes: bool = False


@dataclass(frozen=True)
class MergedOpList:
    """Ops in order. An op costs the time of its largest segment; ``cost`` is the sum."""

    ops: list[MergedOp]
    cost: int


# Time of each op over the cost of its largest segment; the last is a backward that recomputes its forward.
FORWARD, BACKWARD, RECOMPUTING_BACKWARD = 1, 2, 3


def build_merged_op_list(forests: Sequence[SegmentTree], memory_tokens: int = 0) -> MergedOpList:
    """Build the cheapest list found for the forests of the ranks. Deterministic.

    Args:
        forests: segment forest of each rank.
        memory_tokens: limit on the tokens in flight on a rank; raised to the longest root path of any rank.
    """
    trees = [CostedTree(forest) for forest in forests]
    budget = max([memory_tokens, *(tree.peak for tree in trees)])
    lists = (_Builder(trees, budget, order, weight).build() for order in _ORDERS.values() for weight in _WEIGHTS)
    return min(lists, key=lambda op_list: (op_list.cost, len(op_list.ops)))


def cheaper_op_list(
    tree: MergedSegmentTree, forests: Sequence[SegmentTree], kept: np.ndarray | None, memory_tokens: int
) -> MergedOpList | None:
    """The list of ops for the forests of the ranks if it costs less than their merged segment tree, else None.

    Args:
        kept: bool [C], nodes of the tree that keep their activations; None if the tree needs too much memory.
        memory_tokens: see ``build_merged_op_list``.
    """
    if len(forests) == 1 or not tree.num_segments:
        return None
    op_list = build_merged_op_list(forests, memory_tokens)
    if kept is None:
        return op_list
    largest = tree.largest([CostedTree(forest).costs for forest in forests])
    of_tree = int((largest * (FORWARD + np.where(kept, BACKWARD, RECOMPUTING_BACKWARD))).sum())
    return op_list if op_list.cost < of_tree else None


class _Rank:
    """State of one rank while a list is built."""

    def __init__(self, tree: CostedTree, order: Callable[[CostedTree, int], int]) -> None:
        self.tree, self._order = tree, order
        # Segments that can begin and segments that can end, sorted; the last one is tried first.
        self._can_begin = sorted((order(tree, root), root) for root in tree.roots)
        self._can_end: list[tuple[int, int]] = []
        self._children_left = [len(children) for children in tree.children]
        self.in_flight = self.num_empty = 0
        self.num_left = len(tree.parents)

    def next_to_begin(self, budget: int) -> int:
        """Next segment to begin; -1 if no segment can begin within the budget."""
        for _, segment in reversed(self._can_begin):
            if self.in_flight + self.tree.heights[segment] <= budget:
                return segment
        return -1

    def next_to_end(self) -> int:
        """Next segment to end; -1 if there is none."""
        return self._can_end[-1][1] if self._can_end else -1

    def begin(self, segment: int) -> None:
        if segment < 0:
            self.num_empty += 1
            return
        entry = (self._order(self.tree, segment), segment)
        del self._can_begin[bisect_left(self._can_begin, entry)]
        for child in self.tree.children[segment]:
            insort(self._can_begin, (self._order(self.tree, child), child))
        self.in_flight += self.tree.lengths[segment]
        if not self._children_left[segment]:
            insort(self._can_end, (self.tree.costs[segment], segment))

    def end(self, segment: int) -> None:
        if segment < 0:
            self.num_empty -= 1
            return
        self._can_end.pop()
        self.in_flight -= self.tree.lengths[segment]
        self.num_left -= 1
        parent = self.tree.parents[segment]
        if parent >= 0:
            self._children_left[parent] -= 1
            if not self._children_left[parent]:
                insort(self._can_end, (self.tree.costs[parent], parent))


class _Builder:
    """Builds one list, with one order of beginning segments and one weight."""

    def __init__(
        self, trees: Sequence[CostedTree], budget: int, order: Callable[[CostedTree, int], int], weight: float
    ) -> None:
        self._ranks = [_Rank(tree, order) for tree in trees]
        self._budget, self._weight = budget, weight

    def build(self) -> MergedOpList:
        ops: list[MergedOp] = []
        cost = 0
        while any(rank.num_left or rank.num_empty for rank in self._ranks):
            op, largest = self._next()
            for rank, segment in zip(self._ranks, op.segments, strict=True):
                (rank.end if op.is_backward else rank.begin)(segment)
            if op.is_backward and not (ops and ops[-1] == MergedOp(False, op.segments)):
                op = replace(op, recomputes=True)
            ops.append(op)
            cost += largest * (RECOMPUTING_BACKWARD if op.recomputes else BACKWARD if op.is_backward else FORWARD)
        return MergedOpList(ops, cost)

    def _next(self) -> tuple[MergedOp, int]:
        """The next op and the cost of its largest segment."""
        begun = [rank.next_to_begin(self._budget) for rank in self._ranks]
        ended = [rank.next_to_end() for rank in self._ranks]
        forward, backward = self._costs(begun), self._costs(ended)
        all_can_end = all(segment >= 0 or rank.num_empty for rank, segment in zip(self._ranks, ended, strict=True))
        if all_can_end and self._use(backward) * self._weight >= self._use(forward):
            return MergedOp(True, tuple(ended)), max(backward)
        # If no rank can begin a segment, all run an empty one, which makes a backward possible.
        return MergedOp(False, tuple(begun)), max(forward)

    def _costs(self, segments: Sequence[int]) -> list[int]:
        pairs = zip(self._ranks, segments, strict=True)
        return [rank.tree.costs[segment] if segment >= 0 else 0 for rank, segment in pairs]

    @staticmethod
    def _use(costs: Sequence[int]) -> float:
        """Share of the ranks' time that an op uses."""
        return sum(costs) / (max(costs) * len(costs)) if max(costs) else 0.0
