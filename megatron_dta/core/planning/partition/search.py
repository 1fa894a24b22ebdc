"""Searches for the partition of a forest whose slowest rank is fastest.

1. Starts: contiguous runs in depth-first order with the smallest maximum cost (threshold search), and runs cut where
   neighbours share least, placed one by one, costliest first (``_place``).
2. Each start is refined (``refine``): runs move from the slowest rank or are swapped, first large runs, then smaller
   ones, down to single sequences.

Ranks that share experts also wait for each other in every op. Even ranks are then not enough: their trees must also
have similar shapes. ``greedy_divisions`` makes further divisions, without refinement, for the caller to compare.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from megatron_dta.core.planning.partition.assignment import Assignment
from megatron_dta.core.planning.partition.sequence_runs import SequenceRuns

# Above this many places per rank and in total, places are joined to runs before the search.
MOST_PER_RANK = 64
MOST_PLACES = 4096
# Larger forests are not refined down to single sequences; their ranks are even without it.
MOST_REFINED = 1 << 14
# The runs of a start cost at most a rank's share divided by one of these.
START_FINENESS = (1.0, 3.0, 6.0, 10.0)
# The refinement down to single sequences is used if it makes the slowest rank 1% faster for at most this many percent
# more cost in total.
WEIGHT_OF_SLOWEST = 2.0
# Runs per rank's share, and number of runs per rank, in divisions without refinement.
GREEDY_FINENESS = (16.0, 64.0)
GREEDY_NUMBERS = (8, 16, 32)
# Weight of the cost that a run adds to a rank, relative to the rank's present cost.
ADDED_WEIGHT = 4.0
# Slowest rank over mean at which no further start is tried.
GOOD_START = 1.004
# Runs per rank's share in each step of the refinement; None for the runs as they are.
FINENESS = (4.0, 16.0, None)
# Slowest rank over mean at which refinement stops, and most changes in one step of it.
GOOD = 1.002
CHANGES = 200


def assign(runs: SequenceRuns, num_ranks: int, units: np.ndarray) -> np.ndarray:
    """Rank of every run, int64 [K]. Ranks stay idle if using them would not make the slowest rank faster.

    Args:
        runs: the runs that are never cut.
        num_ranks: data-parallel size.
        units: runs at which the longer runs of the coarse search begin.
    """
    if num_ranks == 1 or len(runs) < 2:
        return np.zeros(len(runs), dtype=np.int64)
    share = _share(runs, num_ranks)
    first, coarse = _coarse(runs, num_ranks, units, share)
    if len(coarse) <= num_ranks:
        best = Assignment(coarse, _contiguous(coarse, num_ranks), num_ranks)
    else:
        best = _search(coarse, num_ranks, share)
    rank = _spread(best.rank, first, len(runs))
    if len(coarse) < len(runs) <= MOST_REFINED and best.cost.max() > GOOD * best.cost.mean():
        found = refine(runs, rank, num_ranks, share)
        # A little less time on the slowest rank is not worth much more duplicated work on the others.
        if (found.cost.max() / best.cost.max()) ** WEIGHT_OF_SLOWEST * found.cost.sum() < best.cost.sum():
            rank = found.rank
    return rank


def greedy_divisions(runs: SequenceRuns, num_ranks: int, units: np.ndarray) -> list[np.ndarray]:
    """Ranks of every run in further divisions; arguments as in ``assign``.

    Each rank gets one run; or runs of at most a given cost, or a given number of runs that share least with their
    neighbours (such as the samples of a prompt), are placed costliest first, each on the rank with the least cost.
    """
    if num_ranks == 1 or len(runs) < 2:
        return []
    share = _share(runs, num_ranks)
    first, coarse = _coarse(runs, num_ranks, units, share)
    least_shared = 1 + np.argsort(coarse.shared[coarse.begin[1:]], kind="stable")
    cuts = [coarse.cut(share / fineness) for fineness in GREEDY_FINENESS]
    cuts += [np.append(0, np.sort(least_shared[: number * num_ranks - 1])) for number in GREEDY_NUMBERS]
    found = [_contiguous(coarse, num_ranks)]
    found += [_spread(_greedy(coarse.joined(begin).cost, num_ranks), begin, len(coarse)) for begin in cuts]
    different = {rank.tobytes(): rank for rank in found}
    return [_spread(rank, first, len(runs)) for rank in different.values()]


def _greedy(cost: np.ndarray, num_ranks: int) -> np.ndarray:
    """The rank of each run, placed costliest first on the rank with the least cost."""
    of_rank, rank = [0.0] * num_ranks, np.zeros(len(cost), dtype=np.int64)
    for run in np.argsort(-cost, kind="stable").tolist():
        rank[run] = of_rank.index(min(of_rank))
        of_rank[rank[run]] += cost[run]
    return rank


def _coarse(runs: SequenceRuns, num_ranks: int, units: np.ndarray, share: float) -> tuple[np.ndarray, SequenceRuns]:
    """First of ``runs`` in each of the longer runs that are searched, and these."""
    first, coarse = units, runs.joined(units)
    if len(first) > max(MOST_PLACES, MOST_PER_RANK * num_ranks):
        first = first[coarse.cut(share / MOST_PER_RANK)]
        coarse = runs.joined(first)
    return first, coarse


def _share(runs: SequenceRuns, num_ranks: int) -> float:
    """Lower bound on the slowest rank: the mean cost without duplicates, or the costliest run."""
    return max(float((runs.cost - runs.shared[runs.begin]).sum()) / num_ranks, float(runs.cost.max()))


def _spread(value: np.ndarray, begin: np.ndarray, count: int) -> np.ndarray:
    """The value of each run, repeated for each of the ``count`` runs that it joins."""
    return np.repeat(value, np.diff(np.append(begin, count)))


def _contiguous(runs: SequenceRuns, num_ranks: int) -> np.ndarray:
    """Ranks of contiguous runs with the smallest maximum cost."""
    begin = runs.even_runs(num_ranks)
    return _spread(np.arange(len(begin)), begin, len(runs))


def _search(runs: SequenceRuns, num_ranks: int, share: float) -> Assignment:
    """The best partition found."""
    found = [refine(runs, _contiguous(runs, num_ranks), num_ranks, share)]
    for fineness in START_FINENESS:
        if len(found) > 2 and min(a.cost.max() / a.cost.mean() for a in found) <= GOOD_START:
            break
        begin = runs.cut(share / fineness)
        start = _spread(_place(runs.joined(begin), num_ranks), begin, len(runs))
        found.append(refine(runs, start, num_ranks, share))
    return min(found, key=Assignment.score)


def _place(runs: SequenceRuns, num_ranks: int) -> np.ndarray:
    """Place runs, costliest first, on the rank with the least sum of its cost and ``ADDED_WEIGHT`` x the added cost."""
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    cost = np.zeros(num_ranks)
    rank_of = np.zeros(len(runs), dtype=np.int64)
    for run in np.argsort(-runs.cost, kind="stable").tolist():
        places = [bisect_left(mine, run) for mine in held]
        before = np.array([mine[p - 1] if p else -1 for mine, p in zip(held, places, strict=True)])
        after = np.array([mine[p] if p < len(mine) else len(runs) for mine, p in zip(held, places, strict=True)])
        shared = runs.between_held(before, run) + runs.between_held(run, after)
        added = runs.cost[run] - shared + runs.between_held(before, after)
        rank = int((cost + ADDED_WEIGHT * added).argmin())
        insort(held[rank], run)
        cost[rank] += added[rank]
        rank_of[run] = rank
    return rank_of


def refine(runs: SequenceRuns, rank: np.ndarray, num_ranks: int, share: float) -> Assignment:
    """Even out the costs of the ranks."""
    for fineness in FINENESS:
        # Runs of a part of the share that are each on one rank.
        apart = np.append(True, rank[1:] != rank[:-1])
        begin = runs.cut(share / fineness, apart) if fineness else np.arange(len(runs))
        found = Assignment(runs.joined(begin), rank[begin], num_ranks)
        found.relieve(CHANGES, GOOD)
        rank = _spread(found.rank, begin, len(runs))
        if found.cost.max() <= GOOD * found.cost.mean():
            break
    return Assignment(runs, rank, num_ranks)
