"""A schedule by simulation: whenever a rank is free, it takes the most urgent of the ops that could begin.

The two orders of a virtual stage are fixed (forwards in preorder, backwards in postorder), so a free rank chooses among
the next forward and the next backward of each of its chunks, and weight gradients that wait. What it chooses is a
``Policy``; under which limit on the tokens in flight, a ``Pipeline``. Every choice is deterministic.

No limit of at least the tokens of the longest root path can bring a pipeline to a halt. Suppose that nothing runs and
nothing can begin. Then no backward is waiting for its turn anywhere, so all virtual stages have run the same backwards,
and each has only ancestors of its next forward in flight, if it is the furthest that has not run all forwards that the
one before it has. That one has room: a chunk counts as no less than one longest root path, however little it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from megatron_dta.planning.pipeline_costs import PipelineCosts
from megatron_dta.planning.pipeline_schedule import PipelineOp, PipelineSchedule, backward_order
from megatron_dta.planning.pipeline_simulation import op_times
from megatron_dta.planning.schedule import OpKind

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


@dataclass(frozen=True)
class Policy:
    """How a free rank chooses.

    Attributes:
        alternate: after a backward a forward comes first, else always backwards.
        patience: a forward is put off for a backward that will be ready within this share of the forward's time.
        deep_first: of the forwards of several chunks, that of the last chunk comes first, else that of the segment
            that is furthest behind, in groups of as many segments as there are stages.
    """

    alternate: bool = False
    patience: float = 0.0
    deep_first: bool = True


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


def list_schedule(pipeline: Pipeline, policy: Policy) -> tuple[PipelineSchedule, float]:
    """The schedule that a policy leads to, and its makespan."""
    return _Run(pipeline, policy).run()


class _Run:
    """The state of all ranks while one schedule is made."""

    def __init__(self, pipeline: Pipeline, policy: Policy) -> None:
        stages, virtual, count = pipeline.num_stages, pipeline.num_stages * pipeline.num_chunks, len(pipeline.parents)
        self.pipeline, self.policy = pipeline, policy
        # End of each forward and backward on each virtual stage, as soon as it has begun.
        self.forward_end = [[NEVER] * count for _ in range(virtual)]
        self.backward_end = [[NEVER] * count for _ in range(virtual)]
        self.forwards, self.backwards, self.weights = [0] * virtual, [0] * virtual, [0] * virtual
        self.alive = [0] * virtual
        self.free = [0.0] * stages
        self.after_backward = [True] * stages
        self.ops: list[list[PipelineOp]] = [[] for _ in range(stages)]
        self.events: list[tuple[float, int]] = [(0.0, stage) for stage in range(stages)]

    def run(self) -> tuple[PipelineSchedule, float]:
        """Go from event to event; at each, one rank may begin one op."""
        events, free = self.events, self.free
        while events:
            now, stage = heappop(events)
            if free[stage] <= now:
                self._choose(stage, now)
        return PipelineSchedule(self.pipeline.num_stages, self.pipeline.num_chunks, self.ops), max(free, default=0.0)

    def _choose(self, stage: int, now: float) -> None:
        """Begin the most urgent op that can, if the policy does not rather wait."""
        backward, backward_ready = self._next_backward(stage, now)
        forward, forward_ready = self._next_forward(stage, now)
        if backward_ready <= now and not (
            self.policy.alternate and self.after_backward[stage] and forward_ready <= now
        ):
            self._begin_backward(stage, backward, now)
        elif forward_ready <= now:
            cost = self.pipeline.forward[forward][self.forwards[forward]]
            if now < backward_ready < now + self.policy.patience * cost:
                if self.pipeline.weight is None or not self._begin_weight(stage, now):
                    return
            else:
                self._begin_forward(stage, forward, now)
        elif self.pipeline.weight is not None:
            self._begin_weight(stage, now)

    def _next_backward(self, stage: int, now: float) -> tuple[int, float]:
        """The virtual stage whose backward is to come next, and when it can; of those that can now, the last one."""
        pipeline = self.pipeline
        best, best_ready = -1, NEVER
        last = len(self.forwards) - 1
        for v in range(last - (pipeline.num_stages - 1 - stage), -1, -pipeline.num_stages):
            done = self.backwards[v]
            if done == len(pipeline.backwards):
                continue
            segment = pipeline.backwards[done]
            if segment >= self.forwards[v]:
                continue
            ready = 0.0 if v == last else self.backward_end[v + 1][segment] + self._crossing()
            if ready < best_ready and best_ready > now:
                best, best_ready = v, ready
        return best, best_ready

    def _next_forward(self, stage: int, now: float) -> tuple[int, float]:
        """The virtual stage whose forward is to come next, and when it can; only those that have room count."""
        pipeline = self.pipeline
        count, stages = len(pipeline.parents), pipeline.num_stages
        best, best_ready, best_rank = -1, NEVER, (0, 0)
        for chunk in range(pipeline.num_chunks - 1, -1, -1):
            v = chunk * stages + stage
            segment = self.forwards[v]
            if segment == count:
                continue
            ready = 0.0 if v == 0 else self.forward_end[v - 1][segment] + self._crossing()
            rank = (0, 0) if self.policy.deep_first else (segment // stages, chunk)
            if ready > now and ready >= best_ready:
                continue
            if ready <= now and best_ready <= now and rank >= best_rank:
                continue
            if self._has_room(stage, v, pipeline.lengths[segment]):
                best, best_ready, best_rank = v, max(ready, now), rank
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

    def _crossing(self) -> float:
        return self.pipeline.send_seconds

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
