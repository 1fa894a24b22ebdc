"""Which segments keep their activations from forward to backward, and which run their forward a second time.

Keeping a segment saves one forward of it and costs its activations for as long as the segment is in flight. In flight
is one root path of the segment tree, so the choice is: as much saved as possible, with no root path holding more of
activations than the budget. Below equal sums the choice falls on the segments near the leaves, whose activations live
shortest.

A segment that runs backward has its activations at that time, kept or not, beside those that its ancestors keep. So a
leaf of the segment tree keeps its own for nothing where its backward is the next op after its forward. On a single
stage that holds for all leaves, and they are always kept. In a pipeline it depends on the schedule and on the stage:
leaves are charged like other segments here, and ``stage_program`` keeps what costs nothing once the ops are known.

There are two accounts of what a path holds. A budget of tokens (``--tree-activation-tokens``) counts the kept segments,
all alike, and the forwards saved by their tokens; a leaf that does not fit beside those above it is there in its
backward all the same, so it is kept too. A budget of memory counts bytes, and weighs forwards by their seconds, which
are more where many ancestors are attended to.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.planning.segments.plan import SegmentPlan

# Above this many (segment, budget left) pairs the exact choice gives way: to "lowest first", exact for equal segments,
# or to lengths in coarser units.
MAX_STATES = 1 << 21
COARSE_STATES = 1 << 16
COARSEST = 24


def choose_kept_segments(plan: SegmentPlan, activation_tokens: int | None, num_stages: int = 1) -> np.ndarray:
    """The segments that keep their activations, by a budget of tokens.

    Args:
        plan: the segments.
        activation_tokens: most tokens in flight at once whose activations are kept; None keeps all, 0 what costs
            nothing.
        num_stages: on a single stage every leaf of the segment tree is kept, whatever the budget.

    Returns:
        bool [num_segments]. The kept tokens on every root path of the segment tree are within the budget, and no other
        choice keeps more (where the exact search would be too large: nearly so). What is kept beyond the budget because
        it costs nothing comes on top.
    """
    if activation_tokens is None or plan.peak_in_flight_tokens <= activation_tokens:
        return np.ones(plan.num_segments, dtype=bool)
    free = is_leaf(plan.segment_parent) & (num_stages == 1)
    search = _Search(plan.segment_parent.tolist(), plan.lengths, np.zeros_like(plan.lengths), plan.lengths)
    if not search.enumerate(activation_tokens, MAX_STATES):
        return _lowest_first(plan, activation_tokens) | free
    return search.best(plan.lengths) | free


def kept_on_stages(kept: np.ndarray, segment_parent: np.ndarray, num_virtual_stages: int) -> np.ndarray:
    """bool [virtual stages, num_segments], what a pipeline's stages keep before their ops are known.

    The last stage has all that a leaf's backward needs when the leaf's forward ends, so schedules run it next there.
    """
    found = np.tile(np.asarray(kept, dtype=bool), (num_virtual_stages, 1))
    found[-1] |= is_leaf(np.asarray(segment_parent))
    return found


def is_leaf(segment_parent: np.ndarray) -> np.ndarray:
    """bool [num_segments], the segments without children."""
    leaf = np.ones(len(segment_parent), dtype=bool)
    leaf[segment_parent[segment_parent >= 0]] = False
    return leaf


def least_activation_tokens(needed: np.ndarray) -> int:
    """The least budget with which ``choose_kept_by_memory`` finds a choice; 0 without segments."""
    return int(needed.max(initial=0))


def choose_kept_by_memory(plan: SegmentPlan, budget_tokens: int, needed: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The segments that keep their activations, by memory, in units of one token's activations.

    Args:
        plan: the segments.
        budget_tokens: what the activations of a path and the room of the running segment may take together.
        needed: int64 [num_segments], what a segment takes while it runs, its activations with the room for its
            backward; not less than its tokens.
        seconds: float64 [num_segments], of each forward.

    Returns:
        bool [num_segments]. For every segment, the tokens of kept segments above it and what it needs itself are
        within the budget, and no other choice saves more seconds (where the exact search would be too large: nearly
        so).

    Raises:
        ValueError: a segment that needs more than the budget.
    """
    if least_activation_tokens(needed) > budget_tokens:
        raise ValueError(f"a segment needs {least_activation_tokens(needed)} tokens, but the budget is {budget_tokens}")
    parents = plan.segment_parent.tolist()
    below = np.zeros(plan.num_segments, dtype=np.int64)  # What the most needy segment below each needs.
    for segment in range(plan.num_segments - 1, -1, -1):
        parent = parents[segment]
        if parent >= 0:
            below[parent] = max(below[parent], below[segment], needed[segment])
    charge = np.where(below > 0, plan.lengths, 0)
    unit = 1
    for _ in range(COARSEST):
        search = _Search(parents, -(-charge // unit), -(-below // unit), -(-needed // unit))
        if search.enumerate(budget_tokens // unit, MAX_STATES if unit == 1 else COARSE_STATES):
            return search.best(seconds)
        # Rounded up against a budget that is rounded down: what fits, fits.
        unit *= 4
        if least_activation_tokens(-(-needed // unit)) > budget_tokens // unit:
            break
    return charge == 0


def _lowest_first(plan: SegmentPlan, activation_tokens: int) -> np.ndarray:
    """Keep each segment that fits over what its subtree keeps already."""
    kept = np.zeros(plan.num_segments, dtype=bool)
    below = [0] * plan.num_segments
    lengths, parents = plan.lengths.tolist(), plan.segment_parent.tolist()
    for segment in range(plan.num_segments - 1, -1, -1):
        if below[segment] + lengths[segment] <= activation_tokens:
            kept[segment] = True
            below[segment] += lengths[segment]
        if parents[segment] >= 0:
            below[parents[segment]] = max(below[parents[segment]], below[segment])
    return kept


class _Search:
    """All budgets that choices above a segment can leave it, and the best choice over them.

    Args:
        parents: segment tree in preorder.
        charge: what a kept segment takes of the budget of those below it.
        reserve: what must be left of it for them; a segment may only be kept where that is so.
        needed: least budget with which a segment can run at all.
    """

    def __init__(self, parents: list[int], charge: np.ndarray, reserve: np.ndarray, needed: np.ndarray) -> None:
        self.parents, self.charge, self.reserve = parents, charge.tolist(), reserve.tolist()
        self.needed = needed.tolist()
        self.budgets: list[np.ndarray] = []

    def enumerate(self, budget: int, most: int) -> bool:
        """Find the budgets of every segment, sorted; False if there are more than ``most``.

        A budget that holds every path of the subtree is as good as any larger one, so it is counted as the largest that
        such a path takes.
        """
        height = list(self.needed)
        for segment in range(len(self.parents) - 1, -1, -1):
            height[segment] = max(height[segment], self.charge[segment])
            parent = self.parents[segment]
            if parent >= 0:
                height[parent] = max(height[parent], self.charge[parent] + height[segment])
        states = 0
        for segment, parent in enumerate(self.parents):
            above = np.asarray([budget]) if parent < 0 else self.budgets[parent]
            if parent >= 0:
                left = above - self.charge[parent]
                above = np.concatenate([above, left[left >= self.reserve[parent]]])
            self.budgets.append(np.unique(np.minimum(above, height[segment])))
            states += len(self.budgets[-1])
            if states > most:
                return False
        return True

    def best(self, values: np.ndarray) -> np.ndarray:
        """The choice of greatest value, bool [segments]: from the leaves up over all budgets, then from the roots."""
        budgets, parents, charge = self.budgets, self.parents, self.charge
        worth = np.asarray(values, dtype=np.float64).tolist()
        # Most value below a segment when it is dropped, and below it when it is kept (negative: it does not fit).
        dropped = [np.zeros(len(budget)) for budget in budgets]
        below_kept = [np.where(budget - charge[s] >= self.reserve[s], 0.0, -np.inf) for s, budget in enumerate(budgets)]
        keeps: list[np.ndarray] = [np.zeros(0, dtype=bool)] * len(parents)
        for segment in range(len(parents) - 1, -1, -1):
            kept = below_kept[segment] + worth[segment]
            keeps[segment] = kept > dropped[segment]
            best = np.maximum(kept, dropped[segment])
            parent = parents[segment]
            if parent >= 0:
                dropped[parent] += best[_at(budgets[segment], budgets[parent])]
                left = budgets[parent] - charge[parent]
                room = left >= self.reserve[parent]
                below_kept[parent][room] += best[_at(budgets[segment], left[room])]
        chosen = np.zeros(len(parents), dtype=bool)
        left_over = [0] * len(parents)
        for segment, parent in enumerate(parents):
            if parent < 0:
                available = int(budgets[segment][-1])
            else:
                available = left_over[parent] - (charge[parent] if chosen[parent] else 0)
            state = int(_at(budgets[segment], np.asarray([available]))[0])
            left_over[segment] = int(budgets[segment][state])
            chosen[segment] = keeps[segment][state]
        return chosen


def _at(budgets: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Index in ``budgets`` of each value, or of the largest budget for values above it."""
    return np.searchsorted(budgets, np.minimum(values, budgets[-1]))
