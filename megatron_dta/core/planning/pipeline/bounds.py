"""Lower bound on the makespan of any schedule of a pipeline.

Every schedule with the fixed orders of ``planning.pipeline.schedule`` takes at least as long as each of these:

work     a rank computes all of its ops. Its first op waits for the first segment's forwards on the earlier stages, and
         after its last op the last segment's backwards run on the earlier stages
chains   on each virtual stage, every forward follows the previous forward and every backward the previous backward; the
         bound is the longest path through these and the dependencies between ops
memory   a segment is in flight on virtual stage v for at least the time to pass from v to any later virtual stage u, to
         run its whole subtree there, and to come back; the sum of tokens times time in flight is at most the rank's
         limit times the makespan

Example: 3 segments on 2 stages, each forward takes 1 and each backward 2. Stage 1 computes 9, starts at 1 and is
followed by a backward of 2 on stage 0: the makespan is at least 12.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.schedule import backward_order


def makespan_bound(
    segment_parent: np.ndarray | Sequence[int],
    lengths: np.ndarray | Sequence[int],
    costs: PipelineCosts,
    num_stages: int,
    num_model_chunks: int = 1,
    max_in_flight_tokens: float | None = None,
) -> float:
    """Compute the lower bound; the unit of time is that of ``costs``.

    Args:
        segment_parent, lengths, costs, num_stages, num_model_chunks: see ``plan_pipeline``.
        max_in_flight_tokens: limit on every stage, counted as in ``peak_in_flight``; None means no limit.
    """
    parents, tokens = np.asarray(segment_parent).tolist(), np.asarray(lengths, dtype=np.float64)
    if not parents:
        return 0.0
    forward, backward = np.asarray(costs.forward, dtype=np.float64), np.asarray(costs.backward, dtype=np.float64)
    last = backward_order(parents)[-1]
    bound = _chain_bound(parents, forward, backward)
    for stage in range(num_stages):
        chunks = slice(stage, None, num_stages)
        head, tail = forward[:stage, 0].sum(), backward[:stage, last].sum()
        bound = max(bound, head + forward[chunks].sum() + backward[chunks].sum() + tail)
    if max_in_flight_tokens:
        in_flight = _time_in_flight(parents, forward, backward) @ tokens
        for stage in range(num_stages):
            bound = max(bound, in_flight[stage::num_stages].sum() / (num_model_chunks * max_in_flight_tokens))
    return float(bound)


def _chain_bound(parents: list[int], forward: np.ndarray, backward: np.ndarray) -> float:
    """End of the last backward if ops of different virtual stages never wait for the same rank."""
    begun = np.zeros(len(parents))
    forward_end = []
    for times in forward:
        # end[k] = max(end[k - 1], begun[k]) + times[k], as a running maximum of begun[k] - (times before k).
        before = np.cumsum(times) - times
        begun = np.maximum.accumulate(begun - before) + before + times
        forward_end.append(begun)
    order = np.asarray(backward_order(parents))
    ready = np.zeros(len(parents))
    for v in range(len(backward) - 1, -1, -1):
        times = backward[v, order]
        ready = np.maximum(ready, forward_end[v][order])
        before = np.cumsum(times) - times
        ready = np.maximum.accumulate(ready - before) + before + times
    return float(ready[-1])


def _time_in_flight(parents: list[int], forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Minimum time from the start of each segment's forward to the end of its backward, float64 [V, N]."""
    both = forward + backward
    below = both.copy()
    for segment in range(len(parents) - 1, -1, -1):
        if parents[segment] >= 0:
            below[:, parents[segment]] += below[:, segment]
    result = np.empty_like(both)
    longest = np.zeros(len(parents))
    for v in range(len(both) - 1, -1, -1):
        # Either the subtree runs here, or the segment passes to the next virtual stage and comes back.
        longest = np.maximum(below[v], both[v] + longest)
        result[v] = longest
    return result
