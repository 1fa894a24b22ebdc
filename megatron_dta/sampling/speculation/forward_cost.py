"""Models the seconds of a forward of n tokens: constant while reading the weights dominates, then linear.

    seconds(n) = base + per_token x max(0, n - knee)

The defaults are those of a 7B model in bfloat16 on one H100-class GPU. They are linear from the first token; this is
conservative, as every drafted token has a cost.
"""

from __future__ import annotations

from dataclasses import dataclass

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
