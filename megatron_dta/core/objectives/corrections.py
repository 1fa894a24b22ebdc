"""Corrects by importance sampling for the different logprobs of sampler and trainer under the same weights.

The sampler drew a token with the probability that it recorded; the trainer computes another one for the same weights.
The weight w = exp(old_logprob - rollout_logprob), with old_logprob by the trainer and rollout_logprob by the sampler,
corrects the expectation. To bound its variance it is (truncation: E. Ionides, "Truncated importance sampling", 2008)

    truncate    min(w, high), at least ``low``
    mask        w where low <= w <= high, else 0: the token has no part in the surrogate

per token, or computed from the sum of the log ratios of the whole sequence. Weights carry no gradient, and the
denominator of the loss remains that of all trained tokens. Penalties (KL, entropy) are not weighted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dta.core.objectives.fields import masked

CORRECTION_MODES = ("truncate", "mask")
CORRECTION_LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class Correction:
    """Settings of the surrogate's weights; see the module for the names."""

    mode: str = "truncate"
    level: str = "token"
    low: float = 0.0
    high: float = 2.0

    def weights(self, old: Tensor, rollout: Tensor, loss_mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Weight of each token [..., T] and metrics; the arguments are 0 where ``loss_mask`` is False."""
        log_weight = (old - rollout).detach()
        if self.level == "sequence":
            log_weight = torch.where(loss_mask, log_weight.sum(-1, keepdim=True), 0.0)
        weight = log_weight.exp()
        outside = (weight > self.high) | (weight < self.low)
        if self.mode == "mask":
            used = torch.where(outside, 0.0, weight)
        else:
            used = torch.where(weight > self.high, self.high, torch.where(weight < self.low, self.low, weight))
        metrics = {
            "tis_weight": masked(used, loss_mask),
            "tis_clip_fraction": masked(outside.to(weight.dtype), loss_mask),
        }
        return used, metrics
