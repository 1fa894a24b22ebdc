"""Fits the cost of a forward to measured seconds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.speculation.forward_cost import ForwardCost


def fitted_cost(tokens: np.ndarray, seconds: np.ndarray) -> ForwardCost:
    """A forward's cost, by least squares of the relative error, trying knees at and between the measured counts.

    Raises:
        InputError: fewer than three different counts, or seconds that no positive cost fits.
    """
    tokens, seconds = np.asarray(tokens, np.float64), np.asarray(seconds, np.float64)
    if len(np.unique(tokens)) < 3 or not seconds.min() > 0:
        raise InputError("measured forwards: at least three different token counts with their seconds are needed")
    counts = np.unique(tokens)
    # A slope needs two counts beyond the knee.
    knees = np.concatenate([[0.0], *(np.linspace(a, b, 9) for a, b in pairwise(counts[:-1]))])
    best, least = None, np.inf
    for knee in knees:
        rows = np.stack([np.ones_like(tokens), np.maximum(0.0, tokens - knee)], axis=1) / seconds[:, None]
        base, slope = np.linalg.lstsq(rows, np.ones_like(tokens), rcond=None)[0]
        if slope < 0:
            base, slope = (1 / seconds).sum() / (1 / seconds**2).sum(), 0.0
        error = float(np.sum((rows @ np.array([base, slope]) - 1) ** 2))
        if base > 0 and error < least - 1e-15:
            best, least = (float(base), float(slope), float(knee)), error
    if best is None:
        raise InputError("measured forwards: no positive cost of a forward fits them")
    return ForwardCost(*best)
