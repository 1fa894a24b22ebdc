"""Searches for the partition of a forest whose slowest rank is fastest.

1. Starts: contiguous runs in depth-first order with the smallest maximum cost (threshold search), and runs cut where
   neighbours share least, placed one by one, costliest first (``_place``).
2. Each start is refined (``refine``): runs move from the slowest rank or are swapped, first large runs, then smaller
   ones, down to single sequences; then pairs of ranks divide their runs in a new way. Last, duplicated work is removed
   where no rank becomes slower than the slowest (``_deduplicate``).
3. A partition whose total cost exceeds that of plain contiguous runs is even at the price of duplicated work. If the
   best one does, the refinement is repeated under that bound (``_within``), and its result is used unless its slowest
   rank is clearly slower.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from megatron_dta.planning.partition.assignment import Assignment
from megatron_dta.planning.partition.deduplicate_work import deduplicate_work
from megatron_dta.planning.partition.sequence_runs import SequenceRuns

# Above this many places per rank and in total, places are joined to runs before the search.
MOST_PER_RANK = 64
MOST_PLACES = 4096
# Larger forests are not refined down to single sequences; their ranks are even without it.
MOST_REFINED = 1 << 14
# The runs of a start cost at most a rank's share divided by one of these.
START_FINENESS = (1.0, 3.0, 6.0, 10.0)
# Weight of the cost that a run adds to a rank, relative to the rank's present cost.
ADDED_WEIGHT = 4.0
# Slowest rank over mean at which no further start is tried.
GOOD_START = 1.004
# Runs per rank's share in each step of the refinement; None for the runs as they are.
FINENESS = (4.0, 16.0, None)
# Slowest rank over mean at which refinement stops, and most changes in one step of it.
GOOD = 1.002
CHANGES = 200
# For ``_within``: slowdowns of the slowest rank to try while total cost is brought below the bound; most rounds of
# refinement and deduplication, per start and in total; slowdown at which the search stops, and largest slowdown of an
# accepted result.
SLACK = (1.01, 1.03, 1.06, 1.1)
TURNS = 5
MOST_TURNS = 10
GOOD_WITHIN = 1.01
WORTH = 1.03
DEDUPLICATION_FINENESS = 16.0
DEDUPLICATION_ROUNDS = 12


def assign(atoms: SequenceRuns, num_ranks: int, units: np.ndarray, contiguous: np.ndarray | None) -> np.ndarray:
    """Rank of every atom, int64 [K]. Ranks stay idle if using them would not make the slowest rank faster.

    Args:
        atoms: the runs that are never cut.
        num_ranks: data-parallel size.
        units: atoms at which the runs of the coarse search begin.
        contiguous: ranks of a contiguous partition, whose total cost bounds the result; None for no bound.
    """
    if num_ranks == 1 or len(atoms) < 2:
        return np.zeros(len(atoms), dtype=np.int64)
    share = _share(atoms, num_ranks)
    if len(atoms) <= num_ranks:
        begin = atoms.even_runs(num_ranks)
        starts = [np.arange(len(atoms)), _spread(np.arange(len(begin)), begin, len(atoms))]
        saved = [Assignment(atoms, _deduplicate(atoms, rank, num_ranks, share, share), num_ranks) for rank in starts]
        return min(saved, key=Assignment.score).rank
    first = units if len(units) > num_ranks else np.arange(len(atoms))
    coarse = atoms.joined(first)
    if len(first) > max(MOST_PLACES, MOST_PER_RANK * num_ranks):
        first = first[coarse.cut(share / MOST_PER_RANK)]
        coarse = atoms.joined(first)
    best, cap = _search(coarse, num_ranks, None if contiguous is None else contiguous[first])
    rank = _spread(best.rank, first, len(atoms))
    if len(coarse) < len(atoms) <= MOST_REFINED and best.cost.max() > GOOD * best.cost.mean():
        best = refine(atoms, rank, num_ranks, share, cap if best.cost.sum() <= cap + best.gain else np.inf)
        rank = _deduplicate(atoms, best.rank, num_ranks, share)
    return rank


def fill_idle(atoms: SequenceRuns, rank: np.ndarray, num_ranks: int) -> np.ndarray:
    """Move one atom to every idle rank, as far as there are enough, where it duplicates least; return the ranks."""
    found = Assignment(atoms, rank, num_ranks)
    for _ in range(min(num_ranks, len(atoms)) - int(np.count_nonzero(found.size))):
        added = np.where(found.size[found.rank] > 1, atoms.cost - found.leaving(np.arange(len(atoms))), np.inf)
        found.put(added.argmin(keepdims=True), found.size.argmin(keepdims=True))
    return found.rank


def _share(atoms: SequenceRuns, num_ranks: int) -> float:
    """Lower bound on the slowest rank: the mean cost without duplicates, or the costliest atom."""
    return max(float((atoms.cost - atoms.shared[atoms.begin]).sum()) / num_ranks, float(atoms.cost.max()))


def _spread(value: np.ndarray, begin: np.ndarray, count: int) -> np.ndarray:
    """The value of each run, repeated for every atom in it."""
    return np.repeat(value, np.diff(np.append(begin, count)))


def _search(atoms: SequenceRuns, num_ranks: int, contiguous: np.ndarray | None) -> tuple[Assignment, float]:
    """The best partition found, and the bound on the total cost."""
    share = _share(atoms, num_ranks)
    begin = atoms.even_runs(num_ranks)
    starts = [_spread(np.arange(len(begin)), begin, len(atoms))]
    found = [refine(atoms, starts[0], num_ranks, share)]
    for fineness in START_FINENESS:
        if len(starts) > 2 and min(a.cost.max() / a.cost.mean() for a in found) <= GOOD_START:
            break
        begin = atoms.cut(share / fineness)
        starts.append(_spread(_place(atoms.joined(begin), num_ranks), begin, len(atoms)))
        found.append(refine(atoms, starts[-1], num_ranks, share))
    best = min(found, key=Assignment.score)
    best = Assignment(atoms, _deduplicate(atoms, best.rank, num_ranks, share), num_ranks)
    if contiguous is None:
        return best, np.inf
    bound = Assignment(atoms, contiguous, num_ranks)
    cap = float(bound.cost.sum())
    if best.cost.sum() > cap + best.gain:
        best = _within(atoms, best, [bound.rank, *starts], cap, share)
    return best, cap


def _within(atoms: SequenceRuns, best: Assignment, starts: list[np.ndarray], cap: float, share: float) -> Assignment:
    """A partition of total cost at most ``cap`` if its slowest rank is about as fast as ``best``'s; else ``best``."""
    fastest = float(best.cost.max())
    kept: list[Assignment] = []
    for start in (best.rank, *starts):
        rank = _deduplicate_below(atoms, start, best.num_ranks, share, cap, fastest)
        if rank is None:
            continue
        slowest = np.inf
        for _ in range(TURNS):
            found = refine(atoms, rank, best.num_ranks, share, cap)
            if found.cost.max() >= slowest:
                break
            slowest = found.cost.max()
            kept.append(found)
            rank = _deduplicate(atoms, found.rank, best.num_ranks, share)
        if slowest <= GOOD_WITHIN * fastest or len(kept) >= MOST_TURNS:
            break
    within = min(kept, key=Assignment.score, default=best)
    return within if within.cost.max() <= WORTH * fastest else best


