"""Cuts segments into runs for layers that carry a state along a path, and plans which states and rows are kept.

A *run* is a piece of a path without a branch inside one segment. It ends at a fork, at a leaf and at the end of its
segment. Its entry state is that at its parent token, which is the last token of another run, in the same segment or in
an ancestor. The runs of a segment are computed in *levels*, one call each: level 0 has the runs whose parent token is
outside the segment, and every other run is one level below its parent run.

The state at the end of a run is kept beyond its segment only if tokens of later segments continue it (an *open fork*).
From the forward to the backward of the segment, such a fork costs a state, the gradients that its children add, and the
last rows before it for the short convolution.

Example: a trunk of 3 tokens with the branches of 2 and of 4 tokens, cut into the segments [trunk, first branch] and
[second branch]. The first segment has the runs (0-2) on level 0 and (3-4) on level 1, the second one has (5-8). The
state after token 2 is kept for the second segment, that after token 4 is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_dta.core.planning.segments.plan import SegmentPlan, path_totals


class RunLevel(NamedTuple):
    """The runs of one level of a segment, R in number, with T tokens.

    Attributes:
        tokens: int64 [T], indices within the segment, run by run.
        lengths: tokens of each run, R numbers.
        entry: int64 [R], each run's entry among the segment's states.
        forks: int64, the runs of the level (0 to R - 1) that have children; their exits are appended to the states.
    """

    tokens: np.ndarray
    lengths: list[int]
    entry: np.ndarray
    forks: np.ndarray


@dataclass(frozen=True)
class SegmentStates:
    """What one segment of N tokens needs; W is the width of the convolution.

    The segment's *states* are E states from earlier segments, a state of zeros (number E), then the exits of its runs
    with children, level by level. Its *rows* are its N tokens, then W - 1 rows for each of the E states, then a row of
    zeros.

    Attributes:
        levels: the runs.
        entry_slots: int64 [E], slots of the states from earlier segments, each once.
        kept: int64 [K], the states of this segment that later segments continue, in slot order.
        slot: first slot of the kept states.
        row_source: int64 [M], ``PathLayout.source`` among the rows.
        token_row, head, run_end: ``PathLayout.token_row``, ``head`` and ``run_end``.
        kept_rows: int64 [K, W - 1], the last rows of the path up to each kept state.
    """

    levels: list[RunLevel]
    entry_slots: np.ndarray
    kept: np.ndarray
    slot: int
    row_source: np.ndarray
    token_row: np.ndarray
    head: np.ndarray
    run_end: np.ndarray
    kept_rows: np.ndarray


class ForkCounts(NamedTuple):
    """What the runs of each segment need, int64 [num_segments] each; see the properties of ``SegmentRuns``."""

    open_forks: np.ndarray
    inner_forks: np.ndarray
    num_states: np.ndarray
    widest_levels: np.ndarray

    def at(self, nodes: np.ndarray) -> ForkCounts:
        """The counts of the segments ``nodes``, zeros where there is none (-1)."""
        return ForkCounts(*(np.append(counts, 0)[nodes] for counts in self))


@dataclass(frozen=True, eq=False)
class SegmentRuns:
    """The runs of all segments of a plan, R in number, in stream order.

    Attributes:
        segments: the plan.
        start: int64 [R + 1], first stream token of each run.
        parent: int64 [R], run that ends with the parent token; -1 at a root.
        segment_run: int64 [num_segments + 1], first run of each segment.
    """

    segments: SegmentPlan
    start: np.ndarray
    parent: np.ndarray
    segment_run: np.ndarray

    @classmethod
    def of(cls, segments: SegmentPlan) -> SegmentRuns:
        """Cut the segments of a plan."""
        tree, bounds = segments.tree, segments.segment_start
        parent = tree.parent.astype(np.int64)
        children = np.bincount(parent + 1, minlength=tree.num_tokens + 1)[1:]
        begins = (parent != np.arange(-1, tree.num_tokens - 1)) | ((parent >= 0) & (children[parent] > 1))
        begins[bounds[:-1][segments.lengths > 0]] = True
        begin = np.flatnonzero(begins)
        start = np.append(begin, tree.num_tokens)
        above = parent[begin]
        run_parent = np.where(above < 0, -1, np.searchsorted(start, above, side="right") - 1)
        segment_run = np.searchsorted(begin, bounds)
        return cls(segments, start, run_parent, segment_run)

    @property
    def num_runs(self) -> int:
        return len(self.parent)

    @cached_property
    def segment_of(self) -> np.ndarray:
        """Segment of each run, int64 [R]."""
        return np.repeat(np.arange(self.segments.num_segments), np.diff(self.segment_run))

    @cached_property
    def is_inner(self) -> np.ndarray:
        """Whether the parent of each run is in the same segment, bool [R]."""
        return self.parent >= self.segment_run[self.segment_of]

    @cached_property
    def level(self) -> np.ndarray:
        """Level of each run in its segment, int64 [R]."""
        level, parents = [0] * self.num_runs, self.parent.tolist()
        for run in np.flatnonzero(self.is_inner).tolist():
            level[run] = level[parents[run]] + 1
        return np.asarray(level, dtype=np.int64)

    @cached_property
    def is_kept(self) -> np.ndarray:
        """Whether a later segment continues each run, bool [R]."""
        kept = np.zeros(self.num_runs, dtype=bool)
        child = np.flatnonzero(self.parent >= 0)
        kept[self.parent[child[self.segment_of[child] > self.segment_of[self.parent[child]]]]] = True
        return kept

    @cached_property
    def open_forks(self) -> np.ndarray:
        """Number of states that each segment keeps for later ones, int64 [num_segments]."""
        return np.bincount(self.segment_of[self.is_kept], minlength=self.segments.num_segments).astype(np.int64)

    @cached_property
    def num_levels(self) -> np.ndarray:
        """Number of levels of each segment, int64 [num_segments]."""
        levels = np.zeros(self.segments.num_segments, dtype=np.int64)
        np.maximum.at(levels, self.segment_of, self.level + 1)
        return levels

    @cached_property
    def inner_forks(self) -> np.ndarray:
        """Number of runs of each segment that have children anywhere, int64 [num_segments]."""
        forks = np.unique(self.parent[self.parent >= 0])
        return np.bincount(self.segment_of[forks], minlength=self.segments.num_segments).astype(np.int64)

    @cached_property
    def num_states(self) -> np.ndarray:
        """Number of states of each segment (``SegmentStates``), int64 [num_segments]."""
        outer = np.flatnonzero((self.parent >= 0) & ~self.is_inner)
        pairs = np.unique(self.segment_of[outer] * (self.num_runs + 1) + self.parent[outer])
        entries = np.bincount(pairs // (self.num_runs + 1), minlength=self.segments.num_segments)
        return entries + 1 + self.inner_forks

    @cached_property
    def widest_levels(self) -> np.ndarray:
        """Maximum number of runs in a level of each segment, int64 [num_segments]."""
        widest = np.zeros(self.segments.num_segments, dtype=np.int64)
        segment_level, count = np.unique(self.segment_of * (self.num_runs + 1) + self.level, return_counts=True)
        np.maximum.at(widest, segment_level // (self.num_runs + 1), count)
        return widest

    @property
    def counts(self) -> ForkCounts:
        """The numbers from which bytes of states follow."""
        return ForkCounts(self.open_forks, self.inner_forks, self.num_states, self.widest_levels)

    @cached_property
    def forks_in_flight(self) -> np.ndarray:
        """States that each segment and its ancestors keep, int64 [num_segments]."""
        return path_totals(self.segments.segment_parent.tolist(), self.open_forks.tolist())

    def states_of(self, segment: int, slot_start: np.ndarray, width: int) -> SegmentStates:
        """The plan of one segment.

        Args:
            slot_start: first slot of each segment's kept states, int64 [num_segments].
            width: tokens that the short convolution sees, W, at least 1.
        """
        first, last = self.segment_run[segment : segment + 2].tolist()
        runs, parent = np.arange(first, last), self.parent[first:last]
        outside = np.unique(parent[(parent >= 0) & (parent < first)])
        # A run's slot is its rank among the kept runs of its segment.
        rank = np.cumsum(self.is_kept) - 1
        before = np.append(0, np.cumsum(self.open_forks))
        of_entry = self.segment_of[outside]
        entry_slots = slot_start[of_entry] + rank[outside] - before[of_entry]

        has_children = np.zeros(last - first, dtype=bool)
        has_children[parent[parent >= first] - first] = True
        has_children |= self.is_kept[first:last]
        levels, state = [], np.full(last - first, -1, dtype=np.int64)
        num_states = len(outside) + 1
        for level in range(int(self.num_levels[segment])):
            of_level = runs[self.level[first:last] == level] - first
            above = parent[of_level]
            entry = np.where(above < 0, len(outside), np.searchsorted(outside, above))
            inner = above >= first
            entry[inner] = state[above[inner] - first]
            forks = np.flatnonzero(has_children[of_level])
            state[of_level[forks]] = num_states + np.arange(len(forks))
            num_states += len(forks)
            levels.append(RunLevel(self._tokens(of_level + first), self._lengths(of_level + first), entry, forks))
        kept = runs[self.is_kept[first:last]] - first
        source, token_row, kept_rows = self._rows(segment, outside, kept, width)
        bounds = self.start[first : last + 1] - self.segments.segment_start[segment]
        run_end = np.repeat(bounds[1:], np.diff(bounds))
        slot = int(slot_start[segment])
        return SegmentStates(levels, entry_slots, state[kept], slot, source, token_row, bounds[:-1], run_end, kept_rows)

    def _lengths(self, runs: np.ndarray) -> list[int]:
        return (self.start[runs + 1] - self.start[runs]).tolist()

    def _tokens(self, runs: np.ndarray) -> np.ndarray:
        """Tokens of ``runs`` within their segment, run by run."""
        begin, length = self.start[runs], self.start[runs + 1] - self.start[runs]
        shift = np.repeat(begin - (np.cumsum(length) - length), length)
        return np.arange(length.sum()) + shift - self.segments.segment_start[self.segment_of[runs[0]]]

    def _rows(
        self, segment: int, outside: np.ndarray, kept: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``row_source``, ``token_row`` and ``kept_rows`` of a segment."""
        first, last = self.segment_run[segment : segment + 2].tolist()
        begin = int(self.segments.segment_start[segment])
        num_tokens = int(self.segments.lengths[segment])
        zero, before = num_tokens + len(outside) * (width - 1), width - 1
        # The row before each row on its path.
        previous = np.arange(-1, zero, dtype=np.int64)
        head, parent = self.start[first:last] - begin, self.parent[first:last]
        last_token = self.start[np.maximum(parent, 0) + 1] - 1 - begin
        outer = num_tokens + (np.searchsorted(outside, parent) + 1) * before - 1
        above = np.where(parent < 0, zero, np.where(parent >= first, last_token, outer))
        previous[num_tokens : zero : before or 1] = zero
        previous[zero] = zero
        previous[head] = above if before else zero
        tails = np.empty((last - first, before), dtype=np.int64)
        row = previous[head]
        for column in range(before - 1, -1, -1):
            tails[:, column] = row
            row = previous[row]
        kept_rows = np.empty((len(kept), before), dtype=np.int64)
        row = self.start[kept + first + 1] - 1 - begin
        for column in range(before - 1, -1, -1):
            kept_rows[:, column] = row
            row = previous[row]
        run_of_token = np.repeat(np.arange(last - first), np.diff(self.start[first : last + 1]))
        token_row = np.arange(num_tokens) + before * (run_of_token + 1)
        source = np.empty(num_tokens + before * (last - first), dtype=np.int64)
        is_tail = np.ones(len(source), dtype=bool)
        is_tail[token_row] = False
        source[token_row], source[is_tail] = np.arange(num_tokens), tails.ravel()
        return source, token_row, kept_rows
