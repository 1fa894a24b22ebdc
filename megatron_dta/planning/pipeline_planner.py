"""Chooses how forwards and backwards of a segment tree interleave on every stage of a pipeline.

The orders of forwards and of backwards are fixed (see ``pipeline_schedule``). Between segments of equal times the
static schedule is best; between unequal ones it leaves stages waiting for each other. So several schedules are made
under one limit on the tokens in flight, each is run against the table of times, and the fastest is taken; among equals
that with least in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.planning.pipeline_costs import PipelineCosts
from megatron_dta.planning.pipeline_list_schedule import Policy, list_schedule, longest_path_tokens, pipeline_of
from megatron_dta.planning.pipeline_schedule import PipelineSchedule, peak_in_flight, tree_1f1b
from megatron_dta.planning.pipeline_simulation import simulate

POLICIES = (
    Policy(),
    Policy(alternate=True),
    Policy(patience=0.3),
    Policy(deep_first=False),
    Policy(deep_first=False, alternate=True),
)
# A stage may by default have this many times in flight what one stage alone has, depth first.
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
    """The fastest schedule found, deterministically: the same input gives the same schedule on every rank.

    Args:
        segment_parent: int [N], the segment tree in preorder, -1 at roots.
        lengths: int [N], tokens of each segment.
        costs: times on V = num_stages * num_chunks virtual stages.
        max_in_flight_tokens: most tokens in flight on a stage, counted as in ``peak_in_flight``; None for the larger
            of 1.5 times the longest root path and what the static schedule has in flight on that stage.
        split_backward: plan input and weight gradients as ops of their own.
        send_seconds: time that a message takes from rank to rank.

    Raises:
        ValueError: arrays that do not fit together, or a limit below the longest root path, which is in flight at its
            last segment.
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
        raise ValueError(
            f"a limit of {max_in_flight_tokens} tokens in flight is below the longest root path of the segments, "
            f"{path} tokens, all of which are in flight at its last segment"
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
    candidates = [list_schedule(pipeline, policy)[0] for policy in POLICIES]
    fits = all(peak <= limit for peak, limit in zip(peak_in_flight(static, tokens), limits, strict=True))
    if num_chunks == 1 and not split_backward and fits:
        candidates.insert(0, static)
    return min(
        candidates,
        key=lambda each: (simulate(each, parents, costs, send_seconds).makespan, max(peak_in_flight(each, tokens))),
    )
