"""One list of forwards and backwards for several ranks that must run in step, each with a tree of its own.

Ranks that share experts meet in every layer of every op, so the k-th op is a forward on all of them or a backward on
all of them. Where a backward runs its forward again, no more than that must be alike: what a rank runs in a *slot* is
its own choice among its segments that may run, and where it has none it runs an empty segment. Only a backward slot of
the same segments as the forward slot right before it needs no second forward on any rank. A common tree
(``merged_segment_tree``) asks for more: that whoever runs together forward runs together backward. It must where
activations are kept, because what a rank has computed for another's tokens in a forward hangs on its own segment of
that forward. But it keeps a rank whose branch has ended waiting for the others' branches, and where the ranks' trees
have other shapes most of its nodes are empty, so that running all forwards twice may still be faster (``lockstep``
compares).

A slot takes as long as its largest segment. The next slot is a backward if that is what more of the ranks' time is used
by, weighted; else a forward. In a forward a rank begins a segment whose parent is in flight, if the whole branch below
it would still fit into the rank's budget of tokens: so a rank can always finish what it has begun, the last begun
first, and never has more in flight. In a backward it takes the largest segment that nothing waits for any more, or an
empty one that is in flight; where a rank has neither, there can be no backward yet. Which of several segments is begun,
and the weight, are tried in a few combinations; the cheapest list wins. Nothing is random: every rank builds the same.

Tokens of all slots over those of the busiest rank, of 12 sets of rollouts over 8 data-parallel ranks with the default
budget: at EP 8 between 1.02 and 1.58, on common trees 1.05 to 2.43 (tau1_retail_5x115: 1.07 and 2.43); at EP 2 between
1.01 and 1.13, on common trees 1.01 to 1.47.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_dta.planning.expert_parallel.merged_segment_tree import SegmentForest, SegmentTree

# What a rank begins first, of what fits; and how much the use of a backward weighs against that of a forward.
_ORDERS: dict[str, Callable[[SegmentTree, int], int]] = {
    "last": lambda tree, segment: segment,
    "first": lambda tree, segment: -segment,
    "deepest below": lambda tree, segment: tree.heights[segment],
    "most below": lambda tree, segment: tree.subtree_costs[segment],
}
_WEIGHTS = (0.7, 1.0, 1.5)


@dataclass(frozen=True)
class Slot:
    """One op of all ranks.

    Attributes:
        is_backward: what all of them run.
        segments: each rank's segment, -1 where it runs an empty one.
        runs_again: whether it is a backward that runs its forward again.
    """

    is_backward: bool
    segments: tuple[int, ...]
    runs_again: bool = False


@dataclass(frozen=True)
class MergedOpList:
    """Slots in order, and what they cost: the times of their largest segments."""

    slots: list[Slot]
    cost: int


# A segment's forward takes its cost, its backward twice that, and the forward in it once more.
FORWARD, BACKWARD, BACKWARD_AGAIN = 1, 2, 3


def build_merged_op_list(forests: Sequence[SegmentForest], memory_tokens: int = 0) -> MergedOpList:
    """The cheapest list found for the ranks' forests; the same for the same forests, wherever it is built.

    Args:
        memory_tokens: most tokens that a rank may have in flight, or what its deepest path has if that is more.
    """
    trees = [SegmentTree(forest) for forest in forests]
    budget = max([memory_tokens, *(tree.peak for tree in trees)])
    lists = (_Run(trees, budget, order, weight).slots() for order in _ORDERS.values() for weight in _WEIGHTS)
    return min(lists, key=lambda found: (found.cost, len(found.slots)))


class _Rank:
    """What of a rank's tree has run."""

    def __init__(self, tree: SegmentTree, order: Callable[[SegmentTree, int], int]) -> None:
        self.tree, self._order = tree, order
        # Segments that may begin, and such that may end, sorted: the last is tried first.
        self._ready = sorted((order(tree, root), root) for root in tree.roots)
        self._ending: list[tuple[int, int]] = []
        self._children_left = [len(children) for children in tree.children]
        self.in_flight = self.empty = 0
        self.left = len(tree.parents)

    def to_begin(self, budget: int) -> int:
        """The segment that is begun next, -1 if none may be or fits."""
        for _, segment in reversed(self._ready):
            if self.in_flight + self.tree.heights[segment] <= budget:
                return segment
        return -1

    def to_end(self) -> int:
        """The segment whose backward is next, -1 if there is none."""
        return self._ending[-1][1] if self._ending else -1

    def begin(self, segment: int) -> None:
        if segment < 0:
            self.empty += 1
            return
        entry = (self._order(self.tree, segment), segment)
        del self._ready[bisect_left(self._ready, entry)]
        for child in self.tree.children[segment]:
            insort(self._ready, (self._order(self.tree, child), child))
        self.in_flight += self.tree.lengths[segment]
        if not self._children_left[segment]:
            insort(self._ending, (self.tree.costs[segment], segment))

    def end(self, segment: int) -> None:
        if segment < 0:
            self.empty -= 1
            return
        self._ending.pop()
        self.in_flight -= self.tree.lengths[segment]
        self.left -= 1
        parent = self.tree.parents[segment]
        if parent >= 0:
            self._children_left[parent] -= 1
            if not self._children_left[parent]:
                insort(self._ending, (self.tree.costs[parent], parent))


class _Run:
    """One way to make the list."""

    def __init__(
        self,
        trees: Sequence[SegmentTree],
        budget: int,
        order: Callable[[SegmentTree, int], int],
        weight: float,
    ) -> None:
        self._ranks = [_Rank(tree, order) for tree in trees]
        self._budget, self._weight = budget, weight

    def slots(self) -> MergedOpList:
        found: list[Slot] = []
        cost = 0
        while any(rank.left or rank.empty for rank in self._ranks):
            slot, largest = self._next()
            for rank, segment in zip(self._ranks, slot.segments, strict=True):
                (rank.end if slot.is_backward else rank.begin)(segment)
            if slot.is_backward and not (found and found[-1] == Slot(False, slot.segments)):
                slot = replace(slot, runs_again=True)
            found.append(slot)
            cost += largest * (BACKWARD_AGAIN if slot.runs_again else BACKWARD if slot.is_backward else FORWARD)
        return MergedOpList(found, cost)

    def _next(self) -> tuple[Slot, int]:
        """The next slot and its largest segment's cost."""
        begun = [rank.to_begin(self._budget) for rank in self._ranks]
        ended = [rank.to_end() for rank in self._ranks]
        forward, backward = self._costs(begun), self._costs(ended)
        may_end = all(segment >= 0 or rank.empty for rank, segment in zip(self._ranks, ended, strict=True))
        if may_end and self._use(backward) * self._weight >= self._use(forward):
            return Slot(True, tuple(ended)), max(backward)
        # Without a segment for any rank: an empty one for all, after which a backward may be.
        return Slot(False, tuple(begun)), max(forward)

    def _costs(self, segments: Sequence[int]) -> list[int]:
        pairs = zip(self._ranks, segments, strict=True)
        return [rank.tree.costs[segment] if segment >= 0 else 0 for rank, segment in pairs]

    @staticmethod
    def _use(costs: Sequence[int]) -> float:
        """Which part of the ranks' time a slot uses."""
        return sum(costs) / (max(costs) * len(costs)) if max(costs) else 0.0
