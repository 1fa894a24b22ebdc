"""Assigns sequence runs to ranks.

Candidates are contiguous runs in depth-first order with the smallest maximum cost (threshold search), and runs of
several sizes, cut where neighbours share least and placed one by one, costliest first, each on the rank whose own cost
and added cost are lowest. The caller takes the one with the fastest slowest rank.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.core.planning.partition.sequence_runs import SequenceRuns

# Above this many runs per rank and in total, runs are joined to longer ones before the search.
MOST_PER_RANK = 64
MOST_RUNS = 4096
# Placed runs cost at most a rank's share divided by the first number. The second one weights the cost that a run adds
# to a rank, relative to the rank's present cost: above 1, runs go where they share more.
PLACEMENTS = ((1.0, 4.0), (2.0, 4.0), (4.0, 4.0), (8.0, 4.0), (16.0, 4.0), (32.0, 1.0))


def candidates(runs: SequenceRuns, num_ranks: int, units: np.ndarray) -> list[np.ndarray]:
    """Candidates for the ranks of every run, int64 [K] each; at least one.

    Args:
        runs: the runs that are never cut.
        num_ranks: data-parallel size.
        units: runs at which the placed runs may begin.
    """
    if num_ranks == 1 or len(runs) < 2:
        return [np.zeros(len(runs), dtype=np.int64)]
    # Lower bound on the slowest rank: the mean cost without duplicates, or the costliest run.
    share = max(float((runs.cost - runs.shared[runs.begin]).sum()) / num_ranks, float(runs.cost.max()))
    first, coarse = units, runs.joined(units)
    if len(first) > max(MOST_RUNS, MOST_PER_RANK * num_ranks):
        first = first[coarse.cut(share / MOST_PER_RANK)]
        coarse = runs.joined(first)
    contiguous = coarse.even_runs(num_ranks)
    ranks = [_spread(np.arange(len(contiguous)), contiguous, len(coarse))]
    for fineness, weight in PLACEMENTS:
        begin = coarse.cut(share / fineness)
        ranks.append(_spread(_place(coarse.joined(begin), num_ranks, weight), begin, len(coarse)))
    return [_spread(rank, first, len(runs)) for rank in ranks]


def _spread(value: np.ndarray, begin: np.ndarray, count: int) -> np.ndarray:
    """The value of each run, repeated for each of the ``count`` runs that it joins."""
    return np.repeat(value, np.diff(np.append(begin, count)))


def _place(runs: SequenceRuns, num_ranks: int, weight: float) -> np.ndarray:
    """Place runs, costliest first, on the rank with the least sum of its cost and ``weight`` x the added cost."""
    count, ranks = len(runs), np.arange(num_ranks)
    # Sorted: the runs of every rank between -1 and ``count``, which stand for no neighbour.
    keys = np.stack([ranks * (count + 2), ranks * (count + 2) + count + 1], axis=1).ravel()
    cost, rank_of = np.zeros(num_ranks), np.zeros(count, dtype=np.int64)
    for run in np.argsort(-runs.cost, kind="stable").tolist():
        position = np.searchsorted(keys, ranks * (count + 2) + run + 1)
        before, after = keys[position - 1] % (count + 2) - 1, keys[position] % (count + 2) - 1
        self_run = np.full(num_ranks, run)
        shared = runs.between_held(np.stack([before, self_run, before]), np.stack([self_run, after, after]))
        added = runs.cost[run] - shared[0] - shared[1] + shared[2]
        rank = int((cost + weight * added).argmin())
        keys = np.insert(keys, position[rank], rank * (count + 2) + run + 1)
        cost[rank] += added[rank]
        rank_of[run] = rank
    return rank_of
