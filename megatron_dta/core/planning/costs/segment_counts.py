"""Counts tokens, attention pairs and trained edges of each segment for the cost model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.core.planning.segments.plan import SegmentPlan
from megatron_dta.core.tree import PrefixTree
from megatron_dta.core.tree.trained_edges import merge_intervals, trained_intervals


def segment_counts(
    plan: SegmentPlan, loss_masks: Sequence[np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of tokens, (query, key) pairs and trained edges of each segment, int64 [N] each; see ``CostModel``.

    An edge counts in the segment of its parent, whose row of logits it needs.

    Args:
        loss_masks: for each sequence bool [T], False at position 0; None to train all positions but the first.
    """
    tree, bounds = plan.tree, np.asarray(plan.segment_start, dtype=np.int64)
    intervals = trained_intervals(tree, loss_masks)
    _, begin, end = merge_intervals(np.zeros_like(intervals.begin), intervals.begin, intervals.end)
    # Counted by runs. The parent of a child that does not begin a node is right before it in the stream.
    edges = np.diff(_below(begin, end, bounds + 1))
    first = tree.node_start[:-1][tree.node_parent >= 0]
    interval = np.searchsorted(begin, first, side="right") - 1
    trained = (interval >= 0) & (first < end[interval]) if len(begin) else np.zeros(len(first), dtype=bool)
    parent = tree.node_start[tree.node_parent[tree.node_parent >= 0].astype(np.int64) + 1] - 1
    for positions, sign in ((first[trained] - 1, -1), (parent[trained], 1)):
        np.add.at(edges, np.searchsorted(bounds, positions, side="right") - 1, sign)
    return plan.lengths, np.diff(_keys_before(tree, bounds)), edges


def _below(begin: np.ndarray, end: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Number of members of disjoint sorted intervals below each place, int64."""
    if not len(begin):
        return np.zeros(len(positions), dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(end - begin)])
    interval = np.maximum(np.searchsorted(begin, positions, side="left") - 1, 0)
    return before[interval] + np.clip(positions - begin[interval], 0, (end - begin)[interval])


def _keys_before(tree: PrefixTree, positions: np.ndarray) -> np.ndarray:
    """Number of (query, key) pairs of all tokens before each place of the stream, int64."""
    length, position = tree.node_lengths.astype(np.int64), tree.node_position.astype(np.int64)
    before = np.concatenate([[0], np.cumsum(length * position + length * (length + 1) // 2)])
    node = np.searchsorted(tree.node_start, positions, side="right") - 1
    inside = positions - tree.node_start[node]
    above = np.append(position, 0)[node]
    return before[node] + inside * above + inside * (inside + 1) // 2
