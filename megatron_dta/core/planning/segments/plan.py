"""A segment plan: a forest's token stream, cut into segments that form a tree.

A *segment* is a contiguous run of the stream that goes through the model in one forward. Its queries need only the keys
of its own tokens and of the root path of its first token. The parent of a segment is therefore the segment that holds
the parent of its first token. Three facts follow, and tests check them on random forests:

- The segments in stream order are a depth-first preorder of the segment tree.
- Every key that a query sees is in the query's segment or in one of its ancestors.
- If forwards run in stream order and each backward runs as soon as the backwards of all its children are done
  (``depth_first_schedule``), the tokens in flight at a segment are its own and its ancestors'.

``plan_segments`` reorders siblings and cuts the stream within a budget of tokens in flight. The smallest possible
budget is the length of the longest sequence: all of its tokens are in flight when its last segment runs. That budget
always suffices, with segments that never leave one path. A larger budget allows fuller segments. The walk of
``walk.py`` runs with several strategies, and the plan with the fewest segments is taken, among those the one with the
fewest tokens in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.segments.branches import Branches
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


def segment_parents(tree: PrefixTree, segment_start: np.ndarray) -> np.ndarray:
    """The parent of each segment: the segment that holds the parent of its first token, or -1 if that token is a root.

    Args:
        tree: the forest whose stream is cut.
        segment_start: int64 [num_segments + 1], bounds of the segments, from 0 to the number of tokens in the stream.

    Returns:
        int32 [num_segments].
    """
    first = np.asarray(segment_start[:-1], dtype=np.int64)
    node = np.searchsorted(tree.node_start, first, side="right") - 1
    parent_token = first - 1
    opens_node = tree.node_start[node] == first
    above = tree.node_parent[node[opens_node]]
    parent_token[opens_node] = np.where(above < 0, -1, tree.node_start[above + 1] - 1)
    return (np.searchsorted(segment_start, parent_token, side="right") - 1).astype(np.int32)


class SegmentTree:
    """What a schedule needs: the segments of one rank, or a merged segment tree that several ranks run together.

    Attributes:
        segment_parent: int32 [num_segments], an earlier segment, or -1 at a root; segments are in preorder.
        lengths: number of tokens in each segment, int64 [num_segments].
    """

    segment_parent: np.ndarray
    lengths: np.ndarray

    @property
    def num_segments(self) -> int:
        return len(self.segment_parent)

    @cached_property
    def in_flight_tokens(self) -> np.ndarray:
        """Number of tokens in flight while each segment runs, its own and its ancestors', int64 [num_segments]."""
        return path_totals(self.segment_parent.tolist(), self.lengths.tolist())

    @property
    def peak_in_flight_tokens(self) -> int:
        """Largest number of tokens in flight at once."""
        return int(self.in_flight_tokens.max(initial=0))

    @property
    def depth(self) -> int:
        """Number of segments on the longest root path."""
        return tree_depth(self.segment_parent.tolist())


