"""Computes the root path of each segment: the tokens outside the segment whose keys its queries see.

A segment is a run of a preorder, so all of its tokens' ancestors in earlier segments are on the root path of its first
token; their number is that token's position. A path of ten thousand tokens is a few contiguous runs of the stream, so
paths are stored and uploaded as runs. Written out for every segment, they would be the largest tensors of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dta.core.planning.segments.plan import SegmentPlan


@dataclass(frozen=True)
class RootPaths:
    """Root paths of all segments.

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
