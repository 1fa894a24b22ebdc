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


def candidate_lengths(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """float64 [CANDIDATES]: equally likely total lengths, ascending; zeros (nothing known) without any past sample.

    Args:
        own: lengths of the problem's past samples. others: lengths of all recent samples.
    """
    if not len(others):
        return np.zeros(CANDIDATES)
    share = len(own) / (len(own) + 2.0)
    count = round(share * CANDIDATES)
    parts = []
    if count:
        # A few samples do not show how far the next one may stray.
        spread = np.geomspace(0.8, 1.25, count) if count > 1 else np.ones(1)
        parts.append(_quantiles(own, count) * spread)
    parts.append(_quantiles(others, CANDIDATES - count))
    return np.sort(np.concatenate(parts))


def _quantiles(values: np.ndarray, count: int) -> np.ndarray:
    """float64 [count]: the middles of ``count`` equal parts, as ``numpy.quantile`` interpolates them."""
    at = (np.arange(count) + 0.5) / count * (len(values) - 1)
    return np.interp(at, np.arange(len(values)), np.sort(values))


def last_probabilities(candidates: np.ndarray, so_far: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """float64 [n], summing to 1: the probability that each sample is the last one to end.

    Args:
        candidates: float64 [n, CANDIDATES] of ``candidate_lengths``. so_far: [n] generated tokens.
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