@dataclass(frozen=True, eq=False)
class SegmentPlan(SegmentTree):
    """A forest and the segments that its stream is cut into.

    Attributes:
        tree: the forest, with its siblings in the order that the planner chose; the segments cut its stream.
        segment_start: int64 [num_segments + 1], bounds of the segments in the stream.
        segment_parent: int32 [num_segments], see ``segment_parents``; an earlier segment, or -1 at a root.
        segment_tokens: maximum number of tokens in a segment.
    """

    tree: PrefixTree
    segment_start: np.ndarray
    segment_parent: np.ndarray
    segment_tokens: int

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens in each segment, int64 [num_segments]."""
        return np.diff(self.segment_start)

    @cached_property
    def attention_pairs(self) -> np.ndarray:
        """Number of visible (query, key) pairs of each segment, int64 [num_segments]."""
        tree = self.tree
        length, position = tree.node_lengths.astype(np.int64), tree.node_position.astype(np.int64)
        before = np.concatenate([[0], np.cumsum(length * position + length * (length + 1) // 2)])
        node = np.searchsorted(tree.node_start, self.segment_start, side="right") - 1
        inside = self.segment_start - tree.node_start[node]
        return np.diff(before[node] + inside * np.append(position, 0)[node] + inside * (inside + 1) // 2)

    @property
    def fill(self) -> float:
        """Share of the capacity of all segments that tokens fill; 1 for an empty forest."""
        capacity = self.num_segments * self.segment_tokens
        return int(self.segment_start[-1]) / capacity if capacity else 1.0


def tree_depth(parents: Sequence[int]) -> int:
    """Number of segments on the longest root path."""
    return int(path_totals(parents, [1] * len(parents)).max(initial=0))


def path_totals(parents: Sequence[int], values: Sequence[int]) -> np.ndarray:
    """Sum of ``values`` over each segment and its ancestors, int64; parents come before their children."""
    totals = list(values)
    for segment, parent in enumerate(parents):
        if parent >= 0:
            totals[segment] += totals[parent]
    return np.asarray(totals, dtype=np.int64)


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
    reordered = tree.with_node_order(branches.node_order(result.order, result.with_subtree))
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


@dataclass(frozen=True)
class RootPaths:
    """Root paths of all segments: the tokens outside a segment whose keys its queries see.

    A segment is a run of a preorder, so all of its tokens' ancestors in earlier segments are on the root path of its
    first token; their number is that token's position. A path of ten thousand tokens is a few runs of the stream, so
    paths are stored and uploaded as runs. Written out, they would be the largest tensors of a plan.

    Attributes:
        run_begin, run_length: int64, runs of the stream of all paths concatenated, each from the root.
        segment_runs: int64 [segments + 1], offsets of each segment's runs.
        lengths: int64 [segments], number of tokens on each path.
    """

    run_begin: np.ndarray
    run_length: np.ndarray
    segment_runs: np.ndarray
    lengths: np.ndarray

    def stream_indices(self, segment: int) -> np.ndarray:
        """Stream indices of the path of ``segment``, int64, ascending."""
        runs = slice(self.segment_runs[segment], self.segment_runs[segment + 1])
        begins, lengths = self.run_begin[runs].tolist(), self.run_length[runs].tolist()
        parts = [np.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
        return np.concatenate([np.zeros(0, np.int64), *parts])


def root_paths(segments: SegmentPlan) -> RootPaths:
    """Compute the root paths of a plan's segments.

    A path is a prefix of the parent segment's path, followed by the tokens of the parent segment that are visible.
    """
    subtree_end, position = segments.tree.subtree_end, segments.tree.position
    start = segments.segment_start.tolist()
    begins: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    totals = []
    for segment, parent in enumerate(segments.segment_parent.tolist()):
        total = int(position[start[segment]])
        totals.append(total)
        if parent < 0:
            begins.append(np.zeros(0, np.int64))
            lengths.append(np.zeros(0, np.int64))
            continue
        in_parent = start[parent] + np.flatnonzero(subtree_end[start[parent] : start[parent + 1]] > start[segment])
        first = np.flatnonzero(np.diff(in_parent, prepend=-2) > 1)
        # The remaining tokens are a prefix of the parent's path.
        ends = np.minimum(np.cumsum(lengths[parent]), total - len(in_parent))
        kept = np.diff(ends, prepend=0)
        begins.append(np.concatenate([begins[parent][kept > 0], in_parent[first]]))
        lengths.append(np.concatenate([kept[kept > 0], np.diff(first, append=len(in_parent))]))
    none = np.zeros(0, np.int64)
    return RootPaths(
        run_begin=np.concatenate([none, *begins]),
        run_length=np.concatenate([none, *lengths]),
        segment_runs=np.concatenate([[0], np.cumsum([len(runs) for runs in begins])]).astype(np.int64),
        lengths=np.asarray(totals, dtype=np.int64),
    )


class OpKind(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    __hash__ = object.__hash__  # in C


class Op(NamedTuple):
    """One step of a schedule."""

    kind: OpKind
    segment: int


def depth_first_schedule(tree: SegmentTree) -> list[Op]:
    """The schedule with one root path in flight: forwards in preorder, backwards as soon as all children's are done."""
    ops: list[Op] = []
    path: list[int] = []
    for segment, parent in enumerate(tree.segment_parent.tolist()):
        while path and path[-1] != parent:
            ops.append(Op(OpKind.BACKWARD, path.pop()))
        ops.append(Op(OpKind.FORWARD, segment))
        path.append(segment)
    ops.extend(Op(OpKind.BACKWARD, segment) for segment in reversed(path))
    return ops
