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

This is a rule, which takes no time, so it is what training goes by at every step; ``pipeline_choice`` simulates, which
takes seconds.
"""

from __future__ import annotations

import math

from megatron_dta.common.errors import InputError
from megatron_dta.planning.costs.model import CostModel
from megatron_dta.planning.pipeline.planner import DEFAULT_FACTOR
from megatron_dta.planning.segments.cut import default_memory_tokens, plan_segments
from megatron_dta.planning.segments.plan import SegmentPlan
from megatron_dta.tree import PrefixTree

SHARE_OF_BUDGET = 2.5
GRANULE = 64  # Sizes are multiples of it where they are larger: blocks of the attention kernels.
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
    enough = max(ENOUGH_TOKENS, rounded(num_tokens / (SEGMENTS_PER_STAGE * num_stages)))
    size = min(enough, rounded(memory_tokens / (SHARE_OF_BUDGET * num_stages)))
    at_floor = min(rounded(floor_tokens), rounded(memory_tokens / (2 * (num_stages - 1)))) if floor_tokens else 0
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
    memory_tokens = in_flight_budget(tree, segment_tokens, memory_tokens, max_in_flight_tokens)
    size = pipeline_segment_tokens(tree.num_tokens, segment_tokens, memory_tokens, num_stages, floor_tokens)
    return plan_segments(tree, size, memory_tokens)


def ideal_utilisation(num_segments: int, num_stages: int) -> float:
    """N / (N + P - 1): utilisation of plain 1F1B over N equal microbatches; 1 for none."""
    return num_segments / (num_segments + num_stages - 1) if num_segments else 1.0


def in_flight_budget(tree: PrefixTree, segment_tokens: int, memory_tokens: int | None, limit: int | None) -> int:
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


def rounded(tokens: float) -> int:
    """Down to a multiple of the granule where there is one, and at least 1."""
    whole = int(tokens)
    return whole // GRANULE * GRANULE if whole >= GRANULE else max(1, whole)
