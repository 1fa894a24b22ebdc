"""Describes a segment plan: a forest's token stream, cut into segments that form a tree.

A *segment* is a contiguous run of the stream that goes through the model in one forward. Its queries need only the keys
of its own tokens and of the root path of its first token. The parent of a segment is therefore the segment that holds
the parent of its first token. Three facts follow, and tests check them on random forests:

- The segments in stream order are a depth-first preorder of the segment tree.
- Every key that a query sees is in the query's segment or in one of its ancestors.
- If forwards run in stream order and each backward runs as soon as the backwards of all its children are done, the
  tokens in flight at a segment are its own and its ancestors'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dta.core.tree import PrefixTree


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
