"""A schedule by simulation: whenever a rank is free, it takes the most urgent of the ops that could begin.

The two orders of a virtual stage are fixed (forwards in preorder, backwards in postorder), so a free rank chooses among
the next forward and the next backward of each of its chunks, and weight gradients that wait. What it chooses is a
``Policy``, or follows the times of another schedule; under which limit on the tokens in flight says a ``Pipeline``.
Every choice is deterministic.

A pipeline looks the same backwards in time: backwards read from the end are forwards in the preorder of the tree with
all siblings in reverse. ``mirrored`` turns one into the other, so every policy has a twin that plans from the end.

No limit of at least the tokens of the longest root path can bring a pipeline to a halt. Suppose that nothing runs and
nothing can begin. Then no backward is waiting for its turn anywhere, so all virtual stages have run the same backwards,
and each has only ancestors of its next forward in flight, if it is the furthest that has not run all forwards that the
one before it has. That one has room: a chunk counts as no less than one longest root path, however little it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from megatron_dta.planning.pipeline.costs import PipelineCosts
from megatron_dta.planning.pipeline.schedule import PipelineOp, PipelineSchedule, backward_order
from megatron_dta.planning.pipeline.simulation import op_times
from megatron_dta.planning.segments.schedule import OpKind

F, B, I, W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT  # noqa: E741
NEVER = float("inf")


@dataclass(frozen=True)
class Pipeline:
    """What is to be scheduled. V virtual stages, N segments.

    Attributes:
        num_stages, num_chunks: V is their product.
        parents: parent of each segment, in preorder.
        backwards: order of the backwards, children before parents.
        lengths: tokens of each segment.
        forward, backward: times by virtual stage and segment; ``backward`` of the inputs only where it is split.
        weight: times of the weight gradients, None where the backward is whole.
        limits: most tokens in flight on each rank, summed over its chunks.
        path_tokens: tokens of the longest root path.
        send_seconds: time that a message takes between ranks.
    """

    num_stages: int
    num_chunks: int
    parents: list[int]
    backwards: list[int]
    lengths: list[int]
    forward: list[list[float]]
    backward: list[list[float]]
    weight: list[list[float]] | None
    limits: list[int]
    path_tokens: int
    send_seconds: float

    @property
    def num_ops(self) -> int:
        """Ops of all ranks."""
        return (2 if self.weight is None else 3) * len(self.parents) * len(self.forward)

    def mirrored(self) -> Pipeline:
        """The same pipeline with time reversed, its segments numbered by the reversed order of the backwards.

        A split backward cannot be mirrored: its weight gradients would come first.
        """
        assert self.weight is None
        order = self.backwards[::-1]
        number = _inverse(order)
        return replace(
            self,
            parents=[number[self.parents[segment]] if self.parents[segment] >= 0 else -1 for segment in order],
            backwards=[number[segment] for segment in range(len(order) - 1, -1, -1)],
            lengths=[self.lengths[segment] for segment in order],
            forward=[[times[segment] for segment in order] for times in self.backward],
            backward=[[times[segment] for segment in order] for times in self.forward],
        )


@dataclass(frozen=True)
class Policy:
    """How a free rank chooses.

    Attributes:
        alternate: after a backward a forward comes first, else always backwards.
        patience: a forward is put off for a backward that will be ready within this share of the forward's time; where
            ops are urgent by a table, any op for a more urgent one.
        deep_first: of the forwards of several chunks, that of the last chunk comes first, else that of the segment
            that is furthest behind, in groups of as many segments as there are stages.
    """

    alternate: bool = False
    patience: float = 0.0
    deep_first: bool = True


@dataclass(frozen=True)
class Urgency:
    """A table for the choice between forwards and backwards: the least value comes first. By virtual stage, segment."""

    forward: list[list[float]]
    backward: list[list[float]]


@dataclass(frozen=True)
class Outcome:
    """A schedule and when its ops end, by virtual stage and segment."""

    schedule: PipelineSchedule
    forward_end: list[list[float]]
    backward_end: list[list[float]]
    makespan: float

    def mirrored_urgency(self, backwards: list[int]) -> Urgency:
        """What the mirrored pipeline is to run first: what ends last here. ``backwards`` is this pipeline's order."""
        order = backwards[::-1]
        return Urgency(
            forward=[[-ends[segment] for segment in order] for ends in self.backward_end],
            backward=[[-ends[segment] for segment in order] for ends in self.forward_end],
        )

    def mirrored_schedule(self, backwards: list[int]) -> PipelineSchedule:
        """The schedule of the mirrored pipeline, each rank's ops from the last to the first."""
        number = _inverse(backwards[::-1])
        schedule = self.schedule
        ops = [
            [PipelineOp(F if kind is B else B, number[segment], chunk) for kind, segment, chunk in reversed(own)]
            for own in schedule.ops
        ]
        return PipelineSchedule(schedule.num_stages, schedule.num_chunks, ops)


