"""Segments for a pipeline: as small as it takes to keep all stages busy within nearly the memory of one.

One stage alone, depth first, has one root path in flight: some R tokens. A pipeline of P stages without bubbles has
P - 1 more segments in flight on its first stage, so with segments of S tokens it needs R + (P - 1) S. Hence S is chosen
against the budget of in-flight tokens that the segments are planned with, at most 1 / (2.5 P) of it: then what is added
is below 0.4 R, and of the half that a stage may have more than one stage alone a fifth is left to even out segments of
unequal cost. Where a single stage would run segments of 2,048 tokens in a budget of 16,384, 8 stages run 768.

Few tokens are cut smaller still, to have 4 segments for each stage, as N segments keep P stages busy for
N / (N + P - 1) of the time; but not below 256 tokens, where weights would be read for too few tokens.

No segment is faster than the host launches it. One of S tokens takes max(floor, a S), a step of T tokens
max(floor, a S) (T / S + P - 1), which is least at S = floor / a: below it more segments take as long each, above it the
bubble grows. So sizes are not below that, as far as (P - 1) S stays within half of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_dta.errors import InputError
from megatron_dta.planning.cost_model import CostModel
from megatron_dta.planning.pipeline_costs import PipelineCosts
from megatron_dta.planning.pipeline_planner import DEFAULT_FACTOR, plan_pipeline
from megatron_dta.planning.pipeline_schedule import PipelineSchedule
from megatron_dta.planning.pipeline_simulation import Timeline, simulate
from megatron_dta.planning.segment_plan import SegmentPlan
from megatron_dta.planning.segments import default_memory_tokens, plan_segments
from megatron_dta.tree import PrefixTree

SHARE_OF_BUDGET = 2.5
GRANULE = 64  # Sizes are multiples of it where they are larger: blocks of the attention kernels.
# A choice tries these parts of the size above until one comes this near to the ideal utilisation.
PARTS = (1.0, 0.75, 0.5, 0.375, 0.25)
NEAR_IDEAL = 0.95
LEAST_TRIED = 128  # Smaller segments are not tried.
SEGMENTS_PER_STAGE = 4
ENOUGH_TOKENS = 256


def tokens_of_floor(model: CostModel) -> int:
    """Tokens that a segment needs to take longer than its launches, where attention is little."""
    return math.ceil(model.floor_seconds / model.seconds_per_token)


def pipeline_segment_tokens(
    num_tokens: int, segment_tokens: int, memory_tokens: int, num_stages: int, floor_tokens: int = 0
) -> int:
    """Most tokens of a segment on ``num_stages`` stages, see the top of the file.

    Args:
        num_tokens: tokens of the forest.
        segment_tokens: most tokens of a segment on one stage (``--tree-segment-tokens``), which is not exceeded.
        memory_tokens: budget of in-flight tokens that the segments are planned with.
        floor_tokens: tokens of a segment that takes as long as its launches (``tokens_of_floor``).
    """
    if num_stages == 1:
        return segment_tokens
    enough = max(ENOUGH_TOKENS, _rounded(num_tokens / (SEGMENTS_PER_STAGE * num_stages)))
    size = min(enough, _rounded(memory_tokens / (SHARE_OF_BUDGET * num_stages)))
    at_floor = min(_rounded(floor_tokens), _rounded(memory_tokens / (2 * (num_stages - 1)))) if floor_tokens else 0
    return min(segment_tokens, max(size, at_floor))


def plan_pipeline_segments(
    tree: PrefixTree,
    segment_tokens: int,
    memory_tokens: int | None,
    num_stages: int,
    max_in_flight_tokens: int | None = None,
    floor_tokens: int = 0,
) -> SegmentPlan:
    """``plan_segments`` with the size for a pipeline and the budget of a single stage.

    With ``max_in_flight_tokens`` the budget leaves the pipeline a third of that limit, where sequences allow it.

    Raises InputError as ``plan_segments`` does, and for a limit below the longest sequence.
    """
    memory_tokens = _budget(tree, segment_tokens, memory_tokens, max_in_flight_tokens)
    size = pipeline_segment_tokens(tree.num_tokens, segment_tokens, memory_tokens, num_stages, floor_tokens)
    return plan_segments(tree, size, memory_tokens)


@dataclass(frozen=True)
class PipelinePlan:
    """Segments and their schedule.

    Attributes:
        segments: the segments.
        costs: their times.
        schedule: the op lists.
        timeline: its simulation.
        limit: most tokens in flight that the schedule was allowed.
        one_stage_tokens: tokens that one stage alone has in flight.
    """

    segments: SegmentPlan
    costs: PipelineCosts
    schedule: PipelineSchedule
    timeline: Timeline
    limit: int
    one_stage_tokens: int

    @property
    def ideal_utilisation(self) -> float:
        """N / (N + P - 1), which segments of equal times reach."""
        return ideal_utilisation(self.segments.num_segments, self.schedule.num_stages)


def ideal_utilisation(num_segments: int, num_stages: int) -> float:
    """N / (N + P - 1): utilisation of plain 1F1B over N equal microbatches; 1 for none."""
    return num_segments / (num_segments + num_stages - 1) if num_segments else 1.0


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
    pipeline_tokens: int | None = None,
    floor_tokens: int = 0,
) -> PipelinePlan:
    """Segments and schedule with the size of segments chosen by simulation.

    What one stage has in flight is the peak of its own plan (``segment_tokens`` at most), or that of the chosen
    segments depth first where it is less; the schedule may have 1.5 times as much. Sizes from
    ``pipeline_segment_tokens`` downwards are tried until one reaches 0.95 of N / (N + P - 1); else the fastest counts.

    Args:
        costs_of: times of a plan's segments on all virtual stages.
        segment_tokens, memory_tokens: as for ``plan_segments``, of one stage.
        max_in_flight_tokens: limit in place of 1.5 times one stage's.
        pipeline_tokens: most tokens of a segment in the pipeline; None to choose.
        floor_tokens: see ``pipeline_segment_tokens``; smaller segments are not tried.
    """
    memory_tokens = _budget(tree, segment_tokens, memory_tokens, max_in_flight_tokens)
    alone = plan_segments(tree, segment_tokens, memory_tokens)
    if pipeline_tokens is None:
        largest = pipeline_segment_tokens(tree.num_tokens, segment_tokens, memory_tokens, num_stages, floor_tokens)
        sizes = _sizes(largest, min(floor_tokens, largest)) if num_stages > 1 else [largest]
    else:
        sizes = [pipeline_tokens]
    best: PipelinePlan | None = None
    for size in sizes:
        segments = alone if size == segment_tokens else plan_segments(tree, size, memory_tokens)
        one_stage = min(alone.peak_in_flight_tokens, segments.peak_in_flight_tokens)
        limit = max_in_flight_tokens
        if limit is None:
            limit = max(int(DEFAULT_FACTOR * one_stage), segments.peak_in_flight_tokens)
        costs = costs_of(segments)
        schedule = plan_pipeline(
            segments.segment_parent,
            segments.lengths,
            costs,
            num_stages,
            num_chunks,
            limit,
            split_backward,
            send_seconds,
        )
        timeline = simulate(schedule, segments.segment_parent, costs, send_seconds)
        plan = PipelinePlan(segments, costs, schedule, timeline, limit, one_stage)
        if best is None or timeline.makespan < best.timeline.makespan:
            best = plan
        if timeline.utilisation >= NEAR_IDEAL * plan.ideal_utilisation:
            return plan
    assert best is not None
    return best


def _budget(tree: PrefixTree, segment_tokens: int, memory_tokens: int | None, limit: int | None) -> int:
    """In-flight tokens that segments are planned with."""
    longest = int(tree.sequence_lengths.max(initial=0))
    if memory_tokens is None:
        memory_tokens = default_memory_tokens(tree, segment_tokens)
    if limit is None:
        return memory_tokens
    if limit < longest:
        raise InputError(
            f"--pipeline-in-flight-tokens {limit} is less than the longest sequence ({longest} tokens), all of which "
            "is in flight when its last segment runs"
        )
    return min(memory_tokens, max(longest, int(limit / DEFAULT_FACTOR)))


def _sizes(largest: int, least: int) -> list[int]:
    """The sizes to try from ``largest`` down to ``least`` (to a granule), largest first."""
    sizes = {_rounded(largest * part) for part in PARTS}
    least = max(min(LEAST_TRIED, largest), _rounded(least) if least else 0)
    return sorted((size for size in sizes if size >= least), reverse=True)


def _rounded(tokens: float) -> int:
    """Down to a multiple of the granule where there is one, and at least 1."""
    whole = int(tokens)
    return whole // GRANULE * GRANULE if whole >= GRANULE else max(1, whole)
