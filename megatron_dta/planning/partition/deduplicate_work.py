"""Reduces the work that several ranks duplicate, without making any rank cost more than a limit.

Three changes are tried, each when the one before finds nothing more: move a run to a rank that shares more with it;
swap it with a run of that rank; divide the runs of two ranks that share much in a new way.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.planning.partition.assignment import Assignment, evenly_sampled
from megatron_dta.planning.partition.pair_cuts import PairCuts

# Swaps and new divisions try this many of the runs that share most with another rank, per rank.
TRIED_PER_RANK = 2
MOST_PARTNERS = 64
# Most swaps that may fail the exact evaluation. The estimate ignores that the two runs may be neighbours.
MOST_FAILURES = 12


def deduplicate_work(found: Assignment, rounds: int, limit: float) -> None:
    """Reduce the cost of all ranks together; no rank that is within ``limit`` leaves it."""
    for _ in range(rounds):
        if not (_move(found, limit) or _exchange(found, limit) or _divide(found, limit)):
            return


def _move(found: Assignment, limit: float) -> bool:
    """Move the runs that save most, at most one move for each rank."""
    run = np.arange(len(found.runs))
    target = found.targets(run)
    joining = found.joining(run[:, None], target)
    saved = found.leaving(run)[:, None] - joining
    saved[(found.cost[target] + joining > limit) | (target == found.rank[:, None])] = 0
    place = saved.argmax(axis=1)
    value, best = saved[run, place], target[run, place]
    touched: set[int] = set()
    moved = []
    for candidate in np.argsort(-value, kind="stable"):
        if value[candidate] <= found.gain:
            break
        pair = {int(found.rank[candidate]), int(best[candidate])}
        if not pair & touched:
            touched |= pair
            moved.append(candidate)
    if moved:
        found.put(np.array(moved), best[moved])
    return bool(moved)


def _sharing_moves(found: Assignment) -> tuple[np.ndarray, np.ndarray]:
    """Runs, and for each the rank of a neighbour with which it would share more, largest saving first."""
    border = np.flatnonzero(found.rank[1:] != found.rank[:-1])
    run = np.concatenate([border, border + 1])
    rank = found.rank[np.concatenate([border + 1, border])]
    saved = found.leaving(run) - found.joining(run, rank)
    order = np.argsort(-saved, kind="stable")[: TRIED_PER_RANK * found.num_ranks]
    order = order[saved[order] > found.gain]
    return run[order], rank[order]


def _exchange(found: Assignment, limit: float) -> bool:
    """Swap runs to ranks where they share more, at most one swap for each rank."""
    run, rank = _sharing_moves(found)
    if not len(run):
        return False
    held = {one: evenly_sampled(found.members(one), MOST_PARTNERS) for one in np.unique(rank).tolist()}
    partners = [held[one] for one in rank.tolist()]
    move = np.repeat(np.arange(len(run)), [len(others) for others in partners])
    other = np.concatenate(partners)
    out, back = found.leaving(run)[move], found.joining(run, rank)[move]
    home, rank = found.rank[run[move]], rank[move]
    leaving, joining = found.leaving(other), found.joining(other, home)
    saved = out - back + leaving - joining
    saved[(found.cost[home] - out + joining > limit) | (found.cost[rank] + back - leaving > limit)] = 0
    touched: set[int] = set()
    failures = 0
    for pair in np.argsort(-saved, kind="stable").tolist():
        if saved[pair] <= found.gain or failures == MOST_FAILURES:
            break
        ranks = {int(home[pair]), int(rank[pair])}
        if ranks & touched:
            continue
        if found.exchange(int(run[move[pair]]), int(other[pair]), limit, -found.gain):
            touched |= ranks
        else:
            failures += 1
    return bool(touched)


def _divide(found: Assignment, limit: float) -> bool:
    """Divide the runs of pairs of ranks in a new way."""
    changed = False
    seen: set[tuple[int, int]] = set()
    for run, rank in zip(*map(np.ndarray.tolist, _sharing_moves(found)), strict=True):
        home = int(found.rank[run])
        pair = (min(home, rank), max(home, rank))
        if home == rank or pair in seen:
            continue
        seen.add(pair)
        cuts = PairCuts.of(found.runs, np.sort(np.append(found.members(home), found.members(rank))))
        total = np.where(cuts.slower <= limit, cuts.total, np.inf)
        choice = int(total.argmin())
        if total.flat[choice] < found.cost[home] + found.cost[rank] - found.gain:
            found.put(cuts.members, np.where(cuts.inside(choice), home, rank))
            changed = True
    return changed
