"""Chooses how the forwards and backwards of a segment tree interleave on every stage of a pipeline.

The orders of forwards and of backwards are fixed (see ``planning.pipeline.schedule``). The static schedule is the best
one for segments of equal times; for unequal times its stages wait for each other. The planner therefore compares it
with a list schedule under the same limit on the tokens in flight. It simulates both with the given times and returns
the faster one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.common.errors import InputError
from megatron_dta.planning.pipeline.costs import PipelineCosts
from megatron_dta.planning.pipeline.list_schedule import Pipeline, list_schedule, longest_path_tokens
from megatron_dta.planning.pipeline.schedule import PipelineSchedule, peak_in_flight, tree_1f1b
from megatron_dta.planning.pipeline.simulation import op_times, simulate
from megatron_dta.planning.segments.schedule import OpKind

# Default limit on the tokens in flight on a stage, over those of a single stage that runs depth first.
DEFAULT_FACTOR = 1.5


def plan_pipeline(
    segment_parent: np.ndarray | Sequence[int],
    lengths: np.ndarray | Sequence[int],
    costs: PipelineCosts,
    num_stages: int,
    num_chunks: int = 1,
    max_in_flight_tokens: int | None = None,
) -> PipelineSchedule:
    """Return the schedule that runs. Deterministic: the same input gives the same schedule on every rank.

    Args:
        segment_parent: int [N], the segment tree in preorder, -1 at roots.
        lengths: int [N], tokens of each segment.
        costs: times on V = num_stages * num_chunks virtual stages.
        num_stages, num_chunks: pipeline ranks, and model chunks (virtual stages) of each.
        max_in_flight_tokens: limit on the tokens in flight on a stage, counted as in ``peak_in_flight``; None for the
            larger of 1.5 times the longest root path and the peak of the static schedule on that stage.

    Raises:
        InputError: the limit is below the longest root path, all of which is in flight at its last segment.
        ValueError: the shapes of the arrays do not match, or a size is below 1.
    """
    parents, tokens = np.asarray(segment_parent).tolist(), np.asarray(lengths).tolist()
    if num_stages < 1 or num_chunks < 1:
        raise ValueError(f"{num_stages} stages of {num_chunks} chunks: both must be at least 1")
    if len(tokens) != len(parents) or np.shape(costs.forward) != (num_stages * num_chunks, len(parents)):
        raise ValueError(
            f"{len(parents)} segments, {len(tokens)} lengths and costs of shape {np.shape(costs.forward)} do not fit "
            f"{num_stages} stages of {num_chunks} chunks"
        )
    limits, times = in_flight_limits(parents, tokens, num_stages, max_in_flight_tokens), op_times(costs)
    of_ranks = [num_chunks * limit for limit in limits]
    pipeline = Pipeline(
        num_stages, num_chunks, parents, tokens, times[OpKind.FORWARD], times[OpKind.BACKWARD], of_ranks
    )
    found, static = list_schedule(pipeline), tree_1f1b(parents, num_stages)
    fits = all(peak <= limit for peak, limit in zip(peak_in_flight(static, tokens), limits, strict=True))
    if num_stages == 1 or num_chunks > 1 or not fits:
        return found
    return min(static, found, key=lambda schedule: simulate(schedule, parents, costs).makespan)


def in_flight_limits(
    segment_parent: np.ndarray | Sequence[int],
    lengths: np.ndarray | Sequence[int],
    num_stages: int,
    max_in_flight_tokens: int | None = None,
) -> list[int]:
    """Limit on the tokens in flight on each stage; arguments as in ``plan_pipeline``."""
    parents, tokens = np.asarray(segment_parent).tolist(), np.asarray(lengths).tolist()
    path = longest_path_tokens(parents, tokens)
    if max_in_flight_tokens is None:
        static = peak_in_flight(tree_1f1b(parents, num_stages), tokens)
        return [max(int(DEFAULT_FACTOR * path), int(peak)) for peak in static]
    if max_in_flight_tokens < path:
        raise InputError(
            f"--pipeline-in-flight-tokens {max_in_flight_tokens} is below the longest root path of the segments, "
            f"{path} tokens, all of which are in flight at its last segment; raise it, or lower --tree-memory-tokens"
        )
    return [max_in_flight_tokens] * num_stages
