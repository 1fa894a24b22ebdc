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

MATCH_EDGES = np.array([2, 3, 4, 6, 9, 13])
PROBABILITY_EDGES = np.array([0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 0.999999])
SUPPORT_EDGES = np.array([2, 4])
POSITION_EDGES = np.array([1, 2, 3, 5, 8, 13, 20])
LEAN = 3.0
"""Weight of the coarser estimate, in counts."""
KEPT_PER_STEP = 0.5


class AcceptanceTable:
    """Counts by (match, support, probability, position)."""

    def __init__(self) -> None:
        shape = (len(MATCH_EDGES) + 1, len(SUPPORT_EDGES) + 1, len(PROBABILITY_EDGES) + 1)
        self._shape = (*shape, len(POSITION_EDGES) + 1)
        self._drafted = np.zeros(self._shape)
        self._accepted = np.zeros(self._shape)
        self._prior = _prior(shape)
        self._positions = np.searchsorted(POSITION_EDGES, np.arange(256), side="right")
        self._estimates: np.ndarray | None = None
        self.verified = 0
        """Number of drafts counted so far."""

    def probabilities(self, matches: np.ndarray, supports: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        """Probability that positions 0 .. j are all accepted, float64 [n, width]; non-increasing along a row.

        Args:
            matches, supports: int [n], length of the match and its number of occurrences.
            probabilities: float64 [n, width], the tree's probabilities; see ``Drafts``.
        """
        if self._estimates is None:
            coarse_drafted, coarse_accepted = self._drafted.sum(-1), self._accepted.sum(-1)
            coarse = (coarse_accepted + LEAN * self._prior) / (coarse_drafted + LEAN)
            self._estimates = ((self._accepted + LEAN * coarse[..., None]) / (self._drafted + LEAN)).reshape(-1)
        estimates = self._estimates[self._cells(matches, supports, probabilities)]
        return np.minimum.accumulate(estimates, axis=1)

    def update(
        self,
        matches: np.ndarray,
        supports: np.ndarray,
        probabilities: np.ndarray,
        drafted: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Count n verified drafts: the first ``accepted`` [n] of ``drafted`` [n] tokens were right."""
        width = int(drafted.max(initial=0))
        if not width:
            return
        self.verified += int((drafted > 0).sum())
        positions = np.arange(width)
        was_drafted = positions < drafted[:, None]
        cells = self._cells(matches, supports, probabilities[:, :width])
        size = self._drafted.size
        self._drafted += np.bincount(cells[was_drafted], minlength=size).reshape(self._shape)
        was_accepted = positions < np.minimum(accepted, drafted)[:, None]
        self._accepted += np.bincount(cells[was_accepted], minlength=size).reshape(self._shape)
        self._estimates = None

    def end_step(self) -> None:
        self._drafted *= KEPT_PER_STEP
        self._accepted *= KEPT_PER_STEP
        self._estimates = None

    def state_dict(self) -> dict[str, np.ndarray]:
        verified = np.array(self.verified, np.int64)
        return {"drafted": self._drafted.copy(), "accepted": self._accepted.copy(), "verified": verified}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self._drafted = np.array(state["drafted"], np.float64)
        self._accepted = np.array(state["accepted"], np.float64)
        self.verified = int(state["verified"])
        self._estimates = None

    def _cells(self, matches: np.ndarray, supports: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
        rows = MATCH_EDGES.searchsorted(matches, "right") * self._shape[1]
        rows = rows + SUPPORT_EDGES.searchsorted(supports, "right")
        cells = (rows * self._shape[2])[:, None] + PROBABILITY_EDGES.searchsorted(probabilities, "right")
        return cells * self._shape[3] + self._positions[: probabilities.shape[1]]


def _prior(shape: tuple[int, int, int]) -> np.ndarray:
    """The prior estimate: the tree's probability, trusted more after longer and more frequent matches."""
    matches = np.array([1, 2, 3, 5, 8, 12, 16])[:, None, None]
    supports = np.array([1, 2, 4])[None, :, None]
    probabilities = np.array([0.15, 0.28, 0.42, 0.58, 0.72, 0.87, 0.97, 1.0])[None, None, :]
    trust = matches * supports / (matches * supports + 2.0)
    return np.broadcast_to(0.9 * trust * probabilities, shape)
