"""Searches for the partition of a forest whose slowest rank is fastest.

1. Starts: contiguous runs of sequences in depth-first order, the costliest as cheap as runs can be (threshold search);
   and chunks, cut where least is shared, placed one by one, the costliest first (``_place``).
2. Each is refined: chunks move from the slowest rank or are swapped with others', first large ones, then smaller ones,
   down to single sequences, and then pairs of ranks divide what they hold anew; last, what several ranks compute is
   brought together where no rank becomes slower than the slowest (``saving``).
3. A partition that makes all ranks together cost more than plain contiguous runs do buys its even ranks with duplicated
   work. If the best one does, the refinement is done again under that bound (``_within``), and its result is taken
   unless its slowest rank is clearly slower.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from megatron_dta.planning.partition.assignment import Assignment
from megatron_dta.planning.partition.deduplicate_work import save_cost
from megatron_dta.planning.partition.sequence_runs import Chunks

# More places than this for each rank, and in all, are joined to chunks before the search.
MOST_PER_RANK = 64
MOST_PLACES = 4096
# Forests of more sequences than this are not refined down to single ones: their ranks are even without.
MOST_REFINED = 1 << 14
# Chunks of the starts: they cost at most a rank's share over one of these.
START_FINENESS = (1.0, 3.0, 6.0, 10.0)
# Cost that a chunk adds to a rank counts so many times beside what the rank costs already.
ADDED_WEIGHT = 4.0
# No further start once the slowest rank costs at most so many times the mean.
GOOD_START = 1.004
# Chunks for a rank's share in each step of the refinement; None: as they are.
FINENESS = (4.0, 16.0, None)
# A slowest rank of so many times the mean is not refined further.
GOOD = 1.002
CHANGES = 200
# Under the bound of ``_within``: how much slower the slowest rank may become while duplicated cost is brought below it;
# how often cost is saved and the ranks evened out in turn, from one start and in all; how much slower than the best the
# result may be, and from where on nothing better is looked for.
SLACK = (1.01, 1.03, 1.06, 1.1)
TURNS = 5
MOST_TURNS = 10
GOOD_WITHIN = 1.01
WORTH = 1.03
SAVING_FINENESS = 16.0
SAVING_ROUNDS = 12


def assign(atoms: Chunks, num_ranks: int, units: np.ndarray, contiguous: np.ndarray | None) -> np.ndarray:
    """Rank of every atom, int64 [K]. Ranks may be left idle where the slowest would not become faster.

    Args:
        units: atoms at which a run begins that is searched as one before it is taken apart.
        contiguous: ranks of a partition in contiguous runs, whose cost of all ranks is not to be exceeded; None:
            no bound.
    """
    if num_ranks == 1 or len(atoms) < 2:
        return np.zeros(len(atoms), dtype=np.int64)
    share = _share(atoms, num_ranks)
    if len(atoms) <= num_ranks:
        begin = atoms.even_runs(num_ranks)
        starts = [np.arange(len(atoms)), _spread(np.arange(len(begin)), begin, len(atoms))]
        saved = [Assignment(atoms, _save(atoms, rank, num_ranks, share, share), num_ranks) for rank in starts]
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
        rank = _save(atoms, best.rank, num_ranks, share)
    return rank


def fill_idle(atoms: Chunks, rank: np.ndarray, num_ranks: int) -> np.ndarray:
    """Ranks of the atoms with one for every idle rank while there are enough, taken where that duplicates least."""
    found = Assignment(atoms, rank, num_ranks)
    for _ in range(min(num_ranks, len(atoms)) - int(np.count_nonzero(found.size))):
        added = np.where(found.size[found.rank] > 1, atoms.cost - found.leaving(np.arange(len(atoms))), np.inf)
        found.put(added.argmin(keepdims=True), found.size.argmin(keepdims=True))
    return found.rank


def _share(atoms: Chunks, num_ranks: int) -> float:
    """What the slowest rank costs at least: the mean without duplicates, or the costliest atom."""
    return max(float((atoms.cost - atoms.shared[atoms.begin]).sum()) / num_ranks, float(atoms.cost.max()))


def _spread(value: np.ndarray, begin: np.ndarray, count: int) -> np.ndarray:
    """The value of each chunk, for every atom in it."""
    return np.repeat(value, np.diff(np.append(begin, count)))


def _search(atoms: Chunks, num_ranks: int, contiguous: np.ndarray | None) -> tuple[Assignment, float]:
    """The best partition found, and the bound on the cost of all ranks."""
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
    best = Assignment(atoms, _save(atoms, best.rank, num_ranks, share), num_ranks)
    if contiguous is None:
        return best, np.inf
    bound = Assignment(atoms, contiguous, num_ranks)
    cap = float(bound.cost.sum())
    if best.cost.sum() > cap + best.gain:
        best = _within(atoms, best, [bound.rank, *starts], cap, share)
    return best, cap


def _within(atoms: Chunks, best: Assignment, starts: list[np.ndarray], cap: float, share: float) -> Assignment:
    """A partition that costs at most ``cap`` in all, where its slowest rank is about as fast as ``best``'s."""
    fastest = float(best.cost.max())
    kept: list[Assignment] = []
    for start in (best.rank, *starts):
        rank = _save_below(atoms, start, best.num_ranks, share, cap, fastest)
        if rank is None:
            continue
        slowest = np.inf
        for _ in range(TURNS):
            found = refine(atoms, rank, best.num_ranks, share, cap)
            if found.cost.max() >= slowest:
                break
            slowest = found.cost.max()
            kept.append(found)
            rank = _save(atoms, found.rank, best.num_ranks, share)
        if slowest <= GOOD_WITHIN * fastest or len(kept) >= MOST_TURNS:
            break
    within = min(kept, key=Assignment.score, default=best)
    return within if within.cost.max() <= WORTH * fastest else best


