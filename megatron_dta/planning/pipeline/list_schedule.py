"""Builds a pipeline schedule by simulation: a rank that becomes free begins an op that is ready.

The order of ops on a virtual stage is fixed (forwards in preorder, backwards in postorder), so a free rank chooses
among the next forward and the next backward of each of its model chunks. It alternates: after a backward comes a
forward if one is ready and has room (``Pipeline.limits`` bounds the tokens in flight), and after a forward a backward.
A forward waits for a backward that becomes ready within a tenth of the forward's time. All choices are deterministic.

Example: a segment tree with root 0 and children 1 and 2, on 2 stages; each forward takes 1 and each backward 2.

    stage 0   F0 F1 F2 B1 B2 B0
    stage 1   F0 F1 B1 F2 B2 B0

Stage 1 runs F0 from 1 to 2, F1 to 3, B1 to 5, F2 to 6, B2 to 8 and B0 to 10; stage 0 ends with B0 at 12, which is
(N + P - 1) times 3. If segment 0 has 4 tokens, the others have 2, and the limit is 6 tokens instead of 8, then stage 0
runs F2 only after B1, and the schedule takes 15.

*No deadlock.* A schedule completes under every limit that is at least the longest root path. Suppose that no op runs
and none can begin. Then no backward is ready on any virtual stage, so all of them have run the same backwards. Take the
last virtual stage that has run fewer forwards than the one before it (or the first, if there is none). Only ancestors
of its next forward are in flight there, so the forward has room: each model chunk reserves one longest root path,
even while it holds less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron_dta.planning.pipeline.schedule import PipelineOp, PipelineSchedule, backward_order
from megatron_dta.planning.segments.schedule import OpKind

F, B = OpKind.FORWARD, OpKind.BACKWARD
NEVER = float("inf")
# A forward waits for a backward that becomes ready within this share of the forward's time.
PATIENCE = 0.1


@dataclass(frozen=True)
class Pipeline:
    """The problem to schedule: V = num_stages * num_chunks virtual stages, N segments.

    Attributes:
        num_stages, num_chunks: pipeline ranks, and model chunks of each.
        parents: parent of each segment, in preorder.
        lengths: tokens of each segment.
        forward, backward: times [V][N].
        limits: limit on the tokens in flight on each rank, summed over its model chunks.
    """

    num_stages: int
    num_chunks: int
    parents: list[int]
    lengths: list[int]
    forward: list[list[float]]
    backward: list[list[float]]
    limits: list[int]


def longest_path_tokens(parents: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of the longest root path: the peak of a single stage that runs depth first."""
    totals = list(lengths)
    for segment, parent in enumerate(parents):
        if parent >= 0:
            totals[segment] += totals[parent]
    return max(totals, default=0)


def list_schedule(pipeline: Pipeline) -> PipelineSchedule:
    """Build the schedule."""
    return _ListScheduler(pipeline).run()


class _ListScheduler:
    """State of all ranks while the schedule is built."""

    def __init__(self, pipeline: Pipeline) -> None:
        stages, virtual, count = pipeline.num_stages, pipeline.num_stages * pipeline.num_chunks, len(pipeline.parents)
        self.pipeline = pipeline
        self.order = backward_order(pipeline.parents)
        self.path_tokens = longest_path_tokens(pipeline.parents, pipeline.lengths)
        # End of each forward and backward on each virtual stage, known once the op has begun.
        self.forward_end = [[NEVER] * count for _ in range(virtual)]
        self.backward_end = [[NEVER] * count for _ in range(virtual)]
        self.forwards, self.backwards, self.alive = [0] * virtual, [0] * virtual, [0] * virtual
        self.free = [0.0] * stages
        self.after_backward = [True] * stages
        self.ops: list[list[PipelineOp]] = [[] for _ in range(stages)]
        self.events: list[tuple[float, int]] = [(0.0, stage) for stage in range(stages)]

    def run(self) -> PipelineSchedule:
        """Process the events in order; at each one, a rank may begin an op."""
        events, free = self.events, self.free
        while events:
            now, stage = heappop(events)
            if free[stage] <= now:
                self._choose(stage, now)
        return PipelineSchedule(self.pipeline.num_stages, self.pipeline.num_chunks, self.ops)

    def _choose(self, stage: int, now: float) -> None:
        """Begin an op that is ready, unless it waits for another one."""
        backward, backward_ready = self._next_backward(stage, now)
        forward, forward_ready = self._next_forward(stage, now)
        # A single stage never waits, so it runs depth first, with fewest tokens in flight.
        forward_due = self.after_backward[stage] and self.pipeline.num_stages > 1
        if backward_ready <= now and not (forward_due and forward_ready <= now):
            self._begin_backward(stage, backward, now)
        elif forward_ready <= now:
            patience = PATIENCE * self.pipeline.forward[forward][self.forwards[forward]]
            if not now < backward_ready < now + patience:
                self._begin_forward(stage, forward, now)

    def _next_backward(self, stage: int, now: float) -> tuple[int, float]:
        """Virtual stage of the next backward, and the time at which it can begin.

        The last virtual stage comes first among those that are ready. If none is, it is the one that becomes ready
        first.
        """
        best, best_ready = -1, NEVER
        last = len(self.forwards) - 1
        for v in range(last - (self.pipeline.num_stages - 1 - stage), -1, -self.pipeline.num_stages):
            done = self.backwards[v]
            if done == len(self.order) or self.order[done] >= self.forwards[v]:
                continue
            ready = now if v == last else max(now, self.backward_end[v + 1][self.order[done]])
            if ready < best_ready:
                best, best_ready = v, ready
        return best, best_ready

    def _next_forward(self, stage: int, now: float) -> tuple[int, float]:
        """Virtual stage of the next forward that has room, and the time at which it can begin; the last one first."""
        pipeline = self.pipeline
        best, best_ready = -1, NEVER
        for v in range((pipeline.num_chunks - 1) * pipeline.num_stages + stage, -1, -pipeline.num_stages):
            segment = self.forwards[v]
            if segment == len(pipeline.parents):
                continue
            ready = now if v == 0 else max(now, self.forward_end[v - 1][segment])
            if ready < best_ready and self._has_room(stage, v, pipeline.lengths[segment]):
                best, best_ready = v, ready
        return best, best_ready

    def _has_room(self, stage: int, v: int, length: int) -> bool:
        """Whether the segment fits into the rank's limit, with one longest root path reserved for each model chunk."""
        pipeline, alive = self.pipeline, self.alive
        if pipeline.num_chunks == 1:
            return alive[v] + length <= pipeline.limits[stage]
        total = max(alive[v] + length, self.path_tokens)
        for other in range(stage, len(alive), pipeline.num_stages):
            if other != v:
                total += max(alive[other], self.path_tokens)
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
        segment = self.order[self.backwards[v]]
        end = now + self.pipeline.backward[v][segment]
        self.backwards[v] += 1
        self.backward_end[v][segment] = end
        self.alive[v] -= self.pipeline.lengths[segment]
        self.after_backward[stage] = True
        self._begun(PipelineOp(B, segment, v // self.pipeline.num_stages), stage, end, v - 1)

    def _begun(self, op: PipelineOp, stage: int, end: float, receiver: int) -> None:
        """Record an op that has begun, and add the events of its end: on its own rank and on the receiving rank."""
        self.ops[stage].append(op)
        self.free[stage] = end
        heappush(self.events, (end, stage))
        other = receiver % self.pipeline.num_stages
        if 0 <= receiver < len(self.forwards) and other != stage:
            heappush(self.events, (end, other))
