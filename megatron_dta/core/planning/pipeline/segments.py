"""Chooses a pipeline's segment size by a rule: small enough to keep all stages busy within nearly one stage's memory.

A single stage that runs depth first has one root path of R tokens in flight. A pipeline of P stages without bubbles has
P - 1 more segments in flight on its first stage: R + (P - 1) S tokens for segments of S tokens. The rule sets S to at
most 1 / (2.5 P) of the limit on in-flight tokens with which segments are planned. The additional tokens are then below
0.4 R; a stage may have 0.5 R more than a single stage, so a fifth of that remains to balance unequal segments. For
example, a single stage with segments of 2,048 tokens and a limit of 16,384 becomes 8 stages with segments of 768.

For small forests S is reduced further, so that there are 4 segments per stage (N segments keep P stages busy for
N / (N + P - 1) of the time), but not below 256 tokens, where weights are read for too few tokens.

Launches by the host bound the time of a segment from below. A segment of S tokens takes max(floor, a S), and a step of
T tokens max(floor, a S) (T / S + P - 1). The minimum is at S = floor / a: smaller segments take as long each, and
larger ones increase the bubble. S is therefore at least that, as long as (P - 1) S is within half of the limit. Where
stages wait nevertheless, ``planning.pipeline.choice`` compares the rule's size with smaller ones.
"""

from __future__ import annotations

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.pipeline.planner import DEFAULT_FACTOR
from megatron_dta.core.planning.segments.plan import SegmentPlan, default_memory_tokens, plan_segments
from megatron_dta.core.tree import PrefixTree

SHARE_OF_BUDGET = 2.5
GRANULE = 64  # Larger sizes are multiples of this, a block of the attention kernels.
SEGMENTS_PER_STAGE = 4
ENOUGH_TOKENS = 256


def pipeline_segment_tokens(
    num_tokens: int, segment_tokens: int, memory_tokens: int, num_stages: int, floor_tokens: int = 0
) -> int:
    """Return the maximum tokens of a segment on ``num_stages`` stages by the rule of this module.

    Args:
        num_tokens: tokens of the forest.
        segment_tokens: maximum tokens of a segment on a single stage (``--tree-segment-tokens``); an upper limit.
        memory_tokens: limit on in-flight tokens with which the segments are planned.
        floor_tokens: tokens of a segment that takes as long as its launches (``CostModel.tokens_of_floor``).
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
    """Call ``plan_segments`` with the segment size of a pipeline and the memory limit of a single stage.

    With ``max_in_flight_tokens``, a third of that limit is left to the pipeline, if the longest sequence allows it.

    Raises InputError as ``plan_segments`` does, and if the limit is below the longest sequence.
    """
    memory_tokens = in_flight_budget(tree, segment_tokens, memory_tokens, max_in_flight_tokens)
    size = pipeline_segment_tokens(tree.num_tokens, segment_tokens, memory_tokens, num_stages, floor_tokens)
    return plan_segments(tree, size, memory_tokens)


def ideal_utilisation(num_segments: int, num_stages: int) -> float:
    """N / (N + P - 1): utilisation of plain 1F1B over N equal microbatches; 1 for none."""
    return num_segments / (num_segments + num_stages - 1) if num_segments else 1.0


def in_flight_budget(tree: PrefixTree, segment_tokens: int, memory_tokens: int | None, limit: int | None) -> int:
    """Limit on in-flight tokens with which segments are planned."""
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
    """Round down to a multiple of the granule if it is at least one, and to at least 1."""
    count = int(tokens)
    return count // GRANULE * GRANULE if count >= GRANULE else max(1, count)