def _save_below(
    atoms: Chunks, rank: np.ndarray, num_ranks: int, share: float, cap: float, fastest: float
) -> np.ndarray | None:
    """Ranks of the atoms that cost at most ``cap`` in all, with no slower a slowest rank than needed; or None."""
    for slack in SLACK:
        rank = _save(atoms, rank, num_ranks, share, slack * fastest)
        found = Assignment(atoms, rank, num_ranks)
        if found.cost.sum() <= cap + found.gain:
            return rank
    return None


def _place(chunks: Chunks, num_ranks: int) -> np.ndarray:
    """Chunks on ranks, the costliest first, where a rank's cost and ``ADDED_WEIGHT`` x the added cost are least."""
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    cost = np.zeros(num_ranks)
    rank_of = np.zeros(len(chunks), dtype=np.int64)
    for chunk in np.argsort(-chunks.cost, kind="stable").tolist():
        places = [bisect_left(mine, chunk) for mine in held]
        before = np.array([mine[p - 1] if p else -1 for mine, p in zip(held, places, strict=True)])
        after = np.array([mine[p] if p < len(mine) else len(chunks) for mine, p in zip(held, places, strict=True)])
        shared = chunks.between_held(before, chunk) + chunks.between_held(chunk, after)
        added = chunks.cost[chunk] - shared + chunks.between_held(before, after)
        rank = int((cost + ADDED_WEIGHT * added).argmin())
        insort(held[rank], chunk)
        cost[rank] += added[rank]
        rank_of[chunk] = rank
    return rank_of


def refine(atoms: Chunks, rank: np.ndarray, num_ranks: int, share: float, cap: float = np.inf) -> Assignment:
    """Even out the ranks of the atoms, at a cost of all ranks of at most ``cap`` where they start there."""
    for fineness in FINENESS:
        begin = _cut_ranks(atoms, rank, share / fineness) if fineness else np.arange(len(atoms))
        found = Assignment(atoms.joined(begin), rank[begin], num_ranks)
        found.relieve(CHANGES, GOOD, cap)
        rank = _spread(found.rank, begin, len(atoms))
        if found.cost.max() <= GOOD * found.cost.mean():
            break
    return Assignment(atoms, rank, num_ranks)


def _cut_ranks(atoms: Chunks, rank: np.ndarray, limit: float) -> np.ndarray:
    """Begins of chunks that cost at most ``limit`` and each lie on one rank."""
    return atoms.cut(limit, np.append(True, rank[1:] != rank[:-1]))


def _save(atoms: Chunks, rank: np.ndarray, num_ranks: int, share: float, limit: float | None = None) -> np.ndarray:
    """Ranks of the atoms with less duplicated cost, none costlier than ``limit`` (None: than the slowest is)."""
    begin = _cut_ranks(atoms, rank, share / SAVING_FINENESS)
    found = Assignment(atoms.joined(begin), rank[begin], num_ranks)
    save_cost(found, SAVING_ROUNDS, float(found.cost.max()) if limit is None else limit)
    return _spread(found.rank, begin, len(atoms))
