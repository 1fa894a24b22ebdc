"""Groups neighbouring sequences into runs that a partition moves as one, and finds the best places to cut.

Both sides of a cut compute the prefix that they share, so the best places are those where neighbours share least.
``cut`` finds, among all ways to cut the line of sequences into runs of at most a given cost, the one with the lowest
total cost.

Example: four sequences cost 4 each alone, and neighbours share 3, 1 and 3. With a limit of 5 the best cut is in the
middle: two runs of cost 4 + 4 - 3 = 5 each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dta.planning.partition.range_minimum import RangeMinimum
from megatron_dta.planning.partition.sequence_costs import SequenceCosts

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
        place = np.flatnonzero(keep)
        shared, least_shared = costs.shared, costs.least_shared
        if len(scattered):
            shared = np.append(0.0, costs.between(place[:-1], place[1:]))
            least_shared = RangeMinimum(shared)
        starts = np.flatnonzero(np.diff(label[place], prepend=-1))
        runs = cls.of_places(alone[place], shared, least_shared, starts)
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

    def cut(self, limit: float, apart: np.ndarray | None = None) -> np.ndarray:
        """Join runs into larger ones of at most ``limit`` at the lowest total cost; return the first run of each.

        A single run above the limit stays alone. The result is a shortest path over the places to cut. The starts that
        fit an end form a window that only moves forward, so a monotone queue finds each minimum in constant time.

        Args:
            limit: largest cost of a joined run.
            apart: bool [K], True if a joined run must begin there.
        """
        shared = self.shared[self.begin]
        reach = np.cumsum(self.cost - shared)  # A joined run j..i costs reach[i] - reach[j] + cost[j].
        # Every run costs slightly more, so that of equal cuts the one with fewer runs wins.
        extra = (self.cost - reach + FEWER_CHUNKS * limit).tolist()
        limit *= 1 + FEWER_CHUNKS
        total = reach.tolist()
        forced = np.zeros(len(self), dtype=bool) if apart is None else apart
        best, previous = [0.0] * (len(self) + 1), [0] * len(self)
        queue: list[int] = []
        head = 0
        for i, begins in enumerate(forced.tolist()):
            if begins:
                head = len(queue)
            here = best[i] + extra[i]
            while len(queue) > head and best[queue[-1]] + extra[queue[-1]] >= here:
                queue.pop()
            queue.append(i)
            while queue[head] != i and extra[queue[head]] + total[i] > limit:
                head += 1
            previous[i] = queue[head]
            best[i + 1] = best[queue[head]] + extra[queue[head]] + total[i]
        first = []
        end = len(self)
        while end > 0:
            end = previous[end - 1]
            first.append(end)
        return np.array(first[::-1], dtype=np.int64)

    def runs_within(self, limit: float, most: int) -> np.ndarray | None:
        """Greedily join runs up to ``limit``; return their starts, or None if more than ``most`` are needed."""
        shared = self.shared[self.begin]
        reach = np.cumsum(self.cost - shared)
        begins = []
        place = 0
        while place < len(self):
            if len(begins) == most or self.cost[place] > limit:
                return None
            begins.append(place)
            place = int(np.searchsorted(reach, limit + reach[place] - self.cost[place], side="right"))
            place = max(place, begins[-1] + 1)
        return np.array(begins, dtype=np.int64)

    def even_runs(self, most: int) -> np.ndarray:
        """Join into at most ``most`` runs with the smallest maximum cost, by threshold search; return their starts."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        low, high = 0.0, float((self.cost - self.shared[self.begin]).sum())
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
