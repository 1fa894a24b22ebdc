"""Simulates a pipeline schedule: start and end of every op, and the order of messages between stages.

Each rank runs its ops one after another. An op begins when its rank is free and everything that it needs has ended; a
result from another rank arrives ``send_seconds`` after its op ended. The simulation makes no choices, so it is exact
for the given times.

``global_order`` puts all ops, and the messages between ranks, into one order. If every rank runs its own entries in
that order, the first unfinished entry can always be completed by its ranks. Hence there is no deadlock, even if a send
returns only after its receive has been posted and a pair of ranks has a single channel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.schedule import PipelineOp, PipelineSchedule, children_of
from megatron_dta.core.planning.segments.plan import OpKind

F, B = OpKind.FORWARD, OpKind.BACKWARD


@dataclass(frozen=True)
class Timeline:
    """Start and end of every op of a schedule.

    Attributes:
        start, end: one float64 array per stage, in the order of its ops.
    """

    start: list[np.ndarray]
    end: list[np.ndarray]

    @property
    def makespan(self) -> float:
        """End of the last op; the step begins at 0."""
        return max((float(end[-1]) for end in self.end if len(end)), default=0.0)

    @property
    def busy(self) -> list[float]:
        """Computing time of each stage; ops that take turns share theirs."""
        seconds = []
        for start, end in zip(self.start, self.end, strict=True):
            seconds.append(float((end - np.maximum(start, np.append(0.0, end[:-1]))).sum()))
        return seconds

    @property
    def utilisation(self) -> float:
        """Computing time of all stages over stages times makespan; 1 for an empty schedule."""
        makespan = self.makespan
        return sum(self.busy) / (len(self.start) * makespan) if makespan else 1.0


class Message(NamedTuple):
    """A transfer between ranks: activations to the next virtual stage or gradients to the previous one.

    Attributes:
        sender, receiver: pipeline ranks.
        kind: kind of the op that produces the message.
        segment: segment of that op.
        virtual_stage: virtual stage that sends.
    """

    sender: int
    receiver: int
    kind: OpKind
    segment: int
    virtual_stage: int


def simulate(
    schedule: PipelineSchedule,
    segment_parent: np.ndarray | Sequence[int],
    costs: PipelineCosts,
    send_seconds: float = 0.0,
) -> Timeline:
    """Simulate the schedule with the times of ``costs``.

    Args:
        schedule: the op lists.
        segment_parent: int [N], the segment tree in preorder, -1 at roots.
        costs: times for V = num_stages * num_model_chunks virtual stages.
        send_seconds: time between the end of an op and the start of one that needs its message on another rank.

    Raises:
        ValueError: the costs have another shape, or the schedule deadlocks.
    """
    parents = np.asarray(segment_parent).tolist()
    if np.shape(costs.forward) != (schedule.num_virtual_stages, len(parents)):
        shape = f"{schedule.num_virtual_stages} virtual stages and {len(parents)} segments"
        raise ValueError(f"costs of shape {np.shape(costs.forward)} are not for {shape}")
    times = op_times(costs)
    last = schedule.num_virtual_stages - 1
    # End of each op, None before it ran. ``open_children`` counts the children whose backward has not run.
    ended = {kind: [[None] * len(parents) for _ in range(last + 1)] for kind in OpKind}
    open_children = [[len(children) for children in children_of(parents)] for _ in range(last + 1)]
    starts: list[list[float]] = [[] for _ in schedule.ops]
    ends: list[list[float]] = [[] for _ in schedule.ops]
    free = [0.0] * schedule.num_stages
    runnable = deque(range(schedule.num_stages))
    queued = [True] * schedule.num_stages
    crossing = send_seconds if schedule.num_stages > 1 else 0.0

    def ready(stage: int, op: PipelineOp) -> float | None:
        """When everything that the op needs has arrived; None if that is not known yet."""
        kind, segment, chunk = op
        v = schedule.virtual_stage(stage, chunk)
        if kind is F:
            source = v - 1 if v else None
            if parents[segment] >= 0 and ended[F][v][parents[segment]] is None:
                return None
        else:
            source = v + 1 if v < last else None
            if ended[F][v][segment] is None or open_children[v][segment]:
                return None
        if source is None:
            return 0.0
        arrival = ended[kind][source][segment]
        return None if arrival is None else arrival + crossing

    while runnable:
        stage = runnable.popleft()
        queued[stage] = False
        ops, start, end = schedule.ops[stage], starts[stage], ends[stage]
        while len(start) < len(ops):
            op = ops[len(start)]
            arrival = ready(stage, op)
            if arrival is None:
                break
            kind, segment, chunk = op
            v = schedule.virtual_stage(stage, chunk)
            begin = max(free[stage], arrival)
            free[stage] = begin + times[kind][v][segment]
            start.append(begin)
            end.append(free[stage])
            ended[kind][v][segment] = free[stage]
            if kind is B and parents[segment] >= 0:
                open_children[v][parents[segment]] -= 1
            reached = v + 1 if kind is F else v - 1
            other = reached % schedule.num_stages
            if 0 <= reached <= last and not queued[other]:
                queued[other] = True
                runnable.append(other)
    for stage, ops in enumerate(schedule.ops):
        if len(starts[stage]) < len(ops):
            op = ops[len(starts[stage])]
            raise ValueError(f"{op.kind.value} of segment {op.segment} on stage {stage}, chunk {op.chunk}, never runs")
    return Timeline([np.asarray(times) for times in starts], [np.asarray(times) for times in ends])


def op_times(costs: PipelineCosts) -> dict[OpKind, list[list[float]]]:
    """Times [V][N] of each kind of op."""
    return {
        kind: np.asarray(values, dtype=np.float64).tolist()
        for kind, values in ((F, costs.forward), (B, costs.backward))
    }


def message_of(schedule: PipelineSchedule, stage: int, op: PipelineOp) -> Message | None:
    """The message that an op sends; None if its result stays on its rank."""
    v = schedule.virtual_stage(stage, op.chunk)
    return _message_between(schedule, op, v, v + 1 if op.kind is F else v - 1)


def _needed_message(schedule: PipelineSchedule, stage: int, op: PipelineOp) -> Message | None:
    v = schedule.virtual_stage(stage, op.chunk)
    return _message_between(schedule, op, v - 1 if op.kind is F else v + 1, v)


def _message_between(schedule: PipelineSchedule, op: PipelineOp, source: int, target: int) -> Message | None:
    """The message from one virtual stage to another; None if one of them does not exist or both are on one rank."""
    stages = source % schedule.num_stages, target % schedule.num_stages
    if not (0 <= source < schedule.num_virtual_stages > target >= 0) or stages[0] == stages[1]:
        return None
    return Message(*stages, op.kind, op.segment, source)


def message_order(schedule: PipelineSchedule, timeline: Timeline) -> list[Message]:
    """All messages between ranks, in the order in which every rank posts its sends and receives."""
    return [entry for _, entry in global_order(schedule, timeline) if isinstance(entry, Message)]


def global_order(schedule: PipelineSchedule, timeline: Timeline) -> list[tuple[int, PipelineOp | Message]]:
    """Sort ops by start and messages by the end of their op; each entry has the stage that runs or sends it.

    An op follows the previous op of its rank and the message that it needs; a message follows its op. All other
    dependencies are between ops of one rank, so they hold as well.
    """
    order: list[tuple[int, PipelineOp | Message]] = []
    at = [0] * schedule.num_stages
    arrived: set[Message] = set()
    needed = [[_needed_message(schedule, stage, op) for op in ops] for stage, ops in enumerate(schedule.ops)]
    waiting: dict[Message, int] = {}
    # (time, 0 for a message and 1 for an op, stage, index of the op): unique, so ties need no further rule.
    heap: list[tuple[float, int, int, int]] = []

    def offer(stage: int) -> None:
        """Push the next op of the stage to the heap, or record the message that it waits for."""
        if at[stage] == len(schedule.ops[stage]):
            return
        message = needed[stage][at[stage]]
        if message is None or message in arrived:
            heappush(heap, (float(timeline.start[stage][at[stage]]), 1, stage, at[stage]))
        else:
            waiting[message] = stage

    for stage in range(schedule.num_stages):
        offer(stage)
    while heap:
        _, is_op, stage, index = heappop(heap)
        op = schedule.ops[stage][index]
        if is_op:
            order.append((stage, op))
            at[stage] += 1
            if message_of(schedule, stage, op) is not None:
                heappush(heap, (float(timeline.end[stage][index]), 0, stage, index))
            offer(stage)
            continue
        message = message_of(schedule, stage, op)
        assert message is not None
        order.append((stage, message))
        arrived.add(message)
        if message in waiting:
            offer(waiting.pop(message))
    if any(index < len(ops) for index, ops in zip(at, schedule.ops, strict=True)):
        raise ValueError("the schedule deadlocks")
    return order
