"""Searches for the segment size of a pipeline with the shortest simulated step, and for its schedule.

With segments of S tokens on P stages, a step has a bubble of P - 1 segments and P - 1 segments in flight beyond one
root path. Small segments reduce both, but the launches by the host bound the time of a segment from below, and beyond
some number more segments only add launches. The best size depends on all costs, so the search tries sizes from the
largest down while that helps. It cuts the tree into segments of each size and schedules them with list scheduling. The
best sizes are scheduled with the full planner, and the shortest step is returned.

The reference for memory is the plan of a single stage (``segment_tokens`` and the default limit on in-flight tokens); a
pipeline stage can have 1.5 times its in-flight tokens. As P - 1 segments are in flight beside the root path, larger
segments leave less for the path. Segments are therefore planned with the remaining limit, or with one segment less,
because a pipeline without any spare memory waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple

from megatron_dta.planning.pipeline.bounds import makespan_bound
from megatron_dta.planning.pipeline.costs import PipelineCosts
from megatron_dta.planning.pipeline.list_schedule import Policy, list_schedule, pipeline_of
from megatron_dta.planning.pipeline.planner import DEFAULT_FACTOR, plan_pipeline
from megatron_dta.planning.pipeline.schedule import PipelineSchedule, peak_in_flight, tree_1f1b
from megatron_dta.planning.pipeline.segments import ideal_utilisation, in_flight_budget
from megatron_dta.planning.pipeline.simulation import Timeline, simulate
from megatron_dta.planning.segments.cut import plan_segments
from megatron_dta.planning.segments.plan import SegmentPlan
from megatron_dta.tree import PrefixTree

# Sizes to try, largest first.
SIZES = (8192, 7168, 6144, 5376, 4608, 4096, 3584, 3072, 2688, 2304, 2048, 1792, 1536, 1344, 1152, 1024, 896, 768, 640)
SIZES = (*SIZES, 512, 384, 256, 192, 128)
# The search stops after this number of sizes whose lower bound exceeds the best time, or with this number of segments
# for each further stage, which leaves almost nothing to gain.
HOPELESS_SIZES = 2
ENOUGH_SEGMENTS = 250
NEAR_BOUND = 1.02
# Strategies of the segment planner in the first estimate of a size, and number of best sizes that are planned in full.
LOOKED_AT = 2
POLICIES = (Policy(), Policy(alternate=True, patience=0.1))
CAREFUL = 4
# Additional sizes to plan if none of these reaches the requested share of the ideal utilisation.
FURTHER = 20


@dataclass(frozen=True)
class PipelinePlan:
    """Segments and their schedule.

    Attributes:
        segments: the segments.
        costs: their times.
        schedule: the op lists.
        timeline: its simulation.
        limit: limit on the in-flight tokens of the schedule.
        one_stage_tokens: in-flight tokens of a single stage.
        fastest: the plan with the shortest step of all plans made; None if it is this one.
    """

    segments: SegmentPlan
    costs: PipelineCosts
    schedule: PipelineSchedule
    timeline: Timeline
    limit: int
    one_stage_tokens: int
    fastest: PipelinePlan | None = None

    @property
    def ideal_utilisation(self) -> float:
        """N / (N + P - 1), the utilisation of segments of equal times."""
        return ideal_utilisation(self.segments.num_segments, self.schedule.num_stages)

    @property
    def share_of_ideal(self) -> float:
        """Utilisation over the ideal one."""
        return self.timeline.utilisation / self.ideal_utilisation

    @property
    def result(self) -> tuple[float, float]:
        """Key to compare plans: the makespan, then the peak of in-flight tokens on a stage."""
        return self.timeline.makespan, max(peak_in_flight(self.schedule, self.segments.lengths), default=0.0)


def choose_pipeline(
    tree: PrefixTree,
    costs_of: Callable[[SegmentPlan], PipelineCosts],
    num_stages: int,
    num_chunks: int = 1,
    segment_tokens: int = 2048,
    memory_tokens: int | None = None,
    max_in_flight_tokens: int | None = None,
    split_backward: bool = False,
    send_seconds: float = 0.0,
    sizes: Sequence[int] = SIZES,
    least_share: float = 0.0,
) -> PipelinePlan:
    """Return the segments and the schedule with the shortest step found. Deterministic.

    Args:
        costs_of: function from a segment plan to its times on all virtual stages.
        segment_tokens, memory_tokens: arguments of ``plan_segments`` for a single stage.
        max_in_flight_tokens: limit in place of 1.5 times that of a single stage.
        sizes: maximum tokens of a segment to try.
        least_share: share of the ideal utilisation that a plan should reach, if one does. The shortest step can have
            less: if launches are slow, larger segments that wait for memory can be faster.

    Raises:
        InputError: as ``plan_segments``, or the limit is below the longest sequence.
    """
    memory_tokens = in_flight_budget(tree, segment_tokens, memory_tokens, max_in_flight_tokens)
    alone = plan_segments(tree, segment_tokens, memory_tokens)
    one_stage = alone.peak_in_flight_tokens
    limit = max_in_flight_tokens or int(DEFAULT_FACTOR * one_stage)
    search = _Search(tree, costs_of, memory_tokens, (num_stages, num_chunks, limit, split_backward, send_seconds))
    if num_stages == 1:
        return search.plan(alone, one_stage)
    candidates = search.look_at(sizes)
    plans = [search.plan(search.with_care(each), one_stage) for each in candidates[:CAREFUL]]
    # The other candidates, and smaller sizes.
    smaller = sorted({size for size in sizes if size < min(each.size for each in candidates)}, reverse=True)
    further = chain(candidates[CAREFUL:], chain.from_iterable(map(search.candidates, smaller)))
    for candidate in islice(further, FURTHER):
        if any(plan.share_of_ideal >= least_share for plan in plans):
            break
        plans.append(search.plan(search.with_care(candidate), one_stage))
    fastest = min(plans, key=lambda plan: plan.result)
    near = [plan for plan in plans if plan.share_of_ideal >= least_share]
    best = min(near or plans, key=lambda plan: plan.result)
    return best if best is fastest else replace(best, fastest=fastest)


class _Candidate(NamedTuple):
    """A size and a limit on in-flight tokens, with its estimated seconds and the lower bound of any schedule."""

    seconds: float
    bound: float
    size: int
    budget: int
    segments: SegmentPlan


@dataclass
class _Search:
    """The search for one forest; ``arguments`` are those of ``plan_pipeline`` from ``num_stages`` on."""

    tree: PrefixTree
    costs_of: Callable[[SegmentPlan], PipelineCosts]
    memory_tokens: int
    arguments: tuple[int, int, int, bool, float]

    def look_at(self, sizes: Sequence[int]) -> list[_Candidate]:
        """Return the candidates, best first."""
        num_stages, _, limit, _, _ = self.arguments
        ordered, found, hopeless = sorted(set(sizes), reverse=True), [], 0
        for size, smaller in zip(ordered, [*ordered[1:], 0], strict=True):
            # Of sizes that hold all tokens, the smallest suffices. If P - 1 segments exceed the limit, a stage waits.
            if smaller and (smaller >= self.tree.num_tokens or (num_stages - 1) * size > limit):
                continue
            before = min((each.seconds for each in found), default=math.inf)
            own = list(self.candidates(size))
            hopeless = hopeless + 1 if min(each.bound for each in own) >= before else 0
            found.extend(own)
            best = min(found, key=lambda each: each[:4])
            enough = best.segments.num_segments / (ENOUGH_SEGMENTS * (num_stages - 1))
            if hopeless == HOPELESS_SIZES or enough > (1 if best.seconds <= NEAR_BOUND * best.bound else 4):
                break
        return sorted(found, key=lambda each: each[:4])

    def candidates(self, size: int) -> Iterator[_Candidate]:
        """Estimate a size with each limit on in-flight tokens."""
        num_stages, _, limit, _, _ = self.arguments
        longest, room = int(self.tree.sequence_lengths.max(initial=0)), limit - (num_stages - 1) * size
        for budget in sorted({max(longest, min(self.memory_tokens, room - less)) for less in (0, size)}):
            segments = plan_segments(self.tree, size, budget, LOOKED_AT)
            yield _Candidate(*self.look(segments), size, budget, segments)

    def plan(self, segments: SegmentPlan, one_stage: int) -> PipelinePlan:
        """Plan the schedule of these segments."""
        costs, (_, _, limit, _, send_seconds) = self.costs_of(segments), self.arguments
        schedule = plan_pipeline(segments.segment_parent, segments.lengths, costs, *self.arguments)
        timeline = simulate(schedule, segments.segment_parent, costs, send_seconds)
        return PipelinePlan(segments, costs, schedule, timeline, limit, one_stage)

    def look(self, segments: SegmentPlan) -> tuple[float, float]:
        """Return the shortest makespan of a few schedules built without a search, and the lower bound."""
        num_stages, num_chunks, limit, split_backward, send_seconds = self.arguments
        parents, lengths, costs = segments.segment_parent, segments.lengths, self.costs_of(segments)
        bound = makespan_bound(parents, lengths, costs, num_stages, num_chunks, limit, split_backward)
        limits = [num_chunks * limit] * num_stages
        pipeline = pipeline_of(parents, lengths, costs, num_stages, num_chunks, limits, split_backward, send_seconds)
        seconds = [list_schedule(pipeline, policy).makespan for policy in POLICIES]
        static = tree_1f1b(parents, num_stages)
        if num_chunks == 1 and max(peak_in_flight(static, lengths), default=0) <= limit:
            seconds.append(simulate(static, parents, costs, send_seconds).makespan)
        return min(seconds), bound

    def with_care(self, candidate: _Candidate) -> SegmentPlan:
        """Return the candidate's segments, planned with all strategies of the segment planner if that is faster."""
        careful = plan_segments(self.tree, candidate.size, candidate.budget)
        return careful if self.look(careful)[0] < candidate.seconds else candidate.segments
