"""Builds a pipeline schedule by simulation: a rank that becomes free begins the most urgent op that is ready.

The order of ops on a virtual stage is fixed (forwards in preorder, backwards in postorder), so a free rank chooses
among the next forward and the next backward of each of its model chunks. A ``Policy`` or the times of another schedule
(``Urgency``) decide; ``Pipeline.limits`` bounds the tokens in flight. All choices are deterministic.

Example: a segment tree with root 0 and children 1 and 2, on 2 stages; each forward takes 1 and each backward 2.

    stage 0   F0 F1 F2 B1 B2 B0
    stage 1   F0 F1 B1 F2 B2 B0

Stage 1 runs F0 from 1 to 2, F1 to 3, B1 to 5, F2 to 6, B2 to 8 and B0 to 10; stage 0 ends with B0 at 12, which is
(N + P - 1) times 3. If segment 0 has 4 tokens, the others have 2, and the limit is 6 tokens instead of 8, then stage 0
runs F2 only after B1, and the schedule takes 15.

*Mirroring.* A pipeline looks the same backwards in time: backwards read from the end are forwards in the preorder of
the tree with the order of all siblings reversed. ``mirrored`` exchanges the two, so every policy also yields a schedule
that is built from the end.

*No deadlock.* A schedule completes under every limit that is at least the longest root path. Suppose that no op runs
and none can begin. Then no backward is ready on any virtual stage, so all of them have run the same backwards. Take the
last virtual stage that has run fewer forwards than the one before it (or the first, if there is none). Only ancestors
of its next forward are in flight there, so the forward has room: each model chunk reserves one longest root path,
even while it holds less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from megatron_dta.core.planning.pipeline.schedule import PipelineOp, PipelineSchedule
from megatron_dta.core.planning.segments.plan import OpKind, path_totals

F, B = OpKind.FORWARD, OpKind.BACKWARD
NEVER = float("inf")


@dataclass(frozen=True)
class Pipeline:
    """The problem to schedule: V = num_stages * num_model_chunks virtual stages, N segments.

    Attributes:
        num_stages, num_model_chunks: pipeline ranks, and model chunks of each.
        parents: parent of each segment, in preorder.
        backwards: order of the backwards, children before parents.
        lengths: tokens of each segment.
        forward, backward: times [V][N].
        limits: limit on the tokens in flight on each rank, summed over its model chunks.
    """

    num_stages: int
    num_model_chunks: int
    parents: list[int]
    backwards: list[int]
    lengths: list[int]
    forward: list[list[float]]
    backward: list[list[float]]
    limits: list[int]

    def mirrored(self) -> Pipeline:
        """The same pipeline with time reversed, its segments numbered by the reversed order of the backwards."""
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
class Urgency:
    """Priorities [V][N] of forwards and backwards; the op with the smallest value comes first."""

    forward: list[list[float]]
    backward: list[list[float]]


@dataclass(frozen=True)
class Policy:
    """How a free rank chooses.

    Attributes:
        alternate: whether a forward has priority after a backward; otherwise backwards always have priority.
        patience: a forward waits for a backward that becomes ready within this share of the forward's time. With an
            ``Urgency``, any op waits for a more urgent one.
        urgency: decides between ops that are both ready; None for the rules above and the last model chunk first.
    """

    alternate: bool = False
    patience: float = 0.0
    urgency: Urgency | None = None


@dataclass(frozen=True)
class Outcome:
    """A schedule and the end times [V][N] of its ops."""

    schedule: PipelineSchedule
    forward_end: list[list[float]]
    backward_end: list[list[float]]
    makespan: float

    def mirrored_urgency(self, backwards: list[int]) -> Urgency:
        """Priorities for the mirrored pipeline: ops that end last here come first.

        Args:
            backwards: order of the backwards of this pipeline.
        """
        order = backwards[::-1]
        return Urgency(
            forward=[[-ends[segment] for segment in order] for ends in self.backward_end],
            backward=[[-ends[segment] for segment in order] for ends in self.forward_end],
        )

    def mirrored_schedule(self, backwards: list[int]) -> PipelineSchedule:
        """The schedule of the mirrored pipeline: the ops of each rank in reverse order."""
        number = _inverse(backwards[::-1])
        schedule = self.schedule
        ops = [
            [PipelineOp(F if kind is B else B, number[segment], chunk) for kind, segment, chunk in reversed(ops)]
            for ops in schedule.ops
        ]
        return PipelineSchedule(schedule.num_stages, schedule.num_model_chunks, ops)


def _inverse(order: Sequence[int]) -> list[int]:
    number = [0] * len(order)
    for position, segment in enumerate(order):
        number[segment] = position
    return number


def longest_path_tokens(parents: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of the longest root path: the peak of a single stage that runs depth first."""
    return int(path_totals(parents, lengths).max(initial=0))


def list_schedule(pipeline: Pipeline, policy: Policy) -> Outcome:
    return _ListScheduler(pipeline, policy).run()


