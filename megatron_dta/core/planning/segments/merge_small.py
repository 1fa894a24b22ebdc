"""Merges short segments with their neighbours in the stream.

Every forward has a minimum time, which the host needs to launch its kernels. A segment of a few tokens can join the
segment before or after it if the result may be slightly longer than the others. Any cut of the stream is a valid plan.
Only the tokens in flight change, and they stay within the budget.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.core.planning.segments.plan import SegmentPlan, segment_parents

# A merged segment may exceed ``segment_tokens`` by this share.
EXTRA_LENGTH = 1 / 16
# Maximum number of merges, and maximum number of pairs of neighbours that are tried for each, shortest segment first.
MAX_TRIES = 32


def merge_small_segments(plan: SegmentPlan, memory_tokens: int) -> SegmentPlan:
    """Merge neighbours whose total length is at most ``1 + EXTRA_LENGTH`` times ``plan.segment_tokens``.

    Args:
        plan: the segments.
        memory_tokens: maximum number of tokens in flight. A plan that already exceeds it may not get more than it has.

    Returns:
        The merged plan. Its ``segment_tokens`` is larger than that of ``plan`` if one of its segments is.
    """
    limit = int(plan.segment_tokens * (1 + EXTRA_LENGTH))
    most = max(memory_tokens, plan.peak_in_flight_tokens)
    for _ in range(MAX_TRIES):
        merged = _merge_one(plan, limit, most)
        if merged is None:
            break
        plan = merged
    longest = int(plan.lengths.max(initial=0))
    if longest <= plan.segment_tokens:
        return plan
    return SegmentPlan(plan.tree, plan.segment_start, plan.segment_parent, longest)


def _merge_one(plan: SegmentPlan, limit: int, most: int) -> SegmentPlan | None:
    """The first merge that fits, by the length of the shorter neighbour; None if none does."""
    lengths = plan.lengths
    fits = np.flatnonzero(lengths[:-1] + lengths[1:] <= limit)
    shorter = np.minimum(lengths[fits], lengths[fits + 1])
    for first in fits[np.argsort(shorter, kind="stable")][:MAX_TRIES].tolist():
        starts = np.delete(plan.segment_start, first + 1)
        merged = SegmentPlan(plan.tree, starts, segment_parents(plan.tree, starts), plan.segment_tokens)
        if merged.peak_in_flight_tokens <= most:
            return merged
    return None
