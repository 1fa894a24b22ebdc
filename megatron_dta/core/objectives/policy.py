"""The loss of a policy-gradient step: a surrogate, a penalty against a reference, a bonus for entropy.

The loss of a token to minimize is, with a surrogate of ``surrogates.py`` and a weight of ``corrections.py``,

    -weight * surrogate + kl_loss_coef * KL - entropy_coef * entropy

The KL divergence to a reference policy is estimated as by J. Schulman, "Approximating KL divergence" (2020), with
d = ref_logprob - logprob:  k1 = -d,  k2 = d^2 / 2,  k3 = exp(d) - 1 - d  (never negative; the one of GRPO). The
estimates are differentiated directly, as in GRPO. On the policy's own samples the expected gradient is that of
KL(policy || reference) for k2, of KL(reference || policy) for k3, and 0 for k1, which is a metric and no penalty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.objectives.corrections import Correction
from megatron_dta.core.objectives.fields import LossFields, TokenLosses, masked
from megatron_dta.core.objectives.surrogates import MOST_LOG_RATIO, Clip, SurrogateFunction, bounded, clipped

KL_TYPES = ("k1", "k2", "k3")


@dataclass(frozen=True)
class Regularization:
    """The terms of the loss besides the surrogate; fields are named as their flags."""

    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"
    entropy_coef: float = 0.0


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    fields: LossFields,
    *,
    surrogate: SurrogateFunction = clipped,
    clip: Clip | None = None,
    correction: Correction | None = None,
    terms: Regularization | None = None,
) -> TokenLosses:
    """Loss per token, all tensors [..., T]; ``fields.advantages`` is required, ``ref_logprobs`` with a KL term,
    ``rollout_logprobs`` with a correction.

    Without ``old_logprobs`` the ratio is exactly 1 (on-policy) and the gradient is that of -A * logprob.
    Metrics: ratio (of the surrogate), ratio_bounded (1 where a token's log ratio was bounded), clip_fraction (1 where a
    clip, including the dual clip, has cut the gradient or the weight), approx_kl (estimates KL(old || current) by
    r - 1 - log r of the tokens' ratios), entropy, ref_kl (the chosen estimator) with a KL term, those of the
    correction, and with rollout logprobs sampler_logprob_gap = |logprob - rollout_logprob|. Maxima: ratio_max,
    sampler_logprob_gap_max.
    """
    if fields.advantages is None:
        raise InputError("the objective needs advantages, or rewards to compute them from")
    mask, terms = fields.loss_mask, terms or Regularization()
    present = masked(logprobs, mask)
    old = present.detach() if fields.old_logprobs is None else masked(fields.old_logprobs.to(present.dtype), mask)
    advantages = masked(fields.advantages.to(present.dtype), mask)
    surrogates = surrogate(present, old, advantages, mask, clip or Clip())
    log_ratio = (present - old).detach()
    is_far = (log_ratio.abs() > MOST_LOG_RATIO).to(present.dtype)
    log_ratio = bounded(log_ratio)
    metrics = {
        "ratio_bounded": masked(is_far, mask),
        "ratio": masked(surrogates.ratio, mask),
        "clip_fraction": masked(surrogates.clipped.to(present.dtype), mask),
        "approx_kl": masked(torch.expm1(log_ratio) - log_ratio, mask),
        "entropy": masked(entropy.detach(), mask),
    }
    maxima = {"ratio_max": metrics["ratio"]}
    loss = -surrogates.value
    if fields.rollout_logprobs is not None:
        rollout = masked(fields.rollout_logprobs.to(present.dtype), mask)
        maxima["sampler_logprob_gap_max"] = metrics["sampler_logprob_gap"] = (present.detach() - rollout).abs()
    if correction is not None:
        if fields.rollout_logprobs is None:
            raise InputError("--use-tis needs the logprobs that the sampler recorded")
        weights, weight_metrics = correction.weights(old, rollout, mask)
        # A surrogate may be infinite where its weight is 0.
        loss = torch.where(weights == 0, 0.0, loss * weights)
        metrics |= weight_metrics
    if terms.kl_loss_coef:
        if fields.ref_logprobs is None:
            raise InputError("--kl-loss-coef above 0 needs the logprobs of a reference model")
        kl = reference_kl(present, masked(fields.ref_logprobs.to(present.dtype), mask), terms.kl_loss_type)
        loss = loss + terms.kl_loss_coef * kl
        metrics["ref_kl"] = masked(kl.detach(), mask)
    if terms.entropy_coef:
        loss = loss - terms.entropy_coef * masked(entropy, mask)
    return TokenLosses(loss, metrics, maxima)


def reference_kl(logprobs: Tensor, ref_logprobs: Tensor, kl_type: str) -> Tensor:
    """Estimate per token of KL(policy || reference) from tokens of the policy; see the module for the formulas."""
    difference = ref_logprobs - logprobs
    if kl_type == "k1":
        return -difference
    if kl_type == "k2":
        return difference.square() / 2
    if kl_type == "k3":
        difference = difference.clamp(max=MOST_LOG_RATIO)  # exp must not overflow; see ``surrogates``
        return torch.expm1(difference) - difference
    raise InputError(f"--kl-loss-type {kl_type}: choose from {', '.join(KL_TYPES)}")


def reward_kl(logprobs: np.ndarray, ref_logprobs: np.ndarray, kl_type: str) -> np.ndarray:
    """The same estimate for arrays, float64, without a gradient: for penalties in the reward."""
    pair = (torch.from_numpy(np.asarray(values, np.float64)) for values in (logprobs, ref_logprobs))
    return reference_kl(*pair, kl_type).numpy()
