"""Assigns sequence runs to ranks, and moves and swaps runs to take work from the slowest rank.

The cost of a run on a rank depends on its two neighbours on that rank in depth-first order. Changes are evaluated for
many runs and all ranks at once.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.core.planning.partition.sequence_runs import SequenceRuns

# A change must gain this share of the mean cost, which is above the rounding errors of the sums.
LEAST_GAIN = 1e-9
# Number of swaps with the best estimates whose gain is computed exactly.
SWAPS_TRIED = 8
# Maximum number of runs of one rank that are considered at once.
MOST_CANDIDATES = 256
# A run may move to the least loaded ranks, and to the ranks of its nearest neighbours on either side.
IDLEST = 8
NEAREST = 3
NEAR_RUNS = np.array([step for step in range(-NEAREST, NEAREST + 1) if step])
# Number of least loaded ranks that the slowest rank may swap with.
SWAP_RANKS = 12


class Assignment:
    """The rank of every run, and the cost of each rank. K runs, R ranks."""

    def __init__(self, runs: SequenceRuns, rank: np.ndarray, num_ranks: int) -> None:
        self.runs, self.rank, self.num_ranks = runs, rank.astype(np.int64), num_ranks
        self.gain = LEAST_GAIN * float(runs.cost.sum()) / max(num_ranks, 1)
        self._update()

    def _update(self) -> None:
        """Sort the runs by rank and place, and recompute the cost of every rank."""
        count = len(self.runs)
        self.keys = np.sort(self.rank * count + np.arange(count))
        owner, run = np.divmod(self.keys, max(count, 1))
        same = np.flatnonzero(owner[1:] == owner[:-1])
        shared = self.runs.between(run[same], run[same + 1])
        self.cost = np.bincount(owner, weights=self.runs.cost[run], minlength=self.num_ranks)
        self.cost -= np.bincount(owner[same], weights=shared, minlength=self.num_ranks)
        self.size = np.bincount(owner, minlength=self.num_ranks)

    def score(self) -> tuple[float, float]:
        """Cost of the slowest rank and of all ranks, rounded so that equal work compares equal."""
        unit = self.gain * 100
        return round(float(self.cost.max()) / unit), round(float(self.cost.sum()) / unit)

    def leaving(self, run: np.ndarray) -> np.ndarray:
        """Cost that each run's rank saves without it."""
        return self._change(run, self.rank[run], 1)

    def joining(self, run: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Cost that ``run`` adds to ``rank``, which must not hold it. The arrays broadcast."""
        run, rank = np.broadcast_arrays(run, rank)
        return self._change(run, rank, 0)

    def _change(self, run: np.ndarray, rank: np.ndarray, held: int) -> np.ndarray:
        count = len(self.runs)
        place = np.searchsorted(self.keys, rank * count + run)
        before = self.keys[place - 1] - rank * count
        before = np.where((place > 0) & (before >= 0), before, -1)
        place = place + held
        after = self.keys[np.minimum(place, count - 1)] - rank * count
        after = np.where((place < count) & (after < count), after, count)
        with_run = self.runs.between_held(before, run) + self.runs.between_held(run, after)
        return self.runs.cost[run] - with_run + self.runs.between_held(before, after)

    def members(self, rank: int) -> np.ndarray:
        """The runs of one rank, ascending."""
        count = len(self.runs)
        begin, end = np.searchsorted(self.keys, [rank * count, (rank + 1) * count])
        return self.keys[begin:end] - rank * count

    def cost_of(self, members: np.ndarray) -> float:
        """Cost of a rank that holds these runs, given in ascending order."""
        if not len(members):
            return 0.0
        return float(self.runs.cost[members].sum() - self.runs.between(members[:-1], members[1:]).sum())

    def put(self, runs: np.ndarray, ranks: np.ndarray) -> None:
        self.rank[runs] = ranks
        self._update()

    def relieve(self, steps: int, good: float) -> int:
        """Take work from the slowest rank by at most ``steps`` moves and swaps; return the number of changes.

        Stops when no change helps, or when the slowest rank costs at most ``good`` times the mean.
        """
        for step in range(steps):
            if self.cost.max() <= good * self.cost.mean():
                return step
            slowest = int(self.cost.argmax())
            members = evenly_sampled(self.members(slowest), MOST_CANDIDATES)
            if not (self._move_from(slowest, members) or self._swap_from(slowest, members)):
                return step
        return steps

    def targets(self, run: np.ndarray) -> np.ndarray:
        """Candidate ranks for each run, int64 [len(run), candidates]: the least loaded, and those of its neighbours."""
        if self.num_ranks <= IDLEST + 2 * NEAREST:
            return np.broadcast_to(np.arange(self.num_ranks), (len(run), self.num_ranks))
        idlest = np.argsort(self.cost, kind="stable")[:IDLEST]
        begin = np.flatnonzero(np.diff(self.rank, prepend=-1))  # first run of each stretch on one rank
        own = np.searchsorted(begin, run, side="right") - 1
        near = np.clip(own[:, None] + NEAR_RUNS, 0, len(begin) - 1)
        return np.concatenate([np.broadcast_to(idlest, (len(run), IDLEST)), self.rank[begin[near]]], axis=1)

    def _move_from(self, slowest: int, members: np.ndarray) -> bool:
        """Make the best move of a run from the slowest rank, if any move helps."""
        if self.size[slowest] < 2:
            return False
        top = self.cost[slowest]
        target = self.targets(members)
        leaving = self.leaving(members)[:, None]
        joining = self.joining(members[:, None], target)
        worse = np.maximum(top - leaving, self.cost[target] + joining)
        # Duplicated work costs all ranks, so a move that shares more beats one that is merely more even.
        value = worse + np.maximum(joining - leaving, 0)
        value[(worse >= top - self.gain) | (target == slowest)] = np.inf
        best = int(value.argmin())
        run, place = divmod(best, value.shape[1])
        if value[run, place] == np.inf:
            return False
        self.put(members[run : run + 1], target[run, place])
        return True

    def _swap_from(self, slowest: int, members: np.ndarray) -> bool:
        """Swap a run of the slowest rank with one of another rank, if that helps."""
        top = self.cost[slowest]
        idlest = np.argsort(self.cost, kind="stable")[:SWAP_RANKS]
        column = np.full(self.num_ranks, -1)
        column[idlest] = np.arange(len(idlest))
        column[slowest] = -1
        others = np.flatnonzero(column[self.rank] >= 0)
        if not len(others):
            return False
        members, others = evenly_sampled(members, MOST_CANDIDATES // 4), evenly_sampled(others, MOST_CANDIDATES)
        rank = self.rank[others]
        out, back = self.leaving(members)[:, None], self.joining(others, slowest)[None, :]
        joining = self.joining(members[:, None], idlest[None, :])[:, column[rank]]
        leaving = self.leaving(others)[None, :]
        worse = np.maximum(top - out + back, self.cost[rank][None, :] + joining - leaving)
        added = joining - leaving + back - out
        value = worse + np.maximum(added, 0)
        value[worse >= top - self.gain] = np.inf
        tried = min(SWAPS_TRIED, value.size)
        for pair in np.argsort(value, axis=None, kind="stable")[:tried] if value.size < 4096 else _least(value, tried):
            mine, other = divmod(int(pair), len(others))
            if value[mine, other] == np.inf:
                break
            if self._exchange(int(members[mine]), int(others[other]), top - self.gain):
                return True
        return False

    def _exchange(self, mine: int, other: int, limit: float) -> bool:
        """Swap two runs if each of their ranks then costs at most ``limit``."""
        a, b = int(self.rank[mine]), int(self.rank[other])
        after_a = np.sort(np.append(np.setdiff1d(self.members(a), [mine]), other))
        after_b = np.sort(np.append(np.setdiff1d(self.members(b), [other]), mine))
        if max(self.cost_of(after_a), self.cost_of(after_b)) > limit:
            return False
        self.put(np.array([mine, other]), np.array([b, a]))
        return True


def evenly_sampled(runs: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` of the runs, evenly spaced."""
    if len(runs) <= most:
        return runs
    return runs[np.linspace(0, len(runs) - 1, most).astype(np.int64)]


def _least(value: np.ndarray, count: int) -> np.ndarray:
    """Flat indices of the ``count`` smallest values, ascending; ties are ordered by index."""
    flat = value.ravel()
    bound = np.partition(flat, count - 1)[count - 1]
    chosen = np.flatnonzero(flat <= bound)
    return chosen[np.argsort(flat[chosen], kind="stable")][:count]
