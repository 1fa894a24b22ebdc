"""Groups neighbouring sequences into runs that a partition moves as one, and finds the best places to cut.

Both sides of a cut compute the prefix that they share, so the best places are those where neighbours share least.
``cut`` finds, among all ways to cut the line of sequences into runs of at most a given cost, the one with the lowest
total cost.

Example: four sequences cost 4 each alone, and neighbours share 3, 1 and 3. With a limit of 5 the best cut is in the
middle: two runs of cost 4 + 4 - 3 = 5 each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_dta.core.planning.partition.range_minimum import RangeMinimum
from megatron_dta.core.planning.partition.sequence_costs import SequenceCosts

# Share of the limit that an additional cut must save.
FEWER_CHUNKS = 1e-6


@dataclass(frozen=True)
class SequenceRuns:
    """Runs in depth-first order that cover a line of places, one place per sequence. K runs, n places.

    Attributes:
        alone: float64 [n], ``SequenceCosts.alone`` of the stop at each place.
        shared: float64 [n], cost that each place shares with the place before.
        least_shared: range minima of ``shared``.
        begin, end: int64 [K], range of places of each run.
        cost: float64 [K], cost of each run alone.
    """

    alone: np.ndarray
    shared: np.ndarray
    least_shared: RangeMinimum
    begin: np.ndarray
    end: np.ndarray
    cost: np.ndarray

    @classmethod
    def indivisible(cls, costs: SequenceCosts) -> tuple[SequenceRuns, np.ndarray]:
        """The runs that are never cut, one for each label, and the run of each stop.

        A label whose stops are not neighbours takes one place, that of its first stop, with the cost of all its stops.
        Its own cost is then exact, but the cost that it shares with others is underestimated.
        """
        label, alone = costs.stop_label, costs.alone.copy()
        count = len(label)
        order = np.argsort(label, kind="stable")
        begin = np.flatnonzero(np.diff(label[order], prepend=-1))
        end = np.append(begin[1:], count)[: len(begin)]
        first, last = order[begin], order[end - 1] if count else order
        scattered = np.flatnonzero(last - first != end - begin - 1)
        keep = np.ones(count, dtype=bool)
        for run in scattered:
            stops = order[begin[run] : end[run]]
            keep[stops[1:]] = False
            alone[stops[0]] = alone[stops].sum() - costs.between(stops[:-1], stops[1:]).sum()
        kept = np.flatnonzero(keep)
        shared, least_shared = costs.shared, costs.least_shared
        if len(scattered):
            shared = np.append(0.0, costs.between(kept[:-1], kept[1:]))
            least_shared = RangeMinimum(shared)
        starts = np.flatnonzero(np.diff(label[kept], prepend=-1))
        runs = cls.of_places(alone[kept], shared, least_shared, starts)
        return runs, label

    @classmethod
    def of_places(
        cls, alone: np.ndarray, shared: np.ndarray, least_shared: RangeMinimum, begin: np.ndarray
    ) -> SequenceRuns:
        """Runs that begin at the places ``begin``."""
        added = np.concatenate([[0.0], np.cumsum(alone - shared)])
        end = np.append(begin[1:], len(alone))[: len(begin)].astype(np.int64)
        cost = added[end] - added[begin] + shared[begin]
        return cls(alone, shared, least_shared, begin.astype(np.int64), end, cost)

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def _added(self) -> np.ndarray:
        """Cost of each run beyond what it shares with the run before it."""
        return self.cost - self.shared[self.begin]

    def between(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Cost that runs ``first`` < ``second`` share, for arrays of runs."""
        return self.least_shared(self.end[first], self.begin[second] + 1)

    def between_held(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """``between``, but 0 if a run is missing (-1 or K) or if both are the same run."""
        first, second = np.broadcast_arrays(first, second)
        valid = (first >= 0) & (second < len(self)) & (first < second)
        shared = np.zeros(valid.shape)
        shared[valid] = self.between(first[valid], second[valid])
        return shared

    def joined(self, first: np.ndarray) -> SequenceRuns:
        """Larger runs that begin at the runs ``first`` (ascending, from 0)."""
        return SequenceRuns.of_places(self.alone, self.shared, self.least_shared, self.begin[first])

    def cut(self, limit: float) -> np.ndarray:
        """Join runs into larger ones of at most ``limit`` at the lowest total cost; return the first run of each.

        A single run above the limit stays alone.
        """
        # Every run costs slightly more, so that of equal cuts the one with fewer runs wins.
        per_run = FEWER_CHUNKS * limit
        return cheapest_cut(self.cost, self._added, limit * (1 + FEWER_CHUNKS), per_run)

    def runs_within(self, limit: float, most: int) -> np.ndarray | None:
        """Greedily join runs up to ``limit``; return their starts, or None if more than ``most`` are needed."""
        begins = []
        for begin in greedy_cut(self.cost, self._added, limit):
            if len(begins) == most or self.cost[begin] > limit:
                return None
            begins.append(begin)
        return np.array(begins, dtype=np.int64)

    def even_runs(self, most: int) -> np.ndarray:
        """Join into at most ``most`` runs with the smallest maximum cost, by threshold search; return their starts."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        low, high = 0.0, float(self._added.sum())
        best = self.runs_within(high, most)
        while best is None:  # Rounding errors of the sum.
            high *= 1 + 1e-9
            best = self.runs_within(high, most)
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            runs = self.runs_within(middle, most)
            if runs is None:
                low = middle
            else:
                best, high = runs, middle
        return best


def cheapest_cut(cost: np.ndarray, added: np.ndarray, limit: float, per_run: float) -> np.ndarray:
    """First item of each run, int64, for runs within ``limit`` of the lowest total cost; a larger item stays alone.

    A run j..i costs cost[j] + added[j + 1] + ... + added[i]. The best cut is a shortest path over the starts of runs.
    Those that fit an end form a window that only moves forward, so a monotone queue finds each minimum in constant
    time. Integers are added exactly.

    Args:
        limit: largest cost of a run, with ``per_run``.
        per_run: further cost of every run.
    """
    count, reach = len(cost), np.cumsum(added)
    start, total = (cost - reach + per_run).tolist(), reach.tolist()  # A run j..i costs start[j] + total[i].
    best, previous = [0] * (count + 1), [0] * count
    queue: list[int] = []
    head = 0
    for i in range(count):
        while len(queue) > head and best[queue[-1]] + start[queue[-1]] >= best[i] + start[i]:
            queue.pop()
        queue.append(i)
        while queue[head] != i and start[queue[head]] + total[i] > limit:
            head += 1
        previous[i] = queue[head]
        best[i + 1] = best[queue[head]] + start[queue[head]] + total[i]
    first = []
    end = count
    while end > 0:
        end = previous[end - 1]
        first.append(end)
    return np.array(first[::-1], dtype=np.int64)


def greedy_cut(cost: np.ndarray, added: np.ndarray, limit: float) -> Iterator[int]:
    """First item of each run, for runs as long as ``limit`` allows; costs as in ``cheapest_cut``."""
    reach = np.cumsum(added)
    begin = 0
    while begin < len(cost):
        yield begin
        begin = max(begin + 1, int(np.searchsorted(reach, limit + reach[begin] - cost[begin], side="right")))
