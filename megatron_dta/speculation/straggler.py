"""Which running sample will be the last? Its forwards are the ones that make a batch end later.

The time of a batch is c_base x (forwards until the last sample ends) + c_tok x (tokens). An accepted draft always saves
the token that the sample need not compute again; it saves a part of c_base only in so far as the sample is the last to
end. ``last_probabilities`` estimates that probability from each sample's possible lengths, its length so far, and the
speed with which it advances. The probabilities sum to 1, so their inverse is "how many samples share a forward".
"""

from __future__ import annotations

import numpy as np

CANDIDATES = 12
_TIMES = 48
_LINDY = 0.5
"""A sample longer than all its candidates is expected to go on for up to this share of its length."""


class CandidateLengths:
    """Equally likely total lengths of samples, while the lengths of recent samples stay what they are.

    Args:
        others: lengths of all recent samples.
    """

    def __init__(self, others: np.ndarray) -> None:
        self._others = others
        self._parts: dict[int, np.ndarray] = {}

    def of(self, own: np.ndarray) -> np.ndarray:
        """float64 [CANDIDATES], ascending; zeros (nothing known) without any recent sample.

        Args:
            own: lengths of the problem's past samples.
        """
        if not len(self._others):
            return np.zeros(CANDIDATES)
        share = len(own) / (len(own) + 2.0)
        count = round(share * CANDIDATES)
        part = self._part_of_others(CANDIDATES - count)
        if not count:
            return part.copy()
        # A few samples do not show how far the next one may stray.
        spread = np.geomspace(0.8, 1.25, count) if count > 1 else np.ones(1)
        return np.sort(np.concatenate([np.quantile(own, (np.arange(count) + 0.5) / count) * spread, part]))

    def _part_of_others(self, count: int) -> np.ndarray:
        """``count`` quantiles of all recent samples: sorting thousands of lengths for every sample would take long."""
        if count not in self._parts:
            self._parts[count] = np.quantile(self._others, (np.arange(count) + 0.5) / max(count, 1))
        return self._parts[count]


def last_probabilities(candidates: np.ndarray, so_far: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """float64 [n], summing to 1: the probability that each sample is the last one to end.

    Args:
        candidates: float64 [n, CANDIDATES] of ``CandidateLengths``. so_far: [n] generated tokens.
        speed: [n], tokens per forward that are expected of each sample, positive.
    """
    if len(so_far) == 1 or not candidates.any():
        return np.full(len(so_far), 1 / len(so_far))  # nothing tells them apart
    steps = (np.arange(CANDIDATES) + 1) / CANDIDATES
    later = so_far[:, None] + 1 + _LINDY * (so_far[:, None] + 16.0) * steps
    total = np.where(candidates > so_far[:, None], candidates, later)
    ends = np.sort((total - so_far[:, None]) / speed[:, None], axis=1)
    times = np.unique(np.quantile(ends, np.linspace(0.3, 1, _TIMES) ** 0.5))
    # Share of each sample's candidates that have ended by each time: [n, times].
    ended = (ends[:, :, None] <= times).mean(1)
    with np.errstate(divide="ignore"):
        logs = np.log(np.maximum(ended, 1e-3))
    others = np.exp(logs.sum(0) - logs)
    mass = np.diff(ended, axis=1, prepend=0.0)
    weights = (mass * others).sum(1) + 1e-9
    return weights / weights.sum()