class _ListScheduler:
    """State of all ranks while the schedule is built."""

    def __init__(self, pipeline: Pipeline, policy: Policy) -> None:
        stages, count = pipeline.num_stages, len(pipeline.parents)
        virtual = stages * pipeline.num_model_chunks
        self.pipeline, self.policy, self.urgency = pipeline, policy, policy.urgency
        self.path_tokens = longest_path_tokens(pipeline.parents, pipeline.lengths)
        # Virtual stages of each rank, the last one first.
        self.of_rank = [range(virtual - stages + stage, -1, -stages) for stage in range(stages)]
        # End of each forward and backward on each virtual stage, known once the op has begun.
        self.forward_end = [[NEVER] * count for _ in range(virtual)]
        self.backward_end = [[NEVER] * count for _ in range(virtual)]
        self.forwards, self.backwards, self.alive = [0] * virtual, [0] * virtual, [0] * virtual
        self.free = [0.0] * stages
        self.after_backward = [True] * stages
        self.ops: list[list[PipelineOp]] = [[] for _ in range(stages)]
        self.events: list[tuple[float, int]] = [(0.0, stage) for stage in range(stages)]

    def run(self) -> Outcome:
        """Process the events in order; at each one, a rank may begin an op."""
        events, free = self.events, self.free
        while events:
            now, stage = heappop(events)
            if free[stage] <= now:
                self._choose(stage, now)
        schedule = PipelineSchedule(self.pipeline.num_stages, self.pipeline.num_model_chunks, self.ops)
        return Outcome(schedule, self.forward_end, self.backward_end, max(free, default=0.0))

    def _choose(self, stage: int, now: float) -> None:
        """Begin the most urgent op that is ready, unless the policy waits for another one."""
        backward, backward_ready = self._next_backward(stage, now)
        forward, forward_ready = self._next_forward(stage, now)
        both = backward_ready <= now and forward_ready <= now
        if not both and self._waits(forward, forward_ready, backward, backward_ready, now):
            return
        if both and self.urgency is not None:
            is_forward = self._urgency_of_forward(forward) < self._urgency_of_backward(backward)
        elif both:
            is_forward = self.policy.alternate and self.after_backward[stage]
        else:
            is_forward = forward_ready <= now
        if is_forward:
            self._begin_forward(stage, forward, now)
        elif backward_ready <= now:
            self._begin_backward(stage, backward, now)

    def _waits(self, forward: int, forward_ready: float, backward: int, backward_ready: float, now: float) -> bool:
        """Whether the op that is ready waits for the other one."""
        patience = self.policy.patience
        if not patience:
            return False
        if forward_ready <= now < backward_ready:
            if backward_ready >= now + patience * self.pipeline.forward[forward][self.forwards[forward]]:
                return False
            return self.urgency is None or self._urgency_of_backward(backward) < self._urgency_of_forward(forward)
        if self.urgency is not None and backward_ready <= now < forward_ready < NEVER:
            time = self.pipeline.backward[backward][self.pipeline.backwards[self.backwards[backward]]]
            if forward_ready < now + patience * time:
                return self._urgency_of_forward(forward) < self._urgency_of_backward(backward)
        return False

    def _urgency_of_forward(self, v: int) -> float:
        return self.urgency.forward[v][self.forwards[v]]

    def _urgency_of_backward(self, v: int) -> float:
        return self.urgency.backward[v][self.pipeline.backwards[self.backwards[v]]]

    def _next_backward(self, stage: int, now: float) -> tuple[int, float]:
        """Virtual stage of the next backward, and the time at which it can begin.

        Among ready backwards this is the most urgent one, or that of the last virtual stage without an ``Urgency``. If
        none is ready, it is the one that becomes ready first.
        """
        order, last = self.pipeline.backwards, len(self.forwards) - 1
        best, best_ready, best_rank = -1, NEVER, 0.0
        for v in self.of_rank[stage]:
            done = self.backwards[v]
            if done == len(order) or order[done] >= self.forwards[v]:
                continue
            arrived = now if v == last else self.backward_end[v + 1][order[done]]
            ready = arrived if arrived > now else now
            rank = 0.0 if self.urgency is None else self.urgency.backward[v][order[done]]
            if ready < best_ready or (ready == best_ready and rank < best_rank):
                best, best_ready, best_rank = v, ready, rank
        return best, best_ready

    def _next_forward(self, stage: int, now: float) -> tuple[int, float]:
        """Virtual stage of the next forward that has room, and the time at which it can begin."""
        pipeline = self.pipeline
        best, best_ready, best_rank = -1, NEVER, 0.0
        for v in self.of_rank[stage]:
            segment = self.forwards[v]
            if segment == len(pipeline.parents):
                continue
            arrived = now if v == 0 else self.forward_end[v - 1][segment]
            ready = arrived if arrived > now else now
            rank = 0.0 if self.urgency is None else self.urgency.forward[v][segment]
            better = ready < best_ready or (ready == best_ready and rank < best_rank)
            if better and self._has_room(stage, v, pipeline.lengths[segment]):
                best, best_ready, best_rank = v, ready, rank
        return best, best_ready

    def _has_room(self, stage: int, v: int, length: int) -> bool:
        """Whether the segment fits into the rank's limit, with one longest root path reserved for each model chunk."""
        pipeline, alive = self.pipeline, self.alive
        if pipeline.num_model_chunks == 1:
            return alive[v] + length <= pipeline.limits[stage]
        total = max(alive[v] + length, self.path_tokens)
        for other in self.of_rank[stage]:
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
        segment = self.pipeline.backwards[self.backwards[v]]
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
