"""Compares a batch computed in other numbers, such as FP8, with the same batch in the numbers of a reference.

Both sides have the same weights and the same plan. The logprobs of trained tokens are compared by the magnitude of
their differences, and by estimates of the Kullback-Leibler divergence from the reference's to the candidate's
distribution (http://joschu.net/blog/kl-approx.html), which are unbiased if the reference has sampled the tokens.
Gradients are compared by angle, distance and length, for all parameters together and for each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_dta.extras.parity.outcome import Outcome


@dataclass(frozen=True)
class LogprobDistance:
    """Differences between the logprobs of ``tokens`` trained tokens, candidate minus reference.

    Attributes:
        mean: signed.
        mean_absolute, percentile_99, largest: of the magnitudes.
        kl_k1: estimate of the divergence by the mean difference; may be negative.
        kl_k3: estimate by exp(d) - 1 - d for a difference d; never negative.
    """

    tokens: int
    mean: float
    mean_absolute: float
    percentile_99: float
    largest: float
    kl_k1: float
    kl_k3: float


@dataclass(frozen=True)
class GradientDistance:
    """Attributes:
    cosine: cosine of the angle between the two gradients.
    distance: length of the difference, relative to the reference's length.
    norm_ratio: the candidate's length, relative to the reference's.
    """

    cosine: float
    distance: float
    norm_ratio: float


@dataclass(frozen=True)
class PrecisionReport:
    """Distances of a candidate from a reference.

    Attributes:
        loss, reference_loss: of the batch.
        gradient: of all parameters together.
        parameters: of each, by its name.
    """

    loss: float
    reference_loss: float
    logprobs: LogprobDistance
    gradient: GradientDistance
    parameters: dict[str, GradientDistance]

    def lowest_cosines(self, count: int) -> list[tuple[str, GradientDistance]]:
        """The parameters whose gradients differ most in direction; NaN comes first."""
        order = sorted(self.parameters.items(), key=lambda item: np.nan_to_num(item[1].cosine, nan=-2.0))
        return order[:count]


def report_precision(candidate: Outcome, reference: Outcome, trained: list[np.ndarray]) -> PrecisionReport:
    """Distances of ``candidate`` from ``reference``, computed in float64 where the gradients are.

    Args:
        trained: per sequence, bool [T]; which tokens' logprobs count.

    Raises:
        ValueError: the two have gradients of different parameters.
    """
    if candidate.gradients.keys() != reference.gradients.keys():
        names = sorted(candidate.gradients.keys() ^ reference.gradients.keys())
        raise ValueError(f"only one side has a gradient of {names[0]}")
    sums = {name: _sums(candidate.gradients[name], reference.gradients[name]) for name in reference.gradients}
    return PrecisionReport(
        loss=candidate.loss,
        reference_loss=reference.loss,
        logprobs=_logprob_distance(candidate, reference, trained),
        gradient=_gradient_distance(torch.stack(list(sums.values())).sum(0)),
        parameters={name: _gradient_distance(products) for name, products in sums.items()},
    )


def _logprob_distance(candidate: Outcome, reference: Outcome, trained: list[np.ndarray]) -> LogprobDistance:
    pairs = zip(candidate.logprobs, reference.logprobs, trained, strict=True)
    difference = np.concatenate([(new.astype(np.float64) - old)[mask] for new, old, mask in pairs])
    magnitude = np.abs(difference)
    return LogprobDistance(
        tokens=len(difference),
        mean=float(difference.mean()),
        mean_absolute=float(magnitude.mean()),
        percentile_99=float(np.percentile(magnitude, 99)),
        largest=float(magnitude.max()),
        kl_k1=float(-difference.mean()),
        kl_k3=float(np.mean(np.expm1(difference) - difference)),
    )


def _sums(candidate: Tensor, reference: Tensor) -> Tensor:
    """Float64 [4] on the host: inner product, squares of the two, square of the difference."""
    new, old = candidate.flatten().double(), reference.to(candidate.device).flatten().double()
    return torch.stack([new @ old, new @ new, old @ old, (new - old).square().sum()]).cpu()


def _gradient_distance(sums: Tensor) -> GradientDistance:
    product, new, old, difference = sums.tolist()
    if new == old == 0.0:
        return GradientDistance(1.0, 0.0, 1.0)  # both are zero, as for a parameter without any contribution
    if old == 0.0:
        return GradientDistance(0.0, float("inf"), float("inf"))
    return GradientDistance(
        cosine=product / (new * old) ** 0.5 if new else 0.0,
        distance=(difference / old) ** 0.5,
        norm_ratio=(new / old) ** 0.5,
    )
