"""Chunks on ranks, and the moves and swaps of chunks that take work from the slowest rank.

What a chunk costs on a rank depends on its two neighbours there in depth-first order. Changes are computed for many
chunks and all ranks at once.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.planning.partition.pair_cuts import PairCuts
from megatron_dta.planning.partition.sequence_runs import Chunks

# A change must gain this share of the mean cost: sums of floats in another order differ by less.
LEAST_GAIN = 1e-9
# Swaps whose gain is computed exactly, of those with the best estimates.
SWAPS_TRIED = 8
# Chunks of one rank that are considered at once.
MOST_CANDIDATES = 256
# Ranks that a chunk may move to: so many of the idlest, and those of so many neighbouring runs on either side.
IDLEST = 8
NEAREST = 3
NEAR_RUNS = np.array([step for step in range(-NEAREST, NEAREST + 1) if step])
# Chunks of the slowest rank whose neighbours it may be divided anew with.
PARTNERS = 4
# Ranks that the slowest swaps with.
SWAP_RANKS = 12


class Assignment:
    """The rank of every chunk and what each rank costs. K chunks, R ranks."""

    def __init__(self, chunks: Chunks, rank: np.ndarray, num_ranks: int) -> None:
        self.chunks, self.rank, self.num_ranks = chunks, rank.astype(np.int64), num_ranks
        self.gain = LEAST_GAIN * float(chunks.cost.sum()) / max(num_ranks, 1)
        self._update()

    def _update(self) -> None:
        """Sort the chunks by rank and place, and count every rank's cost anew."""
        count = len(self.chunks)
        self.keys = np.sort(self.rank * count + np.arange(count))
        owner, chunk = np.divmod(self.keys, max(count, 1))
        same = np.flatnonzero(owner[1:] == owner[:-1])
        shared = self.chunks.between(chunk[same], chunk[same + 1])
        self.cost = np.bincount(owner, weights=self.chunks.cost[chunk], minlength=self.num_ranks)
        self.cost -= np.bincount(owner[same], weights=shared, minlength=self.num_ranks)
        self.size = np.bincount(owner, minlength=self.num_ranks)

    def score(self) -> tuple[float, float]:
        """Cost of the slowest rank, and of all; rounded, so that equal work is equal."""
        unit = self.gain * 100
        return round(float(self.cost.max()) / unit), round(float(self.cost.sum()) / unit)

    def leaving(self, chunk: np.ndarray) -> np.ndarray:
        """What each chunk's rank costs less without it."""
        return self._change(chunk, self.rank[chunk], 1)

    def joining(self, chunk: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """What ``rank`` costs more with ``chunk``, which it does not hold (arrays that broadcast)."""
        chunk, rank = np.broadcast_arrays(chunk, rank)
        return self._change(chunk, rank, 0)

    def _change(self, chunk: np.ndarray, rank: np.ndarray, held: int) -> np.ndarray:
        count = len(self.chunks)
        place = np.searchsorted(self.keys, rank * count + chunk)
        before = self.keys[place - 1] - rank * count
        before = np.where((place > 0) & (before >= 0), before, -1)
        place = place + held
        after = self.keys[np.minimum(place, count - 1)] - rank * count
        after = np.where((place < count) & (after < count), after, count)
        with_chunk = self.chunks.between_held(before, chunk) + self.chunks.between_held(chunk, after)
        return self.chunks.cost[chunk] - with_chunk + self.chunks.between_held(before, after)

    def members(self, rank: int) -> np.ndarray:
        """Chunks of one rank, ascending."""
        count = len(self.chunks)
        begin, end = np.searchsorted(self.keys, [rank * count, (rank + 1) * count])
        return self.keys[begin:end] - rank * count

    def cost_of(self, members: np.ndarray) -> float:
        """Cost of a rank that holds these chunks (ascending)."""
        if not len(members):
            return 0.0
        return float(self.chunks.cost[members].sum() - self.chunks.between(members[:-1], members[1:]).sum())

    def put(self, chunks: np.ndarray, ranks: np.ndarray) -> None:
        """Move chunks to ranks."""
        self.rank[chunks] = ranks
        self._update()

    def relieve(self, steps: int, good: float, cap: float = np.inf) -> int:
        """Take work from the slowest rank by moves and swaps while that helps, at most ``steps`` times.

        Stops where the slowest rank costs at most ``good`` times the mean. No change makes all ranks together cost
        more than ``cap``. Returns the number of changes.
        """
        for step in range(steps):
            if self.cost.max() <= good * self.cost.mean():
                return step
            slowest = int(self.cost.argmax())
            members = self.members(slowest)
            members = thinned(members, MOST_CANDIDATES)
            room = cap - self.cost.sum() + self.gain
            if not (
                self._move_from(slowest, members, room)
                or self._swap_from(slowest, members, room)
                or self._divide_anew(slowest, room)
            ):
                return step
        return steps

    def targets(self, chunk: np.ndarray) -> np.ndarray:
        """Ranks worth moving each chunk to, int64 [len(chunk), few]: the idlest, and those of its neighbours."""
        if self.num_ranks <= IDLEST + 2 * NEAREST:
            return np.broadcast_to(np.arange(self.num_ranks), (len(chunk), self.num_ranks))
        idlest = np.argsort(self.cost, kind="stable")[:IDLEST]
        begin = np.flatnonzero(np.diff(self.rank, prepend=-1))  # of the runs of chunks on one rank
        run = np.searchsorted(begin, chunk, side="right") - 1
        near = np.clip(run[:, None] + NEAR_RUNS, 0, len(begin) - 1)
        return np.concatenate([np.broadcast_to(idlest, (len(chunk), IDLEST)), self.rank[begin[near]]], axis=1)

    def _move_from(self, slowest: int, members: np.ndarray, room: float) -> bool:
        """Make the best move of a chunk from the slowest rank, if there is one that helps."""
        if self.size[slowest] < 2:
            return False
        top = self.cost[slowest]
        target = self.targets(members)
        leaving = self.leaving(members)[:, None]
        joining = self.joining(members[:, None], target)
        worse = np.maximum(top - leaving, self.cost[target] + joining)
        # What is computed twice burdens all: a move that shares more is better than one that is merely evener.
        value = worse + np.maximum(joining - leaving, 0)
        value[(worse >= top - self.gain) | (joining - leaving > room) | (target == slowest)] = np.inf
        best = int(value.argmin())
        chunk, place = divmod(best, value.shape[1])
        if value[chunk, place] == np.inf:
            return False
        self.put(members[chunk : chunk + 1], target[chunk, place])
        return True

    def _swap_from(self, slowest: int, members: np.ndarray, room: float) -> bool:
        """Exchange a chunk of the slowest rank for one of another rank, if that helps."""
        top = self.cost[slowest]
        idlest = np.argsort(self.cost, kind="stable")[:SWAP_RANKS]
        column = np.full(self.num_ranks, -1)
        column[idlest] = np.arange(len(idlest))
        column[slowest] = -1
        others = np.flatnonzero(column[self.rank] >= 0)
        if not len(others):
            return False
        members, others = thinned(members, MOST_CANDIDATES // 4), thinned(others, MOST_CANDIDATES)
        rank = self.rank[others]
        out, back = self.leaving(members)[:, None], self.joining(others, slowest)[None, :]
        joining = self.joining(members[:, None], idlest[None, :])[:, column[rank]]
        leaving = self.leaving(others)[None, :]
        worse = np.maximum(top - out + back, self.cost[rank][None, :] + joining - leaving)
        added = joining - leaving + back - out
        value = worse + np.maximum(added, 0)
        value[(worse >= top - self.gain) | (added > room)] = np.inf
        tried = min(SWAPS_TRIED, value.size)
        for pair in np.argsort(value, axis=None, kind="stable")[:tried] if value.size < 4096 else _least(value, tried):
            mine, other = divmod(int(pair), len(others))
            if value[mine, other] == np.inf:
                break
            if self.exchange(int(members[mine]), int(others[other]), top - self.gain, room):
                return True
        return False

    def _divide_anew(self, slowest: int, room: float) -> bool:
        """Divide what the slowest and another rank hold in another way, if that helps."""
        top = self.cost[slowest]
        best, chosen = np.inf, None
        members = self.members(slowest)
        for rank in np.unique(self.targets(thinned(members, PARTNERS))).tolist():
            if rank == slowest or self.size[slowest] + self.size[rank] < 2:
                continue
            cuts = PairCuts.of(self.chunks, np.sort(np.append(members, self.members(rank))))
            added = cuts.total - top - self.cost[rank]
            value = cuts.slower + np.maximum(added, 0)
            value[(cuts.slower >= top - self.gain) | (added > room)] = np.inf
            choice = int(value.argmin())
            if value.flat[choice] < best:
                best, chosen = value.flat[choice], (rank, cuts, choice)
        if chosen is None:
            return False
        rank, cuts, choice = chosen
        self.put(cuts.members, np.where(cuts.run(choice), slowest, rank))
        return True

    def exchange(self, mine: int, other: int, limit: float, room: float) -> bool:
        """Swap two chunks if both ranks then cost at most ``limit``, and at most ``room`` more together."""
        a, b = int(self.rank[mine]), int(self.rank[other])
        after_a = np.sort(np.append(np.setdiff1d(self.members(a), [mine]), other))
        after_b = np.sort(np.append(np.setdiff1d(self.members(b), [other]), mine))
        cost_a, cost_b = self.cost_of(after_a), self.cost_of(after_b)
        if max(cost_a, cost_b) > limit or cost_a + cost_b - self.cost[a] - self.cost[b] > room:
            return False
        self.put(np.array([mine, other]), np.array([b, a]))
        return True


def thinned(chunks: np.ndarray, most: int) -> np.ndarray:
    """At most so many of the chunks, evenly chosen."""
    if len(chunks) <= most:
        return chunks
    return chunks[np.linspace(0, len(chunks) - 1, most).astype(np.int64)]


def _least(value: np.ndarray, count: int) -> np.ndarray:
    """Flat indices of the least values, ascending, ties by place."""
    flat = value.ravel()
    bound = np.partition(flat, count - 1)[count - 1]
    chosen = np.flatnonzero(flat <= bound)
    return chosen[np.argsort(flat[chosen], kind="stable")][:count]
