"""Reorders a forest's siblings and cuts its token stream into segments within a budget of tokens in flight.

The smallest possible budget is the length of the longest sequence: all of its tokens are in flight when its last
segment runs. That budget always suffices, with segments that never leave one path. A larger budget allows fuller
segments. ``plan_segments`` runs the walk of ``walk.py`` with several strategies and takes the plan with the fewest
segments, and among those the one with the fewest tokens in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.segments.branches import Branches
from megatron_dta.core.planning.segments.plan import SegmentPlan, segment_parents
from megatron_dta.core.planning.segments.walk import MemoryPressure, SegmentWalk, Strategy, WalkResult
from megatron_dta.core.tree import PrefixTree

# Each strategy was chosen for its gain over those before it on agent trajectories, samples per prompt and search trees.
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
# Limit on the choices of all walks, after which no further strategy starts: a constant (about 50 ms) plus a number for
# each segment that any plan needs, so that planning takes a small share of a step with many segments.
MAX_STEPS = 7000
STEPS_PER_SEGMENT = 10


def default_memory_tokens(tree: PrefixTree, segment_tokens: int) -> int:
    """Default budget of tokens in flight: 1.5 times the longest sequence, or 8 segments if that is more."""
    return default_in_flight(int(tree.sequence_lengths.max(initial=0)), segment_tokens)


def default_in_flight(longest: int, segment_tokens: int) -> int:
    """``default_memory_tokens`` for the length of the longest sequence."""
    return max(3 * longest // 2, 8 * segment_tokens)


def plan_segments(
    tree: PrefixTree, segment_tokens: int, memory_tokens: int | None = None, num_strategies: int = len(STRATEGIES)
) -> SegmentPlan:
    """Reorder siblings and cut the stream into segments, as full as the budget allows.

    Args:
        tree: the forest; its sibling order may change.
        segment_tokens: maximum number of tokens of a segment.
        memory_tokens: maximum number of tokens in flight (of a segment and its ancestors); None for the larger of 1.5
            times the longest sequence and 8 segments.
        num_strategies: maximum number of strategies to try; fewer give a faster estimate.

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
    result = _best_walk(branches, segment_tokens, memory_tokens, STRATEGIES[:num_strategies])
    reordered = tree.with_node_order(_node_order(branches, result))
    segment_start = np.concatenate([[0], np.cumsum(result.lengths, dtype=np.int64)]).astype(np.int64)
    return SegmentPlan(reordered, segment_start, segment_parents(reordered, segment_start), segment_tokens)


def _best_walk(
    branches: Branches, segment_tokens: int, budget: int, strategies: Sequence[Strategy] = STRATEGIES
) -> WalkResult:
    """The walk with the fewest segments, then the fewest tokens in flight, over the strategies."""
    pressure = MemoryPressure(branches, segment_tokens, budget)
    fewest = -(-sum(branches.length) // segment_tokens)
    steps = MAX_STEPS + STEPS_PER_SEGMENT * fewest
    best: tuple[int, int] | None = None
    for strategy in strategies:
        result = SegmentWalk(branches, pressure, segment_tokens, budget, strategy).run()
        steps -= result.steps
        score = len(result.lengths), max(result.in_flight, default=0)
        if best is None or score < best:
            best, best_result = score, result
        if len(result.lengths) == fewest or steps < result.steps:
            break
    return best_result


def _node_order(branches: Branches, result: WalkResult) -> np.ndarray:
    """The tree's nodes in the order of the walk, int64 [M]: each branch's own nodes, or those of its whole subtree."""
    order = np.asarray(result.order, dtype=np.int64)
    begin = np.asarray(branches.node_begin, dtype=np.int64)[order]
    own_end = np.asarray(branches.node_end, dtype=np.int64)[order]
    subtree_end = np.asarray(branches.node_subtree_end, dtype=np.int64)[order]
    counts = np.where(np.asarray(result.with_subtree, dtype=bool), subtree_end, own_end) - begin
    offsets = np.cumsum(counts) - counts
    return np.repeat(begin - offsets, counts) + np.arange(counts.sum())
