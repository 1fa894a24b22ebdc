"""Puts segments of few tokens into their neighbours.

A forward takes what the host needs to launch it, however short it is. Where a cut leaves a segment of a few tokens, the
one before or after it in the stream can take them, if it may be a little longer than the others. Any cut of the stream
is a valid plan; only what is in flight changes, and that stays within its budget.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.planning.segments.plan import SegmentPlan, segment_parents

# A segment may be longer by this part, and so many pairs of neighbours are tried, those with the shortest first.
LONGER = 1 / 16
TRIED = 32


def merge_small_segments(plan: SegmentPlan, memory_tokens: int) -> SegmentPlan:
    """``plan`` with neighbours merged that together are no longer than its segments may be, or a little longer.

    Args:
        plan: the segments; the result's ``segment_tokens`` are more than its where a segment is.
        memory_tokens: most tokens in flight; a plan that has more may keep as many.
    """
    limit = int(plan.segment_tokens * (1 + LONGER))
    most = max(memory_tokens, plan.peak_in_flight_tokens)
    for _ in range(TRIED):
        merged = _merge_one(plan, limit, most)
        if merged is None:
            break
        plan = merged
    longest = int(plan.lengths.max(initial=0))
    if longest <= plan.segment_tokens:
        return plan
    return SegmentPlan(plan.tree, plan.segment_start, plan.segment_parent, longest)


def _merge_one(plan: SegmentPlan, limit: int, most: int) -> SegmentPlan | None:
    """The first merge, by the length of the shorter neighbour, that fits; None if none does."""
    lengths = plan.lengths
    fits = np.flatnonzero(lengths[:-1] + lengths[1:] <= limit)
    shorter = np.minimum(lengths[fits], lengths[fits + 1])
    for first in fits[np.argsort(shorter, kind="stable")][:TRIED].tolist():
        starts = np.delete(plan.segment_start, first + 1)
        merged = SegmentPlan(plan.tree, starts, segment_parents(plan.tree, starts), plan.segment_tokens)
        if merged.peak_in_flight_tokens <= most:
            return merged
    return None
