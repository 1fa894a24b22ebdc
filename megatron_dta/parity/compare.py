"""Largest relative errors between two outcomes.

An error is relative to the largest magnitude of what it is compared with: of the loss, of all logprobs, and of each
parameter's gradient on its own, so a small parameter cannot hide behind a large one. A parameter that only one side
has is an error of 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megatron_dta.parity.outcome import Outcome


@dataclass(frozen=True)
class ParityErrors:
    """Relative errors, and the parameter with the largest one."""

    loss: float
    logprob: float
    gradient: float
    worst_parameter: str

    def largest(self) -> float:
        """The largest of the three; NaN if any of them is."""
        return float(np.max([self.loss, self.logprob, self.gradient]))


def compare_outcomes(outcome: Outcome, reference: Outcome) -> ParityErrors:
    """Errors of ``outcome`` against ``reference``."""
    logprobs = np.concatenate(outcome.logprobs).astype(np.float64)
    expected = np.concatenate(reference.logprobs).astype(np.float64)
    worst, gradient = "", 0.0
    for name in sorted(outcome.gradients.keys() | reference.gradients.keys()):
        error = _gradient_error(outcome.gradients.get(name), reference.gradients.get(name))
        if not error <= gradient:  # a NaN wins
            worst, gradient = name, error
    return ParityErrors(
        loss=abs(outcome.loss - reference.loss) / abs(reference.loss),
        logprob=float(np.abs(logprobs - expected).max() / np.abs(expected).max()),
        gradient=gradient,
        worst_parameter=worst,
    )


def _gradient_error(gradient: Tensor | None, expected: Tensor | None) -> float:
    if gradient is None or expected is None:
        return 1.0
    gradient, expected = gradient.double(), expected.double()
    return float((gradient - expected).abs().max() / expected.abs().max())
