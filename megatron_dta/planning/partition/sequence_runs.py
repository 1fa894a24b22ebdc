"""Runs of neighbouring sequences that a partition moves as one, and where to cut them.

Cutting a forest in two makes both sides compute what they share, so the best places are those where neighbours share
least. ``cut`` finds, among all ways to cut the line of sequences into chunks that cost at most a limit, the one whose
chunks cost least together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dta.planning.partition.range_minimum import RangeMinimum
from megatron_dta.planning.partition.sequence_costs import SequenceCosts

# Share of the limit that a cut must save to be made.
FEWER_CHUNKS = 1e-6


@dataclass(frozen=True)
class Chunks:
    """Chunks in depth-first order, each a run of places of the line; they cover it. K chunks, n places.

    Attributes:
        alone: float64 [n], ``SequenceCosts.alone`` of the stop at each place.
        shared: float64 [n], cost shared with the place before.
        least_shared: minima over ``shared``.
        begin, end: int64 [K], places of each chunk.
        cost: float64 [K], cost of each chunk as the only one.
    """

    alone: np.ndarray
    shared: np.ndarray
    least_shared: RangeMinimum
    begin: np.ndarray
    end: np.ndarray
    cost: np.ndarray

    @classmethod
    def atoms(cls, costs: SequenceCosts) -> tuple[Chunks, np.ndarray]:
        """The chunks that are never cut, one for each label, and the chunk of each stop.

        Labels whose stops are not neighbours take one place, that of their first stop, with the cost of all: what such
        a label shares with others is then underrated, its own cost exact.
        """
        label, alone = costs.stop_label, costs.alone.copy()
        count = len(label)
        order = np.argsort(label, kind="stable")
        begin = np.flatnonzero(np.diff(label[order], prepend=-1))
        end = np.append(begin[1:], count)[: len(begin)]
        first, last = order[begin], order[end - 1] if count else order
        scattered = np.flatnonzero(last - first != end - begin - 1)
        keep = np.ones(count, dtype=bool)
        for atom in scattered:
            stops = order[begin[atom] : end[atom]]
            keep[stops[1:]] = False
            alone[stops[0]] = alone[stops].sum() - costs.between(stops[:-1], stops[1:]).sum()
        place = np.flatnonzero(keep)
        shared, least_shared = costs.shared, costs.least_shared
        if len(scattered):
            shared = np.append(0.0, costs.between(place[:-1], place[1:]))
            least_shared = RangeMinimum(shared)
        starts = np.flatnonzero(np.diff(label[place], prepend=-1))
        chunks = cls.of_places(alone[place], shared, least_shared, starts)
        return chunks, label

    @classmethod
    def of_places(cls, alone: np.ndarray, shared: np.ndarray, least_shared: RangeMinimum, begin: np.ndarray) -> Chunks:
        """Chunks that begin at the places ``begin``."""
        added = np.concatenate([[0.0], np.cumsum(alone - shared)])
        end = np.append(begin[1:], len(alone))[: len(begin)].astype(np.int64)
        cost = added[end] - added[begin] + shared[begin]
        return cls(alone, shared, least_shared, begin.astype(np.int64), end, cost)

    def __len__(self) -> int:
        return len(self.begin)

    def between(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Cost that chunks ``first`` < ``second`` share (arrays)."""
        return self.least_shared(self.end[first], self.begin[second] + 1)

    def between_held(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """``between``, and 0 where a chunk is missing (-1, or the number of chunks) or both are one."""
        first, second = np.broadcast_arrays(first, second)
        there = (first >= 0) & (second < len(self)) & (first < second)
        shared = np.zeros(there.shape)
        shared[there] = self.between(first[there], second[there])
        return shared

    def joined(self, first: np.ndarray) -> Chunks:
        """Larger chunks, which begin at the chunks ``first`` (ascending, from 0)."""
        return Chunks.of_places(self.alone, self.shared, self.least_shared, self.begin[first])

    def cut(self, limit: float, apart: np.ndarray | None = None) -> np.ndarray:
        """The chunks that begin a larger one each, so that none costs more than ``limit`` where one can help it.

        ``apart`` [K], True where a larger chunk must begin. Fewest duplicated cost: the shortest path over the places
        to cut; the starts that fit an end are a window that only moves on, so a monotone queue finds each minimum in
        constant time.
        """
        shared = self.shared[self.begin]
        reach = np.cumsum(self.cost - shared)  # A larger chunk j..i costs reach[i] - reach[j] + cost[j].
        # Among cuts that cost the same, fewer are better: every chunk costs a little more.
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
        """Begins of at most ``most`` runs of chunks that cost at most ``limit`` each, as long as they go; or None."""
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
        """Begins of at most ``most`` runs of chunks whose costliest is least, by threshold search."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        low, high = 0.0, float((self.cost - self.shared[self.begin]).sum())
        best = self.runs_within(high, most)
        while best is None:  # Rounding of the sum.
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
