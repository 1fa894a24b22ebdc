"""What the cost model counts, segment by segment: tokens, pairs of attention, trained edges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.planning.segment_plan import SegmentPlan
from megatron_dta.planning.trained_edges import merge_intervals, trained_intervals


def segment_counts(
    plan: SegmentPlan, loss_masks: Sequence[np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, (query, key) pairs and trained edges of each segment, int64 [N] each; see ``CostModel``.

    An edge lies in the segment of its parent, whose row of logits it needs.

    Args:
        loss_masks: bool [T] of each sequence, False at position 0; None: all positions but the first are trained.
    """
    tree = plan.tree
    keys = np.concatenate([[0], np.cumsum(tree.position.astype(np.int64) + 1)])
    intervals = trained_intervals(tree, loss_masks)
    _, begin, end = merge_intervals(np.zeros_like(intervals.begin), intervals.begin, intervals.end)
    # +1 where an interval of children begins and -1 where it ends: a running sum says which tokens end a trained edge.
    change = np.zeros(tree.num_tokens + 1, dtype=np.int64)
    np.add.at(change, begin, 1)
    np.add.at(change, end, -1)
    rows = tree.parent[np.flatnonzero(np.cumsum(change)[:-1])]
    segment = np.searchsorted(plan.segment_start, rows, side="right") - 1
    edges = np.bincount(segment, minlength=plan.num_segments).astype(np.int64)
    return plan.lengths, np.diff(keys[plan.segment_start]), edges
