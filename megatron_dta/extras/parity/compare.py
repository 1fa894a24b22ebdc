"""Computes the largest relative errors between two outcomes.

An error is relative to the largest magnitude of the reference: of the loss, of all logprobs, and of each parameter's
gradient separately, so that a large parameter cannot hide a small one. A gradient that is zero except for rounding has
no magnitude of its own (that of queries and keys, if tokens see only themselves or all values are equal): its error is
relative to the largest of all gradients. A parameter that only one side has is an error of 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_dta.extras.parity.outcome import Outcome

# A gradient below this number of rounding units of the largest gradient is taken to be zero.
ROUNDING_UNITS = 16


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
    logprobs = np.concatenate(outcome.logprobs).astype(np.float64)
    expected = np.concatenate(reference.logprobs).astype(np.float64)
    worst, gradient = "", 0.0
    largest = max((_largest(tensor) for tensor in reference.gradients.values()), default=0.0)
    for name in sorted(outcome.gradients.keys() | reference.gradients.keys()):
        error = _gradient_error(outcome.gradients.get(name), reference.gradients.get(name), largest)
        if math.isnan(error) or error > gradient:
            worst, gradient = name, error
        if math.isnan(gradient):
            break  # no error is larger, and comparisons with NaN are false
    return ParityErrors(
        loss=_relative(abs(outcome.loss - reference.loss), abs(reference.loss)),
        logprob=_relative(float(np.abs(logprobs - expected).max()), float(np.abs(expected).max())),
        gradient=gradient,
        worst_parameter=worst,
    )


def _gradient_error(gradient: Tensor | None, expected: Tensor | None, largest: float) -> float:
    if gradient is None or expected is None:
        return 1.0
    rounding = min(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps)
    scale = _largest(expected)
    if scale <= ROUNDING_UNITS * rounding * largest:
        scale = largest
    return _relative(_largest(gradient.double() - expected.double()), scale)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _relative(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return difference / scale if scale else float("inf")
