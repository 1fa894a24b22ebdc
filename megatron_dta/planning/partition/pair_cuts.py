"""Divides what two ranks hold anew: one gets a run of it in depth-first order, the other what stands around the run.

Moves and swaps take single chunks; this finds a better division of a pair where many would have to move at once. It
also brings together what the two ranks had both computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dta.planning.partition.sequence_runs import Chunks

# Places at which the run may begin and end: all, or so many where least is shared and so many at even distances.
MOST_PLACES = 24


@dataclass(frozen=True)
class PairCuts:
    """Every division of ``members`` [m] into a run and the rest, P places to cut.

    Attributes:
        members: chunks of both ranks, ascending.
        places: int64 [P], ascending from 0 to m; the run is ``members[places[i]:places[j]]``.
        slower: float64 [P, P], cost of the slower part; infinite where i >= j and where a part is empty.
        total: float64 [P, P], cost of both.
    """

    members: np.ndarray
    places: np.ndarray
    slower: np.ndarray
    total: np.ndarray

    @classmethod
    def of(cls, chunks: Chunks, members: np.ndarray) -> PairCuts:
        """The divisions of these chunks, two or more."""
        count = len(members)
        shared = chunks.between(members[:-1], members[1:])
        places = np.arange(count + 1)
        if count > 2 * MOST_PLACES:
            least = np.argsort(shared, kind="stable")[:MOST_PLACES] + 1
            even = np.linspace(0, count, MOST_PLACES).astype(np.int64)
            places = np.unique(np.concatenate([least, even]))
        cost = np.concatenate([[0.0], np.cumsum(chunks.cost[members])])
        join = np.concatenate([[0.0], np.cumsum(shared)])
        begin, end = places[:, None], places[None, :]
        run = cost[end] - cost[begin] - (join[np.maximum(end - 1, 0)] - join[np.minimum(begin, count - 1)])
        head = cost[places] - join[np.maximum(places - 1, 0)]
        tail = cost[count] - cost[places] - (join[count - 1] - join[np.minimum(places, count - 1)])
        before = np.where(begin > 0, members[np.maximum(begin - 1, 0)], -1)
        after = np.where(end < count, members[np.minimum(end, count - 1)], len(chunks))
        rest = head[:, None] + tail[None, :] - chunks.between_held(before, after)
        slower = np.maximum(run, rest)
        slower[(begin >= end) | (end - begin == count)] = np.inf
        return cls(members, places, slower, run + rest)

    def run(self, choice: int) -> np.ndarray:
        """Whether each member is in the run, bool [m], of a flat index into ``slower``."""
        begin, end = divmod(choice, len(self.places))
        inside = np.zeros(len(self.members), dtype=bool)
        inside[self.places[begin] : self.places[end]] = True
        return inside
