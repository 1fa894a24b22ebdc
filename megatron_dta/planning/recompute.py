"""Which segments keep their activations from forward to backward, and which run their forward a second time.

Keeping a segment saves one forward of its tokens and costs their activations for as long as the segment is in flight.
In
flight is one root path of the segment tree, so the choice is: as many kept tokens as possible, with no root path
holding more of them than the budget. Below equal sums the choice falls on the segments near the leaves, whose
activations live shortest.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.planning.segment_plan import SegmentPlan

# Above this many (segment, budget left) pairs the exact choice gives way to "lowest first", exact for equal segments.
MAX_STATES = 1 << 21


def choose_kept_segments(plan: SegmentPlan, activation_tokens: int | None) -> np.ndarray:
    """The segments that keep their activations.

    Args:
        plan: the segments.
        activation_tokens: most tokens in flight at once whose activations are kept; None keeps all, 0 none.

    Returns:
        bool [num_segments]. The kept tokens on every root path of the segment tree are within the budget, and no other
        choice keeps more (where the exact search would be too large: nearly so).
    """
    if activation_tokens is None or plan.peak_in_flight_tokens <= activation_tokens:
        return np.ones(plan.num_segments, dtype=bool)
    budgets = _reachable_budgets(plan, activation_tokens)
    return _lowest_first(plan, activation_tokens) if budgets is None else _most_tokens(plan, budgets)


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


def _reachable_budgets(plan: SegmentPlan, activation_tokens: int) -> list[np.ndarray] | None:
    """For each segment, sorted, what the choices above it can leave of the budget; None if that is too much to search.

    A budget that holds every path of the subtree is as good as any larger one, so it is counted as the longest such
    path.
    """
    lengths, parents = plan.lengths.tolist(), plan.segment_parent.tolist()
    height = list(lengths)
    for segment in range(plan.num_segments - 1, -1, -1):
        parent = parents[segment]
        if parent >= 0:
            height[parent] = max(height[parent], lengths[parent] + height[segment])
    budgets: list[np.ndarray] = []
    states = 0
    for segment in range(plan.num_segments):
        parent = parents[segment]
        above = np.asarray([activation_tokens]) if parent < 0 else budgets[parent]
        if parent >= 0:
            above = np.concatenate([above, above[above >= lengths[parent]] - lengths[parent]])
        budgets.append(np.unique(np.minimum(above, height[segment])))
        states += len(budgets[-1])
        if states > MAX_STATES:
            return None
    return budgets


def _most_tokens(plan: SegmentPlan, budgets: list[np.ndarray]) -> np.ndarray:
    """The best choice over all budgets left, from the leaves up; then the choice itself from the roots down."""
    lengths, parents = plan.lengths.tolist(), plan.segment_parent.tolist()
    # Most tokens kept below a segment when it is dropped, and below it when it is kept (-1: it does not fit).
    dropped = [np.zeros(len(budget), dtype=np.int64) for budget in budgets]
    below_kept = [np.where(budget >= length, 0, -1) for budget, length in zip(budgets, lengths, strict=True)]
    keeps: list[np.ndarray] = [np.zeros(0, dtype=bool)] * plan.num_segments
    for segment in range(plan.num_segments - 1, -1, -1):
        fits = below_kept[segment] >= 0
        kept = np.where(fits, below_kept[segment] + lengths[segment], -1)
        keeps[segment] = kept > dropped[segment]
        best = np.maximum(kept, dropped[segment])
        parent = parents[segment]
        if parent >= 0:
            dropped[parent] += best[_at(budgets[segment], budgets[parent])]
            left = budgets[parent] - lengths[parent]
            room = left >= 0
            below_kept[parent][room] += best[_at(budgets[segment], left[room])]
    chosen = np.zeros(plan.num_segments, dtype=bool)
    left = [0] * plan.num_segments
    for segment in range(plan.num_segments):
        parent = parents[segment]
        if parent < 0:
            available = int(budgets[segment][-1])
        else:
            available = left[parent] - (lengths[parent] if chosen[parent] else 0)
        state = int(_at(budgets[segment], np.asarray([available]))[0])
        left[segment] = int(budgets[segment][state])
        chosen[segment] = keeps[segment][state]
    return chosen


def _at(budgets: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Index in ``budgets`` of each value, or of the largest budget for values above it."""
    return np.searchsorted(budgets, np.minimum(values, budgets[-1]))
