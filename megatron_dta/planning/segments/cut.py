"""Cuts a forest's stream into segments under a budget of tokens in flight.

``plan_segments`` reorders siblings and cuts so that segments are as full as the budget allows. Two bounds frame it: no
plan has less in flight than the longest sequence, whose tokens are all needed when its last segment runs; and that
budget always suffices, with segments that never leave a path. Between them a walk (``layout``) decides what shares a
segment; it is run with a few strategies, and the plan with fewest segments is taken, among those the one with least in
flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.common.errors import InputError
from megatron_dta.planning.segments.branches import Branches
from megatron_dta.planning.segments.plan import SegmentPlan, segment_parents
from megatron_dta.planning.segments.walk import Layout, Pressure, Strategy, Walk
from megatron_dta.tree import PrefixTree

__all__ = ["SegmentPlan", "plan_segments", "segment_parents"]

# Each chosen for what it adds to those before it, on agent trajectories, samples per prompt and search trees.
STRATEGIES = (
    Strategy(1.0, tallest_first=False, tolerance=0.1, early_share=0.5),
    Strategy(2.0, tallest_first=False, tolerance=0.01, early_share=0.15),
    Strategy(0.25, tallest_first=False, tolerance=0.1, early_share=0.5),
    Strategy(2.0, tallest_first=True, tolerance=0.1, early_share=0.5),
    Strategy(3.0, tallest_first=False, tolerance=0.1, early_share=0.5),
    Strategy(0.5, tallest_first=False, tolerance=0.1, early_share=0.5),
    Strategy(0.5, tallest_first=True, tolerance=0.05, early_share=0.3),
    Strategy(1.0, tallest_first=False, tolerance=0.01, early_share=0.15),
    Strategy(2.0, tallest_first=True, tolerance=0.05, early_share=0.3),
)
# No further strategy is tried after this many choices, and so many for each segment that is needed at least: some 50
# ms, and where a step has many segments, a small share of its time.
MAX_STEPS = 7000
STEPS_PER_SEGMENT = 10


def default_memory_tokens(tree: PrefixTree, segment_tokens: int) -> int:
    """The budget of in-flight tokens where none is given: 1.5 times the longest sequence, or 8 segments if more."""
    return max(3 * int(tree.sequence_lengths.max(initial=0)) // 2, 8 * segment_tokens)


def plan_segments(
    tree: PrefixTree, segment_tokens: int, memory_tokens: int | None = None, num_strategies: int = len(STRATEGIES)
) -> SegmentPlan:
    """Reorder siblings and cut the stream into segments, as full as the budget allows.

    Args:
        tree: the forest; sibling order is free.
        segment_tokens: most tokens of a segment.
        memory_tokens: most tokens in flight (of a segment and its ancestors); None for the larger of 1.5 times the
            longest sequence and 8 segments.
        num_strategies: most strategies to try, for a quick look at a size.

    Returns:
        The plan, on the reordered forest. The same forest gives the same plan.

    Raises:
        InputError: segment_tokens below 1, or a budget below the longest sequence.
    """
    if segment_tokens < 1:
        raise InputError(f"--tree-segment-tokens {segment_tokens}: a segment holds at least 1 token")
    longest = int(tree.sequence_lengths.max(initial=0))
    if memory_tokens is None:
        memory_tokens = default_memory_tokens(tree, segment_tokens)
    if memory_tokens < longest:
        raise InputError(
            f"--tree-memory-tokens {memory_tokens} is less than the longest sequence, all of which is in flight when "
            f"its last segment runs; the least value that works is {longest}"
        )
    branches = Branches.of(tree)
    layout = _best_layout(branches, segment_tokens, memory_tokens, STRATEGIES[:num_strategies])
    reordered = tree.with_node_order(_node_order(branches, layout))
    segment_start = np.concatenate([[0], np.cumsum(layout.lengths, dtype=np.int64)]).astype(np.int64)
    return SegmentPlan(reordered, segment_start, segment_parents(reordered, segment_start), segment_tokens)


def _best_layout(
    branches: Branches, segment_tokens: int, budget: int, strategies: Sequence[Strategy] = STRATEGIES
) -> Layout:
    """The layout with fewest segments, then least in flight, that the strategies find."""
    pressure = Pressure(branches, segment_tokens, budget)
    fewest = -(-sum(branches.length) // segment_tokens)
    steps = MAX_STEPS + STEPS_PER_SEGMENT * fewest
    best: tuple[int, int] | None = None
    for strategy in strategies:
        layout = Walk(branches, pressure, segment_tokens, budget, strategy).run()
        steps -= layout.steps
        result = len(layout.lengths), max(layout.in_flight, default=0)
        if best is None or result < best:
            best, best_layout = result, layout
        if len(layout.lengths) == fewest or steps < layout.steps:
            break
    return best_layout


def _node_order(branches: Branches, layout: Layout) -> np.ndarray:
    """The tree's nodes in the order of the layout, int64 [M]: each branch's own, or those of its whole subtree."""
    order = np.asarray(layout.order, dtype=np.int64)
    begin = np.asarray(branches.node_begin, dtype=np.int64)[order]
    own_end = np.asarray(branches.node_end, dtype=np.int64)[order]
    subtree_end = np.asarray(branches.node_subtree_end, dtype=np.int64)[order]
    counts = np.where(np.asarray(layout.whole, dtype=bool), subtree_end, own_end) - begin
    offsets = np.cumsum(counts) - counts
    return np.repeat(begin - offsets, counts) + np.arange(counts.sum())