def _deduplicate_below(
    atoms: SequenceRuns, rank: np.ndarray, num_ranks: int, share: float, cap: float, fastest: float
) -> np.ndarray | None:
    """Deduplicate to a total cost of at most ``cap`` with the smallest slowdown that suffices; None if none does."""
    for slack in SLACK:
        rank = _deduplicate(atoms, rank, num_ranks, share, slack * fastest)
        found = Assignment(atoms, rank, num_ranks)
        if found.cost.sum() <= cap + found.gain:
            return rank
    return None


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


def refine(atoms: SequenceRuns, rank: np.ndarray, num_ranks: int, share: float, cap: float = np.inf) -> Assignment:
    """Even out the ranks of the atoms. A total cost that starts within ``cap`` stays within it."""
    for fineness in FINENESS:
        begin = _cut_ranks(atoms, rank, share / fineness) if fineness else np.arange(len(atoms))
        found = Assignment(atoms.joined(begin), rank[begin], num_ranks)
        found.relieve(CHANGES, GOOD, cap)
        rank = _spread(found.rank, begin, len(atoms))
        if found.cost.max() <= GOOD * found.cost.mean():
            break
    return Assignment(atoms, rank, num_ranks)


def _cut_ranks(atoms: SequenceRuns, rank: np.ndarray, limit: float) -> np.ndarray:
    """Starts of runs that cost at most ``limit`` and lie on one rank each."""
    return atoms.cut(limit, np.append(True, rank[1:] != rank[:-1]))


def _deduplicate(
    atoms: SequenceRuns, rank: np.ndarray, num_ranks: int, share: float, limit: float | None = None
) -> np.ndarray:
    """Reduce duplicated work, with no rank above ``limit`` (None: above the slowest rank); return the atoms' ranks."""
    begin = _cut_ranks(atoms, rank, share / DEDUPLICATION_FINENESS)
    found = Assignment(atoms.joined(begin), rank[begin], num_ranks)
    deduplicate_work(found, DEDUPLICATION_ROUNDS, float(found.cost.max()) if limit is None else limit)
    return _spread(found.rank, begin, len(atoms))
