"""Estimates the probability that a drafted token is accepted, from the outcomes of verified drafts.

The count ratios of a suffix tree are not calibrated: after one occurrence the ratio is 1. A table therefore counts
drafted and accepted tokens by the length of the match, its number of occurrences, the tree's probability and the
position in the draft. A cell is smoothed with the estimate without positions, and that one with a fixed prior, which
matters only for the first drafts of a run. A position counts as accepted if the draft was right up to and including it,
so a rejection counts for all later positions too.

The counts are halved after every policy step, so the table follows the policy and the growing trees.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.sampling.speculation.native import load_library
from megatron_dta.sampling.speculation.suffix_forest import Drafts

EDGES = (
    (2, 3, 4, 6, 9, 13),
    (2, 4),
    (0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 0.999999),
    (1, 2, 3, 5, 8, 13, 20),
)
"""Of match, support, probability and position."""
LEAN = 3.0
"""Weight of the coarser estimate, in counts."""
KEPT_PER_STEP = 0.5


class AcceptanceTable:
    """Counts by (match, support, probability, position), on which functions in C work: a GPU may wait for them."""

    def __init__(self) -> None:
        self._edges, self._shape = np.concatenate(EDGES), np.array([len(part) + 1 for part in EDGES], np.int32)
        self._drafted, self._accepted = np.zeros((2, *self._shape))
        self._prior = _prior(tuple(self._shape[:3]))
        self._library = load_library()
        self._estimate()
        self.verified = 0
        """Number of drafts counted so far."""

    def _estimate(self) -> None:
        coarse_drafted, coarse_accepted = self._drafted.sum(-1), self._accepted.sum(-1)
        coarse = (coarse_accepted + LEAN * self._prior) / (coarse_drafted + LEAN)
        self._estimates = (self._accepted + LEAN * coarse[..., None]) / (self._drafted + LEAN)

    def probabilities(self, drafts: Drafts, width: int) -> np.ndarray:
        """Probability that positions 0 .. j are all accepted, float64 [n, width]; non-increasing along a row. Those
        after a draft's last token have no meaning."""
        accept = np.empty((len(drafts.lengths), width))
        sizes, arrays = (len(accept), width, drafts.probabilities.shape[1]), (self._estimates, accept)
        self._library.sf_accept(*sizes, *self._cells_of(drafts), *(array.ctypes.data for array in arrays))
        return accept

    def update(self, drafts: Drafts, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Count n verified drafts: the first ``accepted`` of ``drafted`` tokens (int64 [n]) were right."""
        if not drafted.any():
            return
        self.verified += int((drafted > 0).sum())
        arrays = (
            *(np.ascontiguousarray(counts, np.int64) for counts in (drafted, accepted)),
            self._drafted,
            self._accepted,
        )
        sizes, addresses = drafts.probabilities.shape, (array.ctypes.data for array in arrays)
        self._library.sf_learn(*sizes, *self._cells_of(drafts), *addresses)
        self._estimate()

    def _cells_of(self, drafts: Drafts) -> tuple[int, ...]:
        """The addresses of what decides about cells."""
        arrays = drafts.matches, drafts.supports, drafts.probabilities, self._shape, self._edges
        return tuple(array.ctypes.data for array in arrays)

    def end_step(self) -> None:
        self._drafted *= KEPT_PER_STEP
        self._accepted *= KEPT_PER_STEP
        self._estimate()

    def state_dict(self) -> dict[str, np.ndarray]:
        verified = np.array(self.verified, np.int64)
        return {"drafted": self._drafted.copy(), "accepted": self._accepted.copy(), "verified": verified}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        counts = (np.array(state[name], np.float64).reshape(self._shape) for name in ("drafted", "accepted"))
        self._drafted, self._accepted = counts
        self.verified = int(state["verified"])
        self._estimate()


def _prior(shape: tuple[int, int, int]) -> np.ndarray:
    """The prior estimate: the tree's probability, trusted more after longer and more frequent matches."""
    matches = np.array([1, 2, 3, 5, 8, 12, 16])[:, None, None]
    supports = np.array([1, 2, 4])[None, :, None]
    probabilities = np.array([0.15, 0.28, 0.42, 0.58, 0.72, 0.87, 0.97, 1.0])[None, None, :]
    trust = matches * supports / (matches * supports + 2.0)
    return np.broadcast_to(0.9 * trust * probabilities, shape)
