"""Allocates slots for the keys and values of segments, for any schedule of forwards and backwards.

A segment's forward needs its ancestors' keys and values. Its backward needs its descendants' gradients with respect to
its own keys and values. An op list is data: the executor follows it, and slots are assigned from it before the step
begins. The allocation only uses the lifetime of each segment, so it serves any order that respects these dependencies.

Example: segments 1 and 2 are children of segment 0, with 3, 4 and 2 tokens. The schedule is F0 F1 B1 F2 B2 B0. Segment
0 takes slots 0 to 2 and segment 1 takes slots 3 to 6; segment 2 starts at slot 3 again, so 7 slots suffice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from megatron_dta.core.planning.segments.plan import Op, OpKind, SegmentTree


def allocate_slots(
    tree: SegmentTree, schedule: Sequence[Op], sizes: np.ndarray | None = None
) -> tuple[np.ndarray, int]:
    """Allocate slots for keys and values, one per token, so that segments alive at the same time never overlap.

    A segment is alive from its forward to its backward. If the schedule has no backward for it, it is alive until the
    last forward among its descendants. Each segment takes the lowest free run that holds it (first fit). For
    depth-first schedules this is a stack: a segment begins where its parent ends, and the number of slots is the
    peak of tokens in flight.

    Args:
        tree: the segments.
        schedule: every segment's forward once, and its backward at most once. Segments without tokens need no slots
            and may be left out.
        sizes: slots of each segment, int64 [num_segments]; None for one per token. Segments of size 0 get slot 0.

    Returns:
        (first slot of each segment, int64 [num_segments]; number of slots).

    Raises:
        ValueError: the schedule runs an op twice, lacks a forward, or runs an op before another that it depends on.
    """
    ends_with = _last_uses(tree, schedule)
    sizes = tree.lengths if sizes is None else sizes
    slot_start = np.where(sizes > 0, -1, 0).astype(np.int64)
    slots = _FreeSlots()
    lengths = sizes.tolist()
    for (kind, segment), ended in zip(schedule, ends_with, strict=True):
        if kind is OpKind.FORWARD:
            slot_start[segment] = slots.take(lengths[segment]) if lengths[segment] else 0
        for segment in ended:
            if lengths[segment]:
                slots.give_back(int(slot_start[segment]), lengths[segment])
    return slot_start, slots.num_slots


def _last_uses(tree: SegmentTree, schedule: Sequence[Op]) -> list[list[int]]:
    """The segments whose lifetime ends with each op; raises ValueError if the schedule is invalid."""
    parents = tree.segment_parent.tolist()
    never = len(schedule)
    forward_at, backward_at = [never] * tree.num_segments, [never] * tree.num_segments
    for at, (kind, segment) in enumerate(schedule):
        times = forward_at if kind is OpKind.FORWARD else backward_at
        if times[segment] != never:
            raise ValueError(f"the schedule runs {kind.value}({segment}) twice")
        times[segment] = at
    last_use = list(forward_at)
    for segment in range(tree.num_segments - 1, -1, -1):
        parent = parents[segment]
        if forward_at[segment] == never:
            if tree.lengths[segment] == 0:
                continue
            raise ValueError(f"the schedule lacks F({segment})")
        if parent >= 0 and forward_at[parent] > forward_at[segment]:
            raise ValueError(f"the schedule runs F({segment}) before F({parent}), its parent's")
        if backward_at[segment] != never:
            if backward_at[segment] < last_use[segment]:
                raise ValueError(f"the schedule runs B({segment}) before an op that it needs")
            last_use[segment] = backward_at[segment]
        if parent >= 0:
            last_use[parent] = max(last_use[parent], last_use[segment])
    ended: list[list[int]] = [[] for _ in schedule]
    for segment, at in enumerate(last_use):
        if at != never:
            ended[at].append(segment)
    return ended


class _FreeSlots:
    """Free runs of slots below ``num_slots``, sorted and never adjacent. All slots above are free too."""

    def __init__(self) -> None:
        self.num_slots = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    def take(self, length: int) -> int:
        """Take the lowest free run of ``length`` slots and return its first slot."""
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= length:
                self._starts[i] += length
                if self._starts[i] == end:
                    del self._starts[i], self._ends[i]
                return start
        start = self.num_slots
        if self._ends and self._ends[-1] == self.num_slots:
            start = self._starts.pop()
            self._ends.pop()
        self.num_slots = start + length
        return start

    def give_back(self, start: int, length: int) -> None:
        """Free a run and merge it with adjacent free runs."""
        end = start + length
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        if i > 0 and self._ends[i - 1] == start:
            self._ends[i - 1] = end
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)
