"""Takes back work that several ranks duplicate, as long as no rank comes to cost more than a limit.

Three changes, each tried when the one before finds nothing more: a chunk moves to a rank that shares more with it; it
does so in exchange for another; two ranks that share much divide what they hold anew.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.planning.partition.assignment import Assignment, thinned
from megatron_dta.planning.partition.pair_cuts import PairCuts

# Chunks that share most with another rank, so many for each rank, are tried in exchanges and divisions.
TRIED_PER_RANK = 2
MOST_PARTNERS = 64
# Exchanges found wanting once they are counted exactly: the estimate leaves out that the two may be neighbours.
MOST_FAILURES = 12


def save_cost(found: Assignment, rounds: int, limit: float) -> None:
    """Change the assignment so that all ranks together cost less, and none more than ``limit`` if it does not yet."""
    for _ in range(rounds):
        if not (_move(found, limit) or _exchange(found, limit) or _divide(found, limit)):
            return


def _move(found: Assignment, limit: float) -> bool:
    """Move the chunks that save most, at most one from or to each rank."""
    chunk = np.arange(len(found.chunks))
    target = found.targets(chunk)
    joining = found.joining(chunk[:, None], target)
    saved = found.leaving(chunk)[:, None] - joining
    saved[(found.cost[target] + joining > limit) | (target == found.rank[:, None])] = 0
    place = saved.argmax(axis=1)
    value, best = saved[chunk, place], target[chunk, place]
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


def _wanted(found: Assignment) -> tuple[np.ndarray, np.ndarray]:
    """Chunks and the rank of a neighbour with which each would share more, those that would save most first."""
    border = np.flatnonzero(found.rank[1:] != found.rank[:-1])
    chunk = np.concatenate([border, border + 1])
    rank = found.rank[np.concatenate([border + 1, border])]
    saved = found.leaving(chunk) - found.joining(chunk, rank)
    order = np.argsort(-saved, kind="stable")[: TRIED_PER_RANK * found.num_ranks]
    order = order[saved[order] > found.gain]
    return chunk[order], rank[order]


def _exchange(found: Assignment, limit: float) -> bool:
    """Bring chunks to where they share more in exchange for others, at most one exchange of each rank."""
    chunk, rank = _wanted(found)
    if not len(chunk):
        return False
    held = {one: thinned(found.members(one), MOST_PARTNERS) for one in np.unique(rank).tolist()}
    partners = [held[one] for one in rank.tolist()]
    wish = np.repeat(np.arange(len(chunk)), [len(others) for others in partners])
    other = np.concatenate(partners)
    out, back = found.leaving(chunk)[wish], found.joining(chunk, rank)[wish]
    home, rank = found.rank[chunk[wish]], rank[wish]
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
        if found.exchange(int(chunk[wish[pair]]), int(other[pair]), limit, -found.gain):
            touched |= ranks
        else:
            failures += 1
    return bool(touched)


def _divide(found: Assignment, limit: float) -> bool:
    """Divide pairs of ranks anew."""
    changed = False
    seen: set[tuple[int, int]] = set()
    for chunk, rank in zip(*map(np.ndarray.tolist, _wanted(found)), strict=True):
        home = int(found.rank[chunk])
        pair = (min(home, rank), max(home, rank))
        if home == rank or pair in seen:
            continue
        seen.add(pair)
        cuts = PairCuts.of(found.chunks, np.sort(np.append(found.members(home), found.members(rank))))
        total = np.where(cuts.slower <= limit, cuts.total, np.inf)
        choice = int(total.argmin())
        if total.flat[choice] < found.cost[home] + found.cost[rank] - found.gain:
            found.put(cuts.members, np.where(cuts.run(choice), home, rank))
            changed = True
    return changed
