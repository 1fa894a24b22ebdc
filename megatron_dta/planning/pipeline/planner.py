"""Chooses how the forwards and backwards of a segment tree interleave on every stage of a pipeline.

The orders of forwards and of backwards are fixed (see ``planning.pipeline.schedule``). The static schedule is the best
one for segments of equal times; for unequal times its stages wait for each other. The planner therefore builds several
schedules under one limit on the tokens in flight, simulates each with the given times, and returns the fastest; among
equally fast ones, the one with the fewest tokens in flight. It tries, in this order:

1. the static schedule ``tree_1f1b``;
2. list schedules with a few policies, built from the start and, mirrored, from the end;
3. forward-backward improvement of the best of these (K. Y. Li and R. J. Willis, European Journal of Operational
   Research 56, 1992): each pass builds the schedule in the other direction of time and gives priority to the ops that
   ended last in the previous pass.

The search ends early at a schedule that reaches the lower bound (``makespan_bound``) within 0.1%.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_dta.common.errors import InputError
from megatron_dta.planning.pipeline.bounds import makespan_bound
from megatron_dta.planning.pipeline.costs import PipelineCosts
from megatron_dta.planning.pipeline.list_schedule import (
    Outcome,
    Pipeline,
    Policy,
    list_schedule,
    longest_path_tokens,
    pipeline_of,
)
from megatron_dta.planning.pipeline.schedule import PipelineSchedule, peak_in_flight, tree_1f1b
from megatron_dta.planning.pipeline.simulation import simulate

# (mirrored, policy), the most useful ones first. CHUNK_STARTS are added if a rank has several model chunks.
STARTS = (
    (False, Policy()),
    (False, Policy(alternate=True, patience=0.1)),
    (True, Policy(alternate=True, patience=0.1)),
    (True, Policy()),
    (False, Policy(alternate=True)),
    (True, Policy(alternate=True, patience=0.3)),
    (False, Policy(alternate=True, patience=0.2)),
    (True, Policy(alternate=True)),
)
CHUNK_STARTS = (
    (False, Policy(deep_first=False)),
    (True, Policy(deep_first=False)),
    (False, Policy(deep_first=False, alternate=True)),
    (True, Policy(deep_first=False, alternate=True)),
)
IMPROVED = 3  # Number of best starts that are improved.
PASSES = 6  # Improvement passes of each.
PATIENCES = (0.0, 0.3)  # Patiences tried in each pass.
# Ops placed in the whole search. Large pipelines get fewer list schedules, and gain less from them.
MAX_OPS = 100_000
MIN_RUNS = 6
# The search ends at a makespan of this many times the lower bound.
NEAR_BOUND = 1.001
# Default limit on the tokens in flight on a stage, over those of a single stage that runs depth first.
DEFAULT_FACTOR = 1.5


def plan_pipeline(
    segment_parent: np.ndarray | Sequence[int],
    lengths: np.ndarray | Sequence[int],
    costs: PipelineCosts,
    num_stages: int,
    num_chunks: int = 1,
    max_in_flight_tokens: int | None = None,
    split_backward: bool = False,
    send_seconds: float = 0.0,
) -> PipelineSchedule:
    """Return the fastest schedule found. Deterministic: the same input gives the same schedule on every rank.

    Args:
        segment_parent: int [N], the segment tree in preorder, -1 at roots.
        lengths: int [N], tokens of each segment.
        costs: times on V = num_stages * num_chunks virtual stages.
        num_stages, num_chunks: pipeline ranks, and model chunks (virtual stages) of each.
        max_in_flight_tokens: limit on the tokens in flight on a stage, counted as in ``peak_in_flight``; None for the
            larger of 1.5 times the longest root path and the peak of the static schedule on that stage.
        split_backward: plan input and weight gradients as separate ops.
        send_seconds: time of a message between ranks.

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
    path = longest_path_tokens(parents, tokens)
    static = tree_1f1b(parents, num_stages)
    if max_in_flight_tokens is None:
        limits = [max(int(DEFAULT_FACTOR * path), int(peak)) for peak in peak_in_flight(static, tokens)]
    elif max_in_flight_tokens < path:
        raise InputError(
            f"--pipeline-in-flight-tokens {max_in_flight_tokens} is below the longest root path of the segments, "
            f"{path} tokens, all of which are in flight at its last segment; raise it, or lower --tree-memory-tokens"
        )
    else:
        limits = [max_in_flight_tokens] * num_stages
    pipeline = pipeline_of(
        parents,
        tokens,
        costs,
        num_stages,
        num_chunks,
        [num_chunks * limit for limit in limits],
        split_backward,
        send_seconds,
    )
    if num_stages == 1:
        return list_schedule(pipeline, Policy()).schedule  # Depth first: never idle, fewest tokens in flight.
    limit = max(limits, default=0)
    bound = makespan_bound(parents, tokens, costs, num_stages, num_chunks, limit, split_backward)
    fits = all(peak <= limit for peak, limit in zip(peak_in_flight(static, tokens), limits, strict=True))
    best: tuple[float, float] | None = None
    for schedule in _schedules(pipeline, static if fits else None):
        makespan = simulate(schedule, parents, costs, send_seconds).makespan
        if best is None or (makespan, max(peak_in_flight(schedule, tokens))) < best:
            best, result = (makespan, max(peak_in_flight(schedule, tokens))), schedule
        if best[0] <= NEAR_BOUND * bound:
            break
    return result


def _schedules(pipeline: Pipeline, static: PipelineSchedule | None) -> Iterator[PipelineSchedule]:
    """Yield the schedules to compare, in the order of the module's docstring."""
    split = pipeline.weight is not None
    if static is not None and pipeline.num_chunks == 1 and not split:
        yield static
    starts = STARTS + (CHUNK_STARTS if pipeline.num_chunks > 1 else ())
    runs = max(MIN_RUNS, MAX_OPS // max(1, pipeline.num_ops))
    if split:
        starts = tuple((mirrored, policy) for mirrored, policy in starts if not mirrored)
    else:
        starts = starts[: max(3, runs // 2)]
    sides = (pipeline, pipeline if split else pipeline.mirrored())
    outcomes: list[tuple[float, int, bool, Outcome]] = []
    for number, (mirrored, policy) in enumerate(starts):
        outcome = list_schedule(sides[mirrored], policy)
        outcomes.append((outcome.makespan, number, mirrored, outcome))
        yield _unmirrored(sides, mirrored, outcome)
    if split:
        return
    runs -= len(starts)
    for _, _, mirrored, outcome in sorted(outcomes, key=lambda each: each[:2])[:IMPROVED]:
        for _ in range(PASSES):
            if runs < len(PATIENCES):
                return
            urgency = outcome.mirrored_urgency(sides[mirrored].backwards)
            mirrored = not mirrored
            passes = [list_schedule(sides[mirrored], Policy(patience=each), urgency) for each in PATIENCES]
            outcome = min(passes, key=lambda each: each.makespan)
            runs -= len(passes)
            yield _unmirrored(sides, mirrored, outcome)


def _unmirrored(sides: tuple[Pipeline, Pipeline], mirrored: bool, outcome: Outcome) -> PipelineSchedule:
    return outcome.mirrored_schedule(sides[1].backwards) if mirrored else outcome.schedule
