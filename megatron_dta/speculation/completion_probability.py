"""Estimates the probability that each running sample is the last one of its batch to complete.

A batch takes c_base x (forwards until the last sample ends) + c_tok x (tokens). An accepted draft always saves the cost
of one token. It saves a forward only if its sample is the last to end. ``completion_probability`` estimates how likely
that is from each sample's possible lengths, its current length and its speed in tokens per forward. The probabilities
sum to 1, and the inverse of a sample's probability is the number of samples that share its forwards.

Example: one problem, three running samples whose past lengths are all alike, the same current length and speed. Each is
the last one with probability 1/3, so three samples share a forward and an accepted token is worth c_base / 3 + c_tok.
"""

from __future__ import annotations

import numpy as np

CANDIDATES = 12
"""Number of equally likely lengths that represent a sample's length distribution."""
_TIMES = 48
"""Points in time at which the end times are compared."""
_LINDY = 0.5
"""Assumed remaining length of a sample that exceeds all its candidates, as a share of its current length."""


def candidate_lengths(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """float64 [CANDIDATES]: equally likely total lengths, ascending; all zero if there are no past samples.

    Args:
        own: lengths of the problem's past samples.
        others: lengths of all recent samples.
    """
    if not len(others):
        return np.zeros(CANDIDATES)
    share = len(own) / (len(own) + 2.0)
    count = round(share * CANDIDATES)
    parts = []
    if count:
        # A few samples underestimate the spread of the next one.
        spread = np.geomspace(0.8, 1.25, count) if count > 1 else np.ones(1)
        parts.append(_quantiles(own, count) * spread)
    parts.append(_quantiles(others, CANDIDATES - count))
    return np.sort(np.concatenate(parts))


def _quantiles(values: np.ndarray, count: int) -> np.ndarray:
    """float64 [count]: midpoint quantiles of ``count`` equal parts, interpolated as in ``numpy.quantile``."""
    at = (np.arange(count) + 0.5) / count * (len(values) - 1)
    return np.interp(at, np.arange(len(values)), np.sort(values))


def completion_probability(candidates: np.ndarray, so_far: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """float64 [n], summing to 1: the probability that each sample is the last one to end.

    Args:
        candidates: float64 [n, CANDIDATES] from ``candidate_lengths``.
        so_far: [n], generated tokens.
        speed: [n], expected tokens per forward of each sample; positive.
    """
    if len(so_far) == 1 or not candidates.any():
        return np.full(len(so_far), 1 / len(so_far))
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
