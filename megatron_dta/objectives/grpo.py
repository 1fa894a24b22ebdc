"""The clipped policy-gradient loss of GRPO, per token, with the variants in common use.

With r = exp(logprob - old_logprob) and advantage A of the token, the loss to minimise is

    -min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A) + kl_loss_coef * KL - entropy_coef * entropy

- clipping and group-relative advantages (``advantages.py``): GRPO, arXiv 2402.03300; the ratio clip is PPO's, arXiv
  1707.06347. eps_clip_high above eps_clip is DAPO's "clip-higher", arXiv 2503.14476.
- dual clip, arXiv 1912.09729: for A < 0 the surrogate min(...) is bounded below by dual_clip * A, dual_clip > 1, so
  that a token that has become far more likely cannot dominate the step.
- KL to a reference policy by the estimators of J. Schulman, "Approximating KL divergence" (2020), with
  d = ref_logprob - logprob:  k1 = -d,  k2 = d^2 / 2,  k3 = exp(d) - 1 - d  (never negative; the one of GRPO).
  They are differentiated as they stand, as GRPO does. On the policy's own samples the expected gradient is that of
  KL(policy || reference) for k2, of KL(reference || policy) for k3, and 0 for k1, which is a measure and no penalty.

Every branch of min and clip is chosen by comparing values, and only the chosen one is computed: where clipping bounds
the loss an overflowing ratio costs nothing, and where it does not the loss overflows too, so that the trainer sees a
non-finite step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dta.errors import InputError
from megatron_dta.objectives.fields import LossFields, TokenLosses, masked

KL_TYPES = ("k1", "k2", "k3")


def grpo_loss(
    logprobs: Tensor,
    entropy: Tensor,
    fields: LossFields,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    dual_clip: float | None = None,
    kl_loss_coef: float = 0.0,
    kl_loss_type: str = "k3",
    entropy_coef: float = 0.0,
) -> TokenLosses:
    """Loss per token, all tensors [..., T]; ``fields.advantages`` is required, ``ref_logprobs`` with a KL term.

    Without ``old_logprobs`` the ratio is exactly 1 (on-policy) and the gradient is that of -A * logprob.
    Metrics: ratio, clip_fraction (1 where a clip, also the dual one, has cut the gradient), approx_kl (estimates
    KL(old || present) by r - 1 - log r), entropy, and ref_kl (the estimator chosen) with a KL term.
    """
    if fields.advantages is None:
        raise InputError("the objective needs advantages, or rewards to compute them from")
    mask = fields.loss_mask
    present = masked(logprobs, mask)
    old = present.detach() if fields.old_logprobs is None else masked(fields.old_logprobs.to(present.dtype), mask)
    advantages = masked(fields.advantages.to(present.dtype), mask)
    high = eps_clip if eps_clip_high is None else eps_clip_high
    surrogate, clipped = _clipped_surrogate(present - old, advantages, 1 - eps_clip, 1 + high, dual_clip)
    loss = -surrogate
    log_ratio = (present - old).detach()
    ratio = log_ratio.exp()
    metrics = {
        "ratio": masked(ratio, mask),
        "clip_fraction": masked(clipped.to(present.dtype), mask),
        "approx_kl": masked(torch.expm1(log_ratio) - log_ratio, mask),
        "entropy": masked(entropy.detach(), mask),
    }
    if kl_loss_coef:
        if fields.ref_logprobs is None:
            raise InputError("--kl-loss-coef above 0 needs the logprobs of a reference model")
        kl = reference_kl(present, masked(fields.ref_logprobs.to(present.dtype), mask), kl_loss_type)
        loss = loss + kl_loss_coef * kl
        metrics["ref_kl"] = masked(kl.detach(), mask)
    if entropy_coef:
        loss = loss - entropy_coef * masked(entropy, mask)
    return TokenLosses(loss, metrics)


def _clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """(max(min(r A, clip(r) A), dual_clip A if A < 0), whether the gradient is cut), both of ``log_ratio``'s shape.

    min(r A, clip(r) A) is clip(r) A exactly for A > 0 with r > high and for A < 0 with r < low, else r A.
    """
    ratio = log_ratio.detach().exp()
    above = (advantages > 0) & (ratio > high)
    below = (advantages < 0) & (ratio < low)
    # The constant ratio of the clipped branches; what stands in it elsewhere is not used.
    bound = torch.where(above, torch.full_like(ratio, high), low)
    clipped = above | below
    if dual_clip is not None:
        dual = (advantages < 0) & (ratio > dual_clip)
        bound = torch.where(dual, dual_clip, bound)
        clipped = clipped | dual
    # Where A is 0 the surrogate is 0 whatever the ratio, but inf * 0 is not; a NaN stays: the model is broken.
    constant = clipped | ((advantages == 0) & ~ratio.isnan())
    free_ratio = torch.where(constant, torch.zeros_like(log_ratio), log_ratio).exp()
    return torch.where(constant, bound, free_ratio) * advantages, clipped


def reference_kl(logprobs: Tensor, ref_logprobs: Tensor, kl_type: str) -> Tensor:
    """Estimate per token of KL(policy || reference) from tokens of the policy; formulas on top of the module."""
    difference = ref_logprobs - logprobs
    if kl_type == "k1":
        return -difference
    if kl_type == "k2":
        return difference.square() / 2
    if kl_type == "k3":
        return torch.expm1(difference) - difference
    raise InputError(f"--kl-loss-type {kl_type}: choose from {', '.join(KL_TYPES)}")
