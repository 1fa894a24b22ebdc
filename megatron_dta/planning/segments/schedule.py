"""The order in which segments run forward and backward, as a list of ops, and where their keys and values live
meanwhile.

A segment's forward needs its ancestors' keys and values; its backward needs its descendants' gradients of its own keys
and values. So forwards in preorder, and each backward as soon as all children's are done, keep one path of the segment
tree in flight. An op list is data: the executor walks it, and slots are assigned from it before the step begins. The
allocation looks at nothing but when each segment is alive, so it serves any order that respects these needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from megatron_dta.planning.segments.plan import SegmentPlan


class OpKind(Enum):
    """What an op does with its segment. A backward is one op, or two: gradients of the inputs, then of the weights."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Op(NamedTuple):
    """One step of a schedule."""

    kind: OpKind
    segment: int


def depth_first_schedule(plan: SegmentPlan) -> list[Op]:
    """Forwards in preorder and each backward as soon as all its children's are done: one root path in flight."""
    ops: list[Op] = []
    path: list[int] = []
    for segment, parent in enumerate(plan.segment_parent.tolist()):
        while path and path[-1] != parent:
            ops.append(Op(OpKind.BACKWARD, path.pop()))
        ops.append(Op(OpKind.FORWARD, segment))
        path.append(segment)
    ops.extend(Op(OpKind.BACKWARD, segment) for segment in reversed(path))
    return ops


def allocate_slots(plan: SegmentPlan, schedule: Sequence[Op]) -> tuple[np.ndarray, int]:
    """Slots for the keys and values of every segment, one a token, such that no two segments alive at once overlap.

    A segment is alive from its forward to its backward, or, where the schedule has no backward of it, to the last
    forward among its descendants. Each takes the lowest free run that holds it (first fit). For the depth-first
    schedules this is a stack: a segment begins where its parent ends, and there are as many slots as the plan's peak of
    tokens in flight.

    Args:
        plan: the segments.
        schedule: every segment's forward once, and its backward at most once. Weight gradients need no keys and values
            of other segments, so those ops are passed over. Segments without tokens need no slots and may be left out.

    Returns:
        (int64 [num_segments], first slot of each segment; number of slots).

    Raises:
        ValueError: the schedule runs an op twice, leaves a forward out, or runs one before another that it needs.
    """
    schedule = [op for op in schedule if op.kind is not OpKind.BACKWARD_WEIGHT]
    ends_with = _last_uses(plan, schedule)
    slot_start = np.where(plan.lengths > 0, -1, 0).astype(np.int64)
    slots = _FreeSlots()
    lengths = plan.lengths.tolist()
    for (kind, segment), ended in zip(schedule, ends_with, strict=True):
        if kind is OpKind.FORWARD:
            slot_start[segment] = slots.take(lengths[segment]) if lengths[segment] else 0
        for segment in ended:
            if lengths[segment]:
                slots.give_back(int(slot_start[segment]), lengths[segment])
    return slot_start, slots.num_slots


def _last_uses(plan: SegmentPlan, schedule: Sequence[Op]) -> list[list[int]]:
    """The segments whose life ends with each op; checks the schedule on the way."""
    parents = plan.segment_parent.tolist()
    never = len(schedule)
    forward_at, backward_at = [never] * plan.num_segments, [never] * plan.num_segments
    for at, (kind, segment) in enumerate(schedule):
        times = forward_at if kind is OpKind.FORWARD else backward_at
        if times[segment] != never:
            raise ValueError(f"the schedule runs {kind.value}({segment}) twice")
        times[segment] = at
    last_use = list(forward_at)
    for segment in range(plan.num_segments - 1, -1, -1):
        parent = parents[segment]
        if forward_at[segment] == never:
            if plan.lengths[segment] == 0:
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
    """Free runs below ``num_slots``, sorted and never adjacent; everything above is free too."""

    def __init__(self) -> None:
        self.num_slots = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    def take(self, length: int) -> int:
        """First slot of the lowest free run of ``length`` slots, which is taken."""
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
        """Free a run and join it with its free neighbours."""
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
