"""Chooses which segments keep their activations from forward to backward, and which run their forward again.

Keeping a segment saves one of its forwards and costs the memory of its activations while the segment is in flight. The
segments in flight are one root path of the segment tree. So the choice maximizes the saved work, subject to the
activations on every root path fitting into the budget. Of equally good choices, it keeps the segments near the leaves,
whose activations live shortest.

A segment in its backward holds its own activations, kept or recomputed, in addition to those that its ancestors keep.
Keeping a leaf of the segment tree is therefore free if its backward is the next op after its forward. On a single stage
that holds for all leaves, and they are always kept. In a pipeline it depends on the schedule and on the stage. This
module charges leaves like other segments there, and ``plan_training_pass`` keeps the free ones once the ops are known.

There are two kinds of budget. A budget of tokens (``--tree-activation-tokens``) counts the tokens of kept segments, and
also measures the saved forwards in tokens; it keeps leaves that do not fit if they are free. A budget of memory counts
bytes and measures forwards in seconds, which grow with the number of attended ancestors.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.core.planning.segments.plan import SegmentPlan

# Most (segment, remaining budget) pairs of the exact search. Above it, a budget of tokens is spent from the leaves up
# (exact for segments of equal length), and a budget of memory is searched in coarser units.
MAX_STATES = 1 << 21
COARSE_STATES = 1 << 16
COARSEST = 24


def choose_kept_segments(plan: SegmentPlan, activation_tokens: int | None, num_stages: int = 1) -> np.ndarray:
    """Choose the segments that keep their activations, within a budget of tokens.

    Args:
        plan: the segments.
        activation_tokens: maximum number of tokens in flight whose activations are kept. None keeps all segments; 0
            keeps only those that are free.
        num_stages: number of pipeline stages. On a single stage every leaf of the segment tree is kept.

    Returns:
        bool [num_segments]. The kept tokens on every root path of the segment tree are within the budget, not counting
        free leaves. No other choice keeps more tokens; if the exact search would be too large, the choice is
        approximate.
    """
    if activation_tokens is None or plan.peak_in_flight_tokens <= activation_tokens:
        return np.ones(plan.num_segments, dtype=bool)
    free = is_leaf(plan.segment_parent) & (num_stages == 1)
    search = _Search(plan.segment_parent.tolist(), plan.lengths, np.zeros_like(plan.lengths), plan.lengths)
    if not search.enumerate(activation_tokens, MAX_STATES):
        return _lowest_first(plan, activation_tokens) | free
    return search.best(plan.lengths) | free


def kept_on_stages(kept: np.ndarray, segment_parent: np.ndarray, num_virtual_stages: int) -> np.ndarray:
    """The segments that each pipeline stage keeps, before its ops are known: bool [virtual stages, num_segments].

    The last stage can run a leaf's backward right after its forward, and schedules do so, so leaves are free there.
    """
    on_stages = np.tile(np.asarray(kept, dtype=bool), (num_virtual_stages, 1))
    on_stages[-1] |= is_leaf(np.asarray(segment_parent))
    return on_stages


def is_leaf(segment_parent: np.ndarray) -> np.ndarray:
    """Whether each segment has no children, bool [num_segments]."""
    leaf = np.ones(len(segment_parent), dtype=bool)
    leaf[segment_parent[segment_parent >= 0]] = False
    return leaf


def choose_kept_by_memory(
    plan: SegmentPlan,
    budget_tokens: int,
    needed: np.ndarray,
    seconds: np.ndarray,
    kept_tokens: np.ndarray | None = None,
) -> np.ndarray:
    """Choose the segments that keep their activations, by memory in units of one token's activations.

    Args:
        plan: the segments.
        budget_tokens: limit on the activations of a path plus the working memory of the running segment.
        needed: int64 [num_segments], memory that a segment needs while it runs: its activations and the working memory
            of its backward. Not less than its tokens.
        seconds: float64 [num_segments], time of each forward.
        kept_tokens: int64 [num_segments], what keeping a segment takes, in the same units; None for its tokens.

    Returns:
        bool [num_segments]. For every segment, the tokens of its kept ancestors plus what it needs itself are within
        the budget. No other choice saves more seconds; if the exact search would be too large, the choice is
        approximate.

    Raises:
        ValueError: a segment needs more than the budget.
    """
    most = int(needed.max(initial=0))
    if most > budget_tokens:
        raise ValueError(f"a segment needs {most} tokens, but the budget is {budget_tokens}")
    parents = plan.segment_parent.tolist()
    below = np.zeros(plan.num_segments, dtype=np.int64)  # Largest need of a descendant of each segment.
    for segment in range(plan.num_segments - 1, -1, -1):
        parent = parents[segment]
        if parent >= 0:
            below[parent] = max(below[parent], below[segment], needed[segment])
    charge = np.where(below > 0, plan.lengths if kept_tokens is None else kept_tokens, 0)
    unit = 1
    for _ in range(COARSEST):
        search = _Search(parents, -(-charge // unit), -(-below // unit), -(-needed // unit))
        if search.enumerate(budget_tokens // unit, MAX_STATES if unit == 1 else COARSE_STATES):
            return search.best(seconds)
        # Needs are rounded up and the budget is rounded down, so every choice fits the exact budget.
        unit *= 4
        if -(-most // unit) > budget_tokens // unit:
            break
    return charge == 0


def _lowest_first(plan: SegmentPlan, activation_tokens: int) -> np.ndarray:
    """From the leaves up, keep each segment that fits together with the kept segments of its subtree."""
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
    """Dynamic program over (segment, remaining budget) pairs.

    ``enumerate`` finds the budgets that the choices above a segment can leave it; ``best`` finds the best choice.

    Args:
        parents: the segment tree in preorder.
        charge: budget that a kept segment takes from its descendants.
        reserve: budget that must remain for the descendants of a kept segment.
        needed: smallest budget with which a segment can run.
    """

    def __init__(self, parents: list[int], charge: np.ndarray, reserve: np.ndarray, needed: np.ndarray) -> None:
        self.parents, self.charge, self.reserve = parents, charge.tolist(), reserve.tolist()
        self.needed = needed.tolist()
        self.budgets: list[np.ndarray] = []

    def enumerate(self, budget: int, most: int) -> bool:
        """Find the possible budgets of every segment, sorted. Return False if there are more than ``most`` in total.

        Budgets that cover every path of the subtree are equivalent, so they are clipped to the height of the subtree.
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
        """The choice of greatest value, bool [segments]: values from the leaves up, then choices from the roots."""
        budgets, parents, charge = self.budgets, self.parents, self.charge
        worth = np.asarray(values, dtype=np.float64).tolist()
        # Greatest value below a segment if it is dropped, and if it is kept (-inf: keeping it does not fit).
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
                fits = left >= self.reserve[parent]
                below_kept[parent][fits] += best[_at(budgets[segment], left[fits])]
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
