"""Models the seconds of a forward of n tokens: constant while reading the weights dominates, then linear.

    seconds(n) = base + per_token x max(0, n - knee)

``fit`` gets the three numbers from measured (tokens, seconds) pairs. The defaults are those of a 7B model in bfloat16
on one H100-class GPU. They are linear from the first token; this is conservative, as every drafted token has a cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_dta.core.common.errors import InputError


@dataclass(frozen=True)
class ForwardCost:
    """Attributes:
    base: seconds of a forward of few tokens.
    per_token: seconds of each token above ``knee``.
    knee: tokens up to which a forward takes ``base``.
    draft: CPU seconds to make the draft of one sequence, not overlapped with the device.
    """

    base: float = 8e-3
    per_token: float = 3e-5
    knee: float = 0.0
    draft: float = 5e-6

    def __post_init__(self) -> None:
        if not (self.base > 0 and self.per_token >= 0 and self.knee >= 0 and self.draft >= 0):
            raise InputError(f"a forward's cost needs base > 0 and no negative number: {self}")

    def seconds(self, tokens: np.ndarray | float) -> np.ndarray:
        """Seconds of forwards of ``tokens`` tokens each."""
        return self.base + self.per_token * np.maximum(0.0, np.asarray(tokens, np.float64) - self.knee)

    @classmethod
    def fit(cls, tokens: np.ndarray, seconds: np.ndarray, draft: float = 5e-6) -> ForwardCost:
        """Fits the model by least squares of the relative error, trying knees at and between the measured counts.

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
        return cls(*best, draft=draft)
