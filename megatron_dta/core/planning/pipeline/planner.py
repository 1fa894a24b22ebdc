"""Chooses how the forwards and backwards of a segment tree interleave on every stage of a pipeline.

The orders of forwards and of backwards are fixed (see ``planning.pipeline.schedule``). The static schedule is the best
one for segments of equal times; for unequal times its stages wait for each other. The planner therefore compares
several schedules under one limit on the tokens in flight, by simulation with the given times:

1. the static schedule ``tree_1f1b``;
2. a list schedule that alternates forwards and backwards, and one that is built from the end (mirrored);
3. forward-backward improvement of both list schedules (K. Y. Li and R. J. Willis, European Journal of Operational
   Research 56, 1992): each pass builds the schedule in the other direction of time and gives priority to the ops that
   ended last in the previous pass.

The search ends early at a schedule that reaches the lower bound (``makespan_bound``) within 0.1%.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.pipeline.bounds import makespan_bound
from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.list_schedule import (
    Outcome,
    Pipeline,
    Policy,
    list_schedule,
    longest_path_tokens,
)
from megatron_dta.core.planning.pipeline.schedule import PipelineSchedule, backward_order, peak_in_flight, tree_1f1b
from megatron_dta.core.planning.pipeline.simulation import op_times, simulate
from megatron_dta.core.planning.segments.plan import OpKind

# (mirrored, policy) of the list schedules that are improved, and the patiences tried in each pass of the improvement.
STARTS = ((False, Policy(alternate=True, patience=0.1)), (True, Policy()))
PATIENCES = (0.0, 0.3)
# Maximum number of passes of each start, and ops placed in the whole search. Large pipelines get fewer passes, and gain
# less.
PASSES = 6
MAX_OPS = 100_000
# The search ends at a makespan of this many times the lower bound.
NEAR_BOUND = 1.001
# Default limit on the tokens in flight on a stage, over those of a single stage that runs depth first.
DEFAULT_FACTOR = 1.5


def plan_pipeline(
    segment_parent: np.ndarray | Sequence[int],
    lengths: np.ndarray | Sequence[int],
    costs: PipelineCosts,
    num_stages: int,
    num_model_chunks: int = 1,
    max_in_flight_tokens: int | None = None,
) -> PipelineSchedule:
    """Return the fastest schedule found. Deterministic: the same input gives the same schedule on every rank.

    Args:
        segment_parent: int [N], the segment tree in preorder, -1 at roots.
        lengths: int [N], tokens of each segment.
        costs: times on V = num_stages * num_model_chunks virtual stages.
        num_stages, num_model_chunks: pipeline ranks, and model chunks (virtual stages) of each.
        max_in_flight_tokens: limit on the tokens in flight on a stage, counted as in ``peak_in_flight``; None for the
            larger of 1.5 times the longest root path and the peak of the static schedule on that stage.

    Raises:
        InputError: the limit is below the longest root path, all of which is in flight at its last segment.
        ValueError: the shapes of the arrays do not match, or a size is below 1.
    """
    parents, tokens = np.asarray(segment_parent).tolist(), np.asarray(lengths).tolist()
    if num_stages < 1 or num_model_chunks < 1:
        raise ValueError(f"{num_stages} stages of {num_model_chunks} chunks: both must be at least 1")
    if len(tokens) != len(parents) or np.shape(costs.forward) != (num_stages * num_model_chunks, len(parents)):
        raise ValueError(
            f"{len(parents)} segments, {len(tokens)} lengths and costs of shape {np.shape(costs.forward)} do not fit "
            f"{num_stages} stages of {num_model_chunks} chunks"
        )
    limits, times = in_flight_limits(parents, tokens, num_stages, max_in_flight_tokens), op_times(costs)
    pipeline = Pipeline(
        num_stages,
        num_model_chunks,
        parents,
        backward_order(parents),
        tokens,
        times[OpKind.FORWARD],
        times[OpKind.BACKWARD],
        [num_model_chunks * limit for limit in limits],
    )
    if num_stages == 1:
        return list_schedule(pipeline, Policy()).schedule  # Depth first: never idle, fewest tokens in flight.
    static = tree_1f1b(parents, num_stages)
    fits = all(peak <= limit for peak, limit in zip(peak_in_flight(static, tokens), limits, strict=True))
    bound = makespan_bound(parents, tokens, costs, num_stages, num_model_chunks, max(limits))
    best: tuple[float, float] | None = None
    starts = [static] if fits and num_model_chunks == 1 else []
    for schedule in chain(starts, _list_schedules(pipeline)):
        result_cost = simulate(schedule, parents, costs).makespan, max(peak_in_flight(schedule, tokens))
        if best is None or result_cost < best:
            best, result = result_cost, schedule
        if best[0] <= NEAR_BOUND * bound:
            break
    return result


def _list_schedules(pipeline: Pipeline) -> Iterator[PipelineSchedule]:
    """Yield the list schedules to compare, in the order of the module's docstring."""
    sides = pipeline, pipeline.mirrored()
    outcomes = [(mirrored, list_schedule(sides[mirrored], policy)) for mirrored, policy in STARTS]
    num_ops = 2 * len(pipeline.parents) * len(pipeline.forward)
    passes = min(PASSES, max(1, MAX_OPS // (len(STARTS) * len(PATIENCES) * max(1, num_ops))))
    for mirrored, outcome in outcomes:
        yield _unmirrored(sides, mirrored, outcome)
    for mirrored, outcome in outcomes:
        for _ in range(passes):
            urgency = outcome.mirrored_urgency(sides[mirrored].backwards)
            mirrored = not mirrored
            tries = [
                list_schedule(sides[mirrored], Policy(patience=patience, urgency=urgency)) for patience in PATIENCES
            ]
            outcome = min(tries, key=lambda attempt: attempt.makespan)
            yield _unmirrored(sides, mirrored, outcome)


def _unmirrored(sides: tuple[Pipeline, Pipeline], mirrored: bool, outcome: Outcome) -> PipelineSchedule:
    return outcome.mirrored_schedule(sides[1].backwards) if mirrored else outcome.schedule


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