def _inverse(order: Sequence[int]) -> list[int]:
    number = [0] * len(order)
    for place, segment in enumerate(order):
        number[segment] = place
    return number


def pipeline_of(
    segment_parent: np.ndarray | Sequence[int],
    lengths: np.ndarray | Sequence[int],
    costs: PipelineCosts,
    num_stages: int,
    num_chunks: int,
    limits: Sequence[int],
    split_backward: bool,
    send_seconds: float,
) -> Pipeline:
    """The input of ``list_schedule`` as plain lists."""
    parents, tokens = np.asarray(segment_parent).tolist(), np.asarray(lengths).tolist()
    times = op_times(costs)
    return Pipeline(
        num_stages=num_stages,
        num_chunks=num_chunks,
        parents=parents,
        backwards=backward_order(parents),
        lengths=tokens,
        forward=times[F],
        backward=times[I if split_backward else B],
        weight=times[W] if split_backward else None,
        limits=list(limits),
        path_tokens=longest_path_tokens(parents, tokens),
        send_seconds=send_seconds if num_stages > 1 else 0.0,
    )


def longest_path_tokens(parents: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of the root path that has most: what one stage alone has in flight, depth first."""
    totals = list(lengths)
    for segment, parent in enumerate(parents):
        if parent >= 0:
            totals[segment] += totals[parent]
    return max(totals, default=0)


def list_schedule(pipeline: Pipeline, policy: Policy, urgency: Urgency | None = None) -> Outcome:
    """The schedule that a policy leads to; with ``urgency`` the table decides between ops that are both ready."""
    return _Run(pipeline, policy, urgency).run()


class _Run:
    """The state of all ranks while one schedule is made."""

    def __init__(self, pipeline: Pipeline, policy: Policy, urgency: Urgency | None) -> None:
        stages, virtual, count = pipeline.num_stages, pipeline.num_stages * pipeline.num_chunks, len(pipeline.parents)
        self.pipeline, self.policy, self.urgency = pipeline, policy, urgency
        # End of each forward and backward on each virtual stage, as soon as it has begun.
        self.forward_end = [[NEVER] * count for _ in range(virtual)]
        self.backward_end = [[NEVER] * count for _ in range(virtual)]
        self.forwards, self.backwards, self.weights = [0] * virtual, [0] * virtual, [0] * virtual
        self.alive = [0] * virtual
        self.free = [0.0] * stages
        self.after_backward = [True] * stages
        self.ops: list[list[PipelineOp]] = [[] for _ in range(stages)]
        self.events: list[tuple[float, int]] = [(0.0, stage) for stage in range(stages)]

    def run(self) -> Outcome:
        """Go from event to event; at each, one rank may begin one op."""
        events, free = self.events, self.free
        while events:
            now, stage = heappop(events)
            if free[stage] <= now:
                self._choose(stage, now)
        schedule = PipelineSchedule(self.pipeline.num_stages, self.pipeline.num_chunks, self.ops)
        return Outcome(schedule, self.forward_end, self.backward_end, max(free, default=0.0))

    def _choose(self, stage: int, now: float) -> None:
        """Begin the most urgent op that can, if the policy does not rather wait."""
        backward, backward_ready = self._next_backward(stage, now)
        forward, forward_ready = self._next_forward(stage, now)
        wait = self._waits(forward, forward_ready, backward, backward_ready, now)
        if backward_ready <= now and forward_ready <= now:
            if self.urgency is not None:
                first = self._urgency_of_backward(backward) <= self.urgency.forward[forward][self.forwards[forward]]
            else:
                first = not (self.policy.alternate and self.after_backward[stage])
            if first:
                self._begin_backward(stage, backward, now)
            else:
                self._begin_forward(stage, forward, now)
        elif backward_ready <= now and not wait:
            self._begin_backward(stage, backward, now)
        elif forward_ready <= now and not wait:
            self._begin_forward(stage, forward, now)
        elif self.pipeline.weight is not None:
            self._begin_weight(stage, now)

    def _waits(self, forward: int, forward_ready: float, backward: int, backward_ready: float, now: float) -> bool:
        """Whether the one op that is ready is put off for the other one."""
        patience = self.policy.patience
        if not patience:
            return False
        if forward_ready <= now < backward_ready < now + patience * self._forward_time(forward):
            return self.urgency is None or self._urgency_of_backward(backward) < self._urgency_of_forward(forward)
        if self.urgency is not None and backward_ready <= now < forward_ready < NEVER:
            time = self.pipeline.backward[backward][self.pipeline.backwards[self.backwards[backward]]]
            if forward_ready < now + patience * time:
                return self._urgency_of_forward(forward) < self._urgency_of_backward(backward)
        return False

    def _forward_time(self, v: int) -> float:
        return self.pipeline.forward[v][self.forwards[v]]

    def _urgency_of_forward(self, v: int) -> float:
        assert self.urgency is not None
        return self.urgency.forward[v][self.forwards[v]]

    def _urgency_of_backward(self, v: int) -> float:
        assert self.urgency is not None
        return self.urgency.backward[v][self.pipeline.backwards[self.backwards[v]]]

    def _next_backward(self, stage: int, now: float) -> tuple[int, float]:
        """The virtual stage whose backward is to come next, and when it can.

        Of those that can now the most urgent one, without a table the last; if none can, the one that can first.
        """
        pipeline, urgency = self.pipeline, self.urgency
        best, best_ready, best_rank = -1, NEVER, 0.0
        last = len(self.forwards) - 1
        for v in range(last - (pipeline.num_stages - 1 - stage), -1, -pipeline.num_stages):
            done = self.backwards[v]
            if done == len(pipeline.backwards):
                continue
            segment = pipeline.backwards[done]
            if segment >= self.forwards[v]:
                continue
            ready = now if v == last else max(now, self.backward_end[v + 1][segment] + pipeline.send_seconds)
            rank = urgency.backward[v][segment] if urgency is not None else 0.0
            if ready < best_ready or (ready == best_ready and rank < best_rank):
                best, best_ready, best_rank = v, ready, rank
        return best, best_ready

    def _next_forward(self, stage: int, now: float) -> tuple[int, float]:
        """The virtual stage whose forward is to come next, and when it can; only those that have room count."""
        pipeline, urgency = self.pipeline, self.urgency
        count, stages = len(pipeline.parents), pipeline.num_stages
        best, best_ready, best_rank = -1, NEVER, 0.0
        for chunk in range(pipeline.num_chunks - 1, -1, -1):
            v = chunk * stages + stage
            segment = self.forwards[v]
            if segment == count:
                continue
            ready = now if v == 0 else max(now, self.forward_end[v - 1][segment] + pipeline.send_seconds)
            if urgency is not None:
                rank = urgency.forward[v][segment]
            else:
                rank = 0.0 if self.policy.deep_first else float(segment // stages * pipeline.num_chunks + chunk)
            better = ready < best_ready or (ready == best_ready and rank < best_rank)
            if better and self._has_room(stage, v, pipeline.lengths[segment]):
                best, best_ready, best_rank = v, ready, rank
        return best, best_ready

    def _has_room(self, stage: int, v: int, length: int) -> bool:
        """Whether the rank may hold the segment too, with one longest root path put aside for each chunk."""
        pipeline, alive = self.pipeline, self.alive
        if pipeline.num_chunks == 1:
            return alive[v] + length <= pipeline.limits[stage]
        total = max(alive[v] + length, pipeline.path_tokens)
        for other in range(stage, len(alive), pipeline.num_stages):
            if other != v:
                total += max(alive[other], pipeline.path_tokens)
        return total <= pipeline.limits[stage]

    def _begin_forward(self, stage: int, v: int, now: float) -> None:
        segment = self.forwards[v]
        end = now + self.pipeline.forward[v][segment]
        self.forwards[v] += 1
        self.forward_end[v][segment] = end
        self.alive[v] += self.pipeline.lengths[segment]
        self.after_backward[stage] = False
        self._begun(PipelineOp(F, segment, v // self.pipeline.num_stages), stage, end, v + 1)

    def _begin_backward(self, stage: int, v: int, now: float) -> None:
        pipeline = self.pipeline
        segment = pipeline.backwards[self.backwards[v]]
        end = now + pipeline.backward[v][segment]
        self.backwards[v] += 1
        self.backward_end[v][segment] = end
        if pipeline.weight is None:
            self.alive[v] -= pipeline.lengths[segment]
        self.after_backward[stage] = True
        self._begun(
            PipelineOp(B if pipeline.weight is None else I, segment, v // pipeline.num_stages), stage, end, v - 1
        )

    def _begin_weight(self, stage: int, now: float) -> bool:
        """Weight gradients in the order of the input gradients; the last chunk's first."""
        pipeline = self.pipeline
        assert pipeline.weight is not None
        for v in range((pipeline.num_chunks - 1) * pipeline.num_stages + stage, -1, -pipeline.num_stages):
            if self.weights[v] < self.backwards[v]:
                segment = pipeline.backwards[self.weights[v]]
                self.weights[v] += 1
                self.alive[v] -= pipeline.lengths[segment]
                end = now + pipeline.weight[v][segment]
                self._begun(PipelineOp(W, segment, v // pipeline.num_stages), stage, end, None)
                return True
        return False

    def _begun(self, op: PipelineOp, stage: int, end: float, reached: int | None) -> None:
        """Note an op that has begun, and when its rank and the one that waits for it are to look again."""
        self.ops[stage].append(op)
        self.free[stage] = end
        heappush(self.events, (end, stage))
        if reached is not None and 0 <= reached < len(self.forwards):
            other = reached % self.pipeline.num_stages
            if other != stage:
                heappush(self.events, (end + self.pipeline.send_seconds, other))
