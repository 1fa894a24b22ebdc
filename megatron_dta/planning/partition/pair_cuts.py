"""Divides the sequence runs of two ranks in a new way: one rank gets a contiguous stretch of them, the other the rest.

Moves and swaps take single runs. This finds a better division of a pair of ranks when many runs would have to move at
once. It also joins work that both ranks had computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dta.planning.partition.sequence_runs import SequenceRuns

# Above twice this many runs, the stretch may begin and end only at this many places where neighbours share least and
# at this many evenly spaced places.
MOST_PLACES = 24


@dataclass(frozen=True)
class PairCuts:
    """Every division of ``members`` [m] into a contiguous stretch and the rest, with P places to cut.

    Attributes:
        members: the runs of both ranks, ascending.
        places: int64 [P], ascending from 0 to m; the stretch is ``members[places[i]:places[j]]``.
        slower: float64 [P, P], cost of the slower part; infinite if i >= j or if a part is empty.
        total: float64 [P, P], cost of both parts.
    """

    members: np.ndarray
    places: np.ndarray
    slower: np.ndarray
    total: np.ndarray

    @classmethod
    def of(cls, runs: SequenceRuns, members: np.ndarray) -> PairCuts:
        """The divisions of two or more runs."""
        count = len(members)
        shared = runs.between(members[:-1], members[1:])
        places = np.arange(count + 1)
        if count > 2 * MOST_PLACES:
            least = np.argsort(shared, kind="stable")[:MOST_PLACES] + 1
            even = np.linspace(0, count, MOST_PLACES).astype(np.int64)
            places = np.unique(np.concatenate([least, even]))
        cost = np.concatenate([[0.0], np.cumsum(runs.cost[members])])
        join = np.concatenate([[0.0], np.cumsum(shared)])
        begin, end = places[:, None], places[None, :]
        inner = cost[end] - cost[begin] - (join[np.maximum(end - 1, 0)] - join[np.minimum(begin, count - 1)])
        head = cost[places] - join[np.maximum(places - 1, 0)]
        tail = cost[count] - cost[places] - (join[count - 1] - join[np.minimum(places, count - 1)])
        before = np.where(begin > 0, members[np.maximum(begin - 1, 0)], -1)
        after = np.where(end < count, members[np.minimum(end, count - 1)], len(runs))
        rest = head[:, None] + tail[None, :] - runs.between_held(before, after)
        slower = np.maximum(inner, rest)
        slower[(begin >= end) | (end - begin == count)] = np.inf
        return cls(members, places, slower, inner + rest)

    def inside(self, choice: int) -> np.ndarray:
        """Whether each member is in the stretch, bool [m], for a flat index into ``slower``."""
        begin, end = divmod(choice, len(self.places))
        inside = np.zeros(len(self.members), dtype=bool)
        inside[self.places[begin] : self.places[end]] = True
        return inside
